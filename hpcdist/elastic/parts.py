"""Copies of what a training step changes: of modules, optimizers, and objects with a state."""

from __future__ import annotations

import copy
import hashlib
from typing import Any, Protocol

import torch

from hpcdist.elastic import buffers, passes
from hpcdist.elastic.gradients import Gradients
from hpcdist.elastic.sharded import (
    forget_pass,
    has_shards,
    is_shard,
    local,
    reshard,
    waits,
    with_shards,
    without_shards,
)
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.world import world
from hpcdist.parallel import optimizer_state
from hpcdist.parallel.zero import ZeroRedundancyOptimizer

#: Entries of the copy of a module.
_PARAMETERS, _BUFFERS, _GRADIENTS = "parameters", "buffers", "gradients"
_PASSES = "passes"
#: Entry of the state of an optimizer.
_GROUPS = "param_groups"


class Part(Protocol):
    """One thing that is committed and rolled back."""

    def take(self) -> Any:
        """Return a copy of its state."""

    def restore(self, taken: Any) -> None:
        """Put a copy back, and leave the copy as it is."""

    def divide(self, taken: Any) -> tuple[Any, Any]:
        """Return of a copy what all ranks have, and what this rank alone has."""

    def join(self, shared: Any, own: Any) -> Any:
        """Return the copy of which :meth:`divide` has made these."""

    def layout(self) -> str:
        """Describe it, so that two of the same text can have each other's copy."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that it changes in place."""

    def modules(self) -> list[torch.nn.Module]:
        """Return the module that it is, if it is one."""

    def group(self) -> Any:
        """Return hpcdist's group whose ranks train it together, in DistributedDataParallel say.

        None if it has none. Of torch's groups it may be the default one: a recovery makes no other
        again.
        """

    def stepped(self) -> list[torch.Tensor]:
        """Return the parameters that it steps, if it is an optimizer."""

    def take_own(self) -> Any:
        """Return a copy of what this rank alone has, as :meth:`divide` does."""

    def restore_own(self, own: Any) -> None:
        """Put such a copy back."""

    def sharded(self) -> bool:
        """Whether each rank has a shard of it."""


def shapes(tensors: list[torch.Tensor]) -> str:
    """Describe tensors, so that those of the same shapes and dtypes have the same text."""
    described = repr([(tuple(t.shape), str(t.dtype)) for t in tensors])
    digest = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
    return f"{len(tensors)} tensors of {sum(t.numel() for t in tensors)} elements ({digest})"


class _Shared:
    """A part of which all ranks have the same copy."""

    def modules(self) -> list[torch.nn.Module]:
        return []

    def group(self) -> Any:
        return None

    def stepped(self) -> list[torch.Tensor]:
        return []

    def take_own(self) -> Any:
        return None

    def restore_own(self, own: Any) -> None:
        pass

    def divide(self, taken: Any) -> tuple[Any, Any]:
        return taken, None

    def join(self, shared: Any, own: Any) -> Any:
        return shared

    def tensors(self) -> list[torch.Tensor]:
        return []

    def sharded(self) -> bool:
        return False


class _Module:
    """Parameters and buffers, in place: whoever refers to them sees what was put back.

    And gradients, where a step adds to those of the step before.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._gradients = Gradients()
        #: As it was first seen: forward may make buffers, or lengthen them.
        self._layout = ""

    def _parameters(self) -> list[torch.nn.Parameter]:
        reshard(self._module)
        return list(self._module.parameters())

    def tensors(self) -> list[torch.Tensor]:
        return [*self._parameters(), *self._module.buffers()]

    def sharded(self) -> bool:
        return any(map(is_shard, self._parameters()))

    def divide(self, taken: dict[str, Any]) -> tuple[Any, Any]:
        # Buffers differ: each rank's running means are of its own data.
        both = list(zip(taken[_PARAMETERS], map(is_shard, self._parameters()), strict=True))
        own = {_PARAMETERS: [each for each, mine in both if mine], _BUFFERS: taken[_BUFFERS]}
        own |= {name: taken.get(name) for name in (_GRADIENTS, _PASSES)}  # under no_sync() too
        return [each for each, mine in both if not mine], own

    def join(self, shared: Any, own: Any) -> dict[str, Any]:
        whole, shards = iter(shared), iter(own[_PARAMETERS])
        mine = [next(shards if is_shard(p) else whole) for p in self._parameters()]
        return own | {_PARAMETERS: mine}

    def modules(self) -> list[torch.nn.Module]:
        return [self._module]

    def group(self) -> Any:
        group = getattr(self._module, "process_group", None)
        if isinstance(group, ProcessGroup):
            return group
        ours = getattr(group, "ours", None)
        return ours if ours is world.pg else None

    def stepped(self) -> list[torch.Tensor]:
        return []

    def take_own(self) -> dict[str, Any]:  # of a module without shards
        return {_PARAMETERS: [], _BUFFERS: buffers.take(self._module)}

    def restore_own(self, own: dict[str, Any]) -> None:
        buffers.put_back(self._module, own[_BUFFERS])

    def layout(self) -> str:
        self._layout = self._layout or f"a module with {shapes(self.tensors())}"
        return self._layout

    @torch.no_grad()
    def take(self) -> dict[str, Any]:
        self.layout()
        every = self._parameters()
        return {
            _PARAMETERS: [local(parameter).clone() for parameter in every],
            _BUFFERS: buffers.take(self._module),
            _GRADIENTS: self._gradients.take(every, waits(self._module)),
            _PASSES: passes.take(self._module),
        }

    @torch.no_grad()
    def restore(self, taken: dict[str, Any]) -> None:
        forget_pass(self._module)
        for parameter, saved in zip(self._parameters(), taken[_PARAMETERS], strict=True):
            local(parameter).copy_(saved)
        buffers.put_back(self._module, taken[_BUFFERS])
        self._gradients.put_back(self._parameters(), taken.get(_GRADIENTS))
        passes.put_back(self._module, taken.get(_PASSES))


class _WithState(_Shared):
    """Anything with ``state_dict`` and ``load_state_dict``, such as an optimizer."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._was_taken = False

    def take(self) -> Any:
        self._was_taken = True
        return copy.deepcopy(without_shards(self._thing.state_dict()))

    def restore(self, taken: Any) -> None:
        state = with_shards(copy.deepcopy(taken), self._thing)
        if self._was_taken and isinstance(self._thing, torch.optim.Optimizer) and _GROUPS in state:
            del self._thing.param_groups[len(state[_GROUPS]) :]  # those of the failed step
        optimizer_state.load(self._thing, state)
        if isinstance(self._thing, torch.amp.GradScaler) and self._thing.is_enabled():
            # Not in its state: that a step which did not end had unscaled its gradients.
            self._thing._per_optimizer_states.clear()

    def divide(self, taken: Any) -> tuple[Any, Any]:
        return (None, taken) if has_shards(taken) else (taken, None)

    def join(self, shared: Any, own: Any) -> Any:
        return shared if own is None else own

    def stepped(self) -> list[torch.Tensor]:
        return [p for g in getattr(self._thing, "param_groups", ()) for p in g["params"]]

    def layout(self) -> str:
        return f"a {type(self._thing).__name__}"


class _Tensor(_Shared):
    """A tensor, in place; with its gradient, as those of a module, if it is a parameter."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._gradients = Gradients()

    @torch.no_grad()
    def take(self) -> Any:
        taken = self._tensor.detach().clone()
        if not self._is_parameter():
            return taken
        return {_PARAMETERS: taken, _GRADIENTS: self._gradients.take([self._tensor])}

    @torch.no_grad()
    def restore(self, taken: Any) -> None:
        value, own = self.divide(taken)
        self._tensor.copy_(value)
        if self._is_parameter():
            self._gradients.put_back([self._tensor], own and own[_GRADIENTS])

    def _is_parameter(self) -> bool:
        return self._tensor.is_leaf and self._tensor.requires_grad

    def divide(self, taken: Any) -> tuple[Any, Any]:
        if isinstance(taken, torch.Tensor):
            return taken, None
        return taken[_PARAMETERS], {_GRADIENTS: taken[_GRADIENTS]}

    def join(self, shared: Any, own: Any) -> Any:
        return shared if own is None else {_PARAMETERS: shared, **own}

    def tensors(self) -> list[torch.Tensor]:
        return [self._tensor]

    def layout(self) -> str:
        return f"a tensor: {shapes([self._tensor])}"


class RandomNumbers:
    """torch's generators of this process, so that a repeated step draws the same numbers."""

    def take(self) -> Any:
        """Return their states."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return torch.get_rng_state(), cuda

    def restore(self, taken: Any) -> None:
        """Put them back."""
        torch.set_rng_state(taken[0])
        if taken[1]:
            torch.cuda.set_rng_state_all(taken[1])


def part_of(thing: Any, name: str) -> Part:
    """Return what copies a thing.

    Raises
    ------
    TypeError
        If it has no state that could be put back.
    """
    if isinstance(thing, ZeroRedundancyOptimizer):
        raise TypeError(f"{name} is a ZeroRedundancyOptimizer, whose shards State handles itself")
    if isinstance(thing, torch.nn.Module):
        return _Module(thing)
    if is_shard(thing):
        raise TypeError(f"{name} is a DTensor: give State the module that it is a parameter of")
    if isinstance(thing, torch.Tensor):
        return _Tensor(thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return _WithState(thing)
    raise TypeError(
        f"{name} is a {type(thing).__name__}: State takes modules, optimizers, tensors and what "
        "has state_dict() and load_state_dict(); keep other values in state.values"
    )
