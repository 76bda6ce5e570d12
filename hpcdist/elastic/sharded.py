"""Parameters that are shards: DTensors, as torch's FSDP2 (``fully_shard``) makes them.

A rank's commit then has its shard alone, as a plain tensor. FSDP2 also keeps what a pass is about
to do; a pass that has failed must be forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

#: In place of an optimizer's state_dict: the same with plain tensors, and which of them are shards.
#: These need not be like their parameters: an optimizer may keep a number for each row.
LOCAL, SHARDS = "hpcdist_local", "hpcdist_shards"


def is_shard(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """Return the memory of a tensor on this rank."""
    plain: torch.Tensor = tensor.detach()
    return plain.to_local() if is_shard(tensor) else plain  # type: ignore[attr-defined]


def like(parameter: Any, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor with this memory on this rank, a DTensor if the parameter is one."""
    if not is_shard(parameter):
        return memory
    made: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
        memory,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def without_shards(state: Any) -> Any:
    """Return an optimizer's state_dict with plain tensors in the place of shards.

    Parameters
    ----------
    state : object
        From ``state_dict()``; it is left as it is.

    Returns
    -------
    object
        The state itself if it has no shards.
    """
    per_parameter = state.get("state") if isinstance(state, dict) else None
    if not isinstance(per_parameter, dict):
        return state
    shards = [
        (number, name, list(value.shape), list(value.stride()), _placed(value))
        for number, entries in per_parameter.items()
        if isinstance(entries, dict)
        for name, value in entries.items()
        if is_shard(value)
    ]
    if not shards:
        return state
    plain = {number: dict(entries) for number, entries in per_parameter.items()}
    for number, name, *_ in shards:
        plain[number][name] = local(plain[number][name])
    return {LOCAL: state | {"state": plain}, SHARDS: shards}


def _placed(value: Any) -> list[int | str] | None:
    """Return how a DTensor lies, by dimension of the mesh, as plain values.

    The dimension of the tensor that is divided; -1 if all have the same; the reduction if it is
    partial. None for other placements: those are the parameter's own, as where FSDP2 divides what
    tensor parallelism has divided.
    """
    module = sys.modules["torch.distributed.tensor"]
    found: list[int | str] = []
    for each in value.placements:
        if type(each) is module.Shard:
            found.append(each.dim)
        elif type(each) is module.Replicate:
            found.append(-1)
        elif type(each) is module.Partial:
            found.append(each.reduce_op)
        else:
            return None
    return found


def _placements(placed: list[int | str]) -> list[Any]:
    """Return the placements of which :func:`_placed` has made this."""
    module = sys.modules["torch.distributed.tensor"]
    return [
        module.Partial(each)
        if isinstance(each, str)
        else module.Shard(each)
        if each >= 0
        else module.Replicate()
        for each in placed
    ]


def has_shards(taken: Any) -> bool:
    """Whether :func:`without_shards` has made this of a state_dict with shards."""
    return isinstance(taken, dict) and SHARDS in taken


def with_shards(taken: Any, optimizer: Any) -> Any:
    """Return the state_dict of which :func:`without_shards` has made this."""
    if not has_shards(taken):
        return taken
    module = sys.modules["torch.distributed.tensor"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = taken[LOCAL]
    whole = {number: dict(entries) for number, entries in state["state"].items()}
    for number, name, shape, stride, placed in taken[SHARDS]:
        like = parameters[number]
        whole[number][name] = module.DTensor.from_local(
            whole[number][name],
            like.device_mesh,
            like.placements if placed is None else _placements(placed),
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )
    return state | {"state": whole}


def _states_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 keeps of a module and its submodules."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for each in module.modules():
        state = getattr(each, "_get_fsdp_state", lambda: None)()
        if state is not None:
            yield state


def reshard(module: torch.nn.Module) -> None:
    """Put FSDP2's shards in place, where a pass has left whole parameters; local."""
    for state in _states_of(module):
        for group in _groups_of(state):
            group._to_sharded()


def forget_pass(module: torch.nn.Module) -> None:
    """Let FSDP2 forget a pass that has failed, and gradients that wait to be reduced; local.

    Parameters
    ----------
    module : torch.nn.Module
        With its submodules: what torch's ``FSDPState`` and ``FSDPParamGroup`` keep, to 2.15.
    """
    for state in _states_of(module):
        idle = type(state._training_state).IDLE
        state._training_state = idle
        getattr(state, "_modules_to_run_forward", set()).clear()
        _reset(state._state_ctx, iter_forward_root=None, post_backward_final_callback_queued=False)
        for group in _groups_of(state):
            _forget_group(group, idle)


def waits(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has gradients that wait for a later pass to be reduced; local."""
    return any(
        getattr(each, "unsharded_accumulated_grad", None) is not None
        or getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
        for state in _states_of(module)
        for group in _groups_of(state)
        for each in group.fsdp_params
    )


def _groups_of(state: Any) -> Iterable[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    if several is not None:
        return list(several)
    return [each for each in (state._fsdp_param_group,) if each is not None]


def _forget_group(group: Any, idle: Any) -> None:
    group._training_state = idle
    group._to_sharded()
    group._post_forward_indices.clear()
    _reset(
        group,
        _all_gather_result=None,
        _post_reduce_event=None,
        _partial_reduce_output=None,
        _all_reduce_state=None,
        _reshard_after_forward_event=None,
    )
    for each in group.fsdp_params:
        _reset(each, unsharded_accumulated_grad=None)
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None
    context = group.comm_ctx
    if hasattr(context, "post_forward_order"):
        context.post_forward_order.clear()
    _reset(context, all_gather_state=None, reduce_scatter_state=None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events"):
        if hasattr(context, name):
            getattr(context, name).clear()


def _reset(thing: Any, **values: Any) -> None:
    """Set the attributes that this version of torch has."""
    for name, value in values.items():
        if name in vars(thing):
            setattr(thing, name, value)
