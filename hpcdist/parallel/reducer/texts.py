"""The texts of the reducer's errors.

The first words are those of torch's reducer, because users and tools search for them.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMES = 50


def _list(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    shown = list(names[:_MAX_NAMES]) + ([f"and {more} more"] if more > 0 else [])
    return ", ".join(shown)


def unused(rank: int, missing: Sequence[str], total: int) -> str:
    """Parameters without a gradient where every parameter was expected to get one."""
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one: "
        f"on rank {rank}, backward ended without a gradient for {len(missing)} of "
        f"{total} parameters: {_list(missing)}. They took no part in the loss, so "
        "there is nothing to average, and this pass's gradients must not be used. What to do: "
        "(1) use every parameter in forward and every output in the loss; or (2) enable the search "
        "for unused parameters by passing the keyword argument `find_unused_parameters=True` to "
        "DistributedDataParallel on all ranks; or (3) if the same parameters are unused in each "
        "iteration, pass `static_graph=True`; or (4) call requires_grad_(False) on "
        "parameters that are not trained before the module is wrapped."
    )


def twice(name: str) -> str:
    """A second gradient for a parameter whose first one is on its way."""
    return (
        f"Expected to mark a variable ready only once: parameter {name} got "
        "its gradient a second time in one backward pass, after its first one was taken "
        "for averaging. This happens when it is used outside of the wrapped module's "
        "forward (then compute the loss from it inside), or in several re-entrant activation "
        "checkpoints: use torch.utils.checkpoint with use_reentrant=False, or, if every iteration "
        "does the same, pass `static_graph=True`."
    )


def outside(name: str) -> str:
    """A gradient for a parameter that forward's outputs do not lead to."""
    return (
        f"Expected to mark a variable ready only once: parameter {name} was taken for unused, "
        "because no output of forward leads to it, and then got a gradient. This happens when it "
        "is used outside of the wrapped module's forward (then move that use into forward), or in "
        "a re-entrant activation checkpoint, into which the search cannot look: use "
        "torch.utils.checkpoint with use_reentrant=False. Or, if every iteration does the same, "
        "pass `static_graph=True` in place of `find_unused_parameters=True`."
    )


def changed(name: str, before: int, now: str) -> str:
    """A static graph that was not."""
    return (
        "Your training graph has changed in this iteration, which is not compatible with "
        f"static_graph set to True: parameter {name} got {before} gradient"
        f"{'' if before == 1 else 's'} in the first iteration, and {now} in this one. Train the "
        "same graph in each iteration, or pass `find_unused_parameters=True` in place of "
        "`static_graph=True`."
    )


def nans(names: Sequence[str]) -> str:
    """Gradients that contain NaNs, after the text of the reduction that was refused for them."""
    return f" On this rank these parameters' gradients contain NaNs: {_list(names)}."


def create_graph() -> str:
    """A backward whose gradients would have to be differentiated."""
    return (
        "DistributedDataParallel does not support backward(create_graph=True): gradients "
        "of gradients would not be averaged between ranks. Use torch.autograd.grad for the "
        "inner derivative, or call backward(create_graph=True) under no_sync()."
    )


def earlier_failure(rank: int, failure: BaseException) -> str:
    """Another forward on top of a backward that went wrong."""
    return (
        f"Expected to have finished reduction in the prior iteration, but on rank "
        f"{rank} an earlier backward pass failed "
        f"({type(failure).__name__}: {failure}), so gradients and parameters "
        "may differ between ranks. To go on, wrap the module in a new "
        "DistributedDataParallel on all ranks, which copies rank 0's parameters to all."
    )


def held(before: str) -> str:
    """A backward pass that the caller has not ended yet."""
    return f"finalize_backward() must be called after the last backward pass, before {before}"
