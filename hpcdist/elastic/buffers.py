"""A module's buffers by name: forward may add some, or replace one by one of another shape.

Tables of positions are such buffers: a model lengthens them for the longest input so far. With them
goes what modules add to their state_dict by ``get_extra_state``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from hpcdist.elastic.sharded import local

#: Entries of a copy: by name; the names of those that no state_dict has; by module, extra states.
BUFFERS, TEMPORARY, EXTRA = "buffers", "temporary", "extra"


def _places(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield for each registered buffer its name, its module, and its name there."""
    for prefix, owner in module.named_modules():
        for key in list(owner._buffers.keys()):
            yield f"{prefix}.{key}" if prefix else key, owner, key


def _is_temporary(owner: torch.nn.Module, key: str) -> bool:
    return key in getattr(owner, "_non_persistent_buffers_set", ())


def _with_extra(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield for each module with an extra state, which can be put back, its name and the module."""
    plain = torch.nn.Module
    for name, each in module.named_modules():
        get = getattr(type(each), "get_extra_state", plain.get_extra_state)
        put = getattr(type(each), "set_extra_state", plain.set_extra_state)
        if get is not plain.get_extra_state and put is not plain.set_extra_state:
            yield name, each


def take(module: torch.nn.Module) -> dict[str, Any]:
    """Return a copy of a module's buffers and extra states; local.

    Those registered as None, which forward may fill, are in it too.
    """
    found, temporary = {}, []
    for name, owner, key in _places(module):
        buffer = owner._buffers[key]
        found[name] = None if buffer is None else local(buffer).clone()
        if _is_temporary(owner, key):
            temporary.append(name)
    extra = {name: copy.deepcopy(each.get_extra_state()) for name, each in _with_extra(module)}
    return {BUFFERS: found, TEMPORARY: temporary, EXTRA: extra}


def put_back(module: torch.nn.Module, taken: dict[str, Any]) -> None:
    """Put a copy back, in place where the shapes are still the same; local.

    A buffer that was not there yet is taken away, so that forward makes it again. One of no
    state_dict stays: it holds what can be computed from inputs.
    """
    for name, owner, key in list(_places(module)):
        if name not in taken[BUFFERS] and not _is_temporary(owner, key):
            del owner._buffers[key]
    for name, saved in taken[BUFFERS].items():
        prefix, _, key = name.rpartition(".")
        owner = module.get_submodule(prefix)
        now = owner._buffers.get(key)
        if saved is None:
            if not _is_temporary(owner, key):
                owner._buffers[key] = None
        elif now is not None and _alike(local(now), saved):
            local(now).copy_(saved)
        else:
            owner.register_buffer(
                key, _there(saved, now, module), persistent=name not in taken[TEMPORARY]
            )
    extra = taken.get(EXTRA, {})  # an earlier version's has none
    for name, each in _with_extra(module):
        if name in extra:
            each.set_extra_state(copy.deepcopy(extra[name]))


def _alike(now: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether the copy fits into the memory of what is there, each element into its own."""
    apart = all(step or n == 1 for n, step in zip(now.shape, now.stride(), strict=True))
    return now.shape == saved.shape and now.dtype == saved.dtype and apart


def _there(saved: torch.Tensor, now: torch.Tensor | None, module: torch.nn.Module) -> torch.Tensor:
    """Return a copy on the buffer's device; that of the module if it is from another process."""
    device = saved.device
    if now is not None:
        device = now.device
    elif device.type == "cpu":
        device = next((p.device for p in module.parameters()), device)
    return torch.empty_like(saved, device=device).copy_(saved)
