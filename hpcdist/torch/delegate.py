"""The backend that torch's C++ asks for in a group, where torch lets Python write one (2.14).

torch 2.15 attaches a flight recorder to every group and asks the group's default backend about it;
what else its C++ asks a backend for changes from version to version. So a group has such a backend,
which forwards everything to the group.

It is not the group itself. What a backend in Python returns reaches the user as the C++ part of a
Work, of which torch 2.15 passes on ``wait`` and ``get_future`` only: ``is_completed``,
``exception``, ``result`` and the source of a message would be lost.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from hpcdist.operations import OPERATIONS

#: Operations of a backend, and its own name for each of the group's.
_OPERATIONS = {
    name: name
    for name in (
        *(about.c10d for about in OPERATIONS.values()),
        *("all_gather_single_coalesced", "reduce_scatter_single_coalesced", "recv_anysource"),
        *("set_timeout", "_get_sequence_number_for_group", "supports_tensor_alloc"),
    )
} | {"allreduce_sparse": "allreduce"}


class Delegate(Backend):
    """A backend that forwards to its group.

    Parameters
    ----------
    group : BridgeGroup
        The group, which owns this backend.

    Raises
    ------
    TypeError
        If this torch makes no backend in Python (2.13 and older).
    """

    # torch's versions of these call the Python attribute again, in endless recursion
    supports_abort_hooks = False
    supports_coalescing = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_shrinking = False
    supports_splitting = False
    supports_window = False
    _supports_time_estimate = False

    def __init__(self, group: Any) -> None:
        super().__init__(group.getRank(), group.getSize())
        self._group = weakref.ref(group)
        self._named = group.getBackendName()

    def getBackendName(self) -> str:
        return str(self._named)

    def _set_sequence_number_for_group(self) -> None:
        pass


def _hand_over(name: str) -> Any:
    def method(self: Delegate, *args: Any) -> Any:
        return getattr(self._group(), name)(*args)

    return method


for _name, _of_group in _OPERATIONS.items():
    setattr(Delegate, _name, _hand_over(_of_group))


def give_delegate(group: Any) -> Delegate | None:
    """Make a group's backend; None if torch supports none in Python.

    Parameters
    ----------
    group : BridgeGroup
        Of hpcdist's.

    Returns
    -------
    Delegate or None
        To be kept by the group.
    """
    try:
        made = Delegate(group)
    except TypeError:
        return None
    kind = dist.ProcessGroup.BackendType.CUSTOM
    for device in group._device_types:
        dist.ProcessGroup._register_backend(group, torch.device(device.type), kind, made)
    dist.ProcessGroup._set_default_backend(group, kind)
    return made
