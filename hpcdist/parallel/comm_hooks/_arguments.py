"""Checks of what communication hooks are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup


def check_in_buckets(ddp: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Raise if parameters that are to be stepped in backward are in no bucket of a DDP model."""
    apart = {name for name, _ in ddp._delayed_parameters} | ddp.parameters_to_ignore
    chosen = set(parameters)
    names = [
        name
        for name, parameter in ddp.module.named_parameters()
        if name in apart and parameter in chosen and parameter.requires_grad
    ]
    if names:
        raise ValueError(
            f"nothing in backward would step {', '.join(names)}: no bucket has parameters of "
            "delay_all_reduce_named_params, or those that DistributedDataParallel ignores; leave "
            "them to another optimizer"
        )


def group_of(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group of a hook's state: None means the default group."""
    return member(group)


def check_state(state: Any, kind: type, hook: str) -> None:
    """Raise TypeError for a state that a hook cannot use, such as None or that of torch's hook."""
    if not isinstance(state, kind):
        given = type(state)
        raise TypeError(
            f"the state of {hook} must be a {kind.__module__.rpartition('.')[0]}.{kind.__name__}, "
            f"not {given.__module__}.{given.__qualname__}; pass one to register_comm_hook"
        )
