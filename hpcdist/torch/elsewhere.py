"""Forwards tensors of devices that the user assigned to another of torch's backends.

In ``"cpu:hpcdist,cuda:nccl"`` torch passes all tensors to the group of the first backend that is
written in Python, which is ours. So the group makes the other backend itself, as torch would have,
and forwards its tensors.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpcdist.backends.dispatch import Dispatch, agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.torch.arguments import renamed
from hpcdist.torch.compat import NAMES

_Method = TypeVar("_Method", bound=Callable[..., Any])
#: Our name of a method -> those that other versions of torch have for it.
_OTHERS: dict[str, list[str]] = {}
for _renamed in NAMES:
    _OTHERS.setdefault(_renamed.ours, []).append(_renamed.other)

#: What concerns two ranks alone.
_MESSAGES = ("send", "recv", "recv_anysource")


def _first(arguments: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor among some arguments, or lists of them; None if there is none."""
    for each in arguments:
        while isinstance(each, (list, tuple)) and each:
            each = each[0]
        if isinstance(each, torch.Tensor):
            return each
    return None


def _device_of(arguments: Iterable[Any]) -> torch.device | None:
    """Where the first tensor among some arguments, or lists of them, is; None if there is none."""
    tensor = _first(arguments)
    return None if tensor is None else tensor.device


def by_device(method: _Method) -> _Method:
    """Forward a group's method to the backend of its tensors' device."""
    name = method.__name__
    message = name in _MESSAGES
    parameters = inspect.signature(method).parameters

    @functools.wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        elsewhere = self._elsewhere
        if elsewhere is not None:
            if elsewhere.nothing:
                self._elsewhere = None  # no further check is needed
            else:
                device = _device_of(args) or _device_of(named.values())
                if device is not None and elsewhere.has(device):
                    return elsewhere.call(name, device, args, named)
        if named:
            named = renamed(named, parameters)
        if message:
            return method(self, *args, **named)
        comm = self._carrier
        if isinstance(comm, Dispatch):
            comm = agreeing(comm, _first(args))
        with refusing(comm, name):
            return method(self, *args, **named)

    return call  # type: ignore[return-value]


class Elsewhere:
    """The other backends of a group of ours.

    Parameters
    ----------
    group : BridgeGroup
        Ours.
    store : torch.distributed.Store
        The store over which its members meet.
    timeout : datetime.timedelta
        Of the group.
    ranks : list of int
        World ranks of the members.
    name : str
        Of the backend that is ours.
    """

    def __init__(
        self, group: Any, store: Any, timeout: timedelta, ranks: list[int], name: str
    ) -> None:
        self._group = weakref.ref(group)  # which holds this
        self._store = store
        self._timeout = timeout
        self._ranks = ranks
        self._own = name
        self._config: dict[str, str] | None = None
        self._made: dict[str, Any] = {}
        self._batch: tuple[int, int] = (0, 0)
        self._coalescing: set[str] = set()  # types of devices

    @property
    def nothing(self) -> bool:
        """Whether it is known that no device belongs to another backend."""
        return not self.names and self._config is not None

    def has(self, device: torch.device) -> bool:
        """Whether this one does."""
        return device.type in self.names

    @property
    def names(self) -> dict[str, str]:
        """Device type -> backend, of the others; torch writes it down after it has made a group."""
        if self._config is None:
            books: Any = dist.distributed_c10d._world
            text = books.pg_backend_config.get(self._group())
            if text is None:
                return {}
            known = dist.distributed_c10d.BackendConfig(dist.Backend(text))
            self._config = {
                device: name
                for device, name in known.get_device_backend_map().items()
                if name != self._own
            }
        return self._config

    def part(self, group: Any, ranks: list[int], name: str) -> Elsewhere:
        """Return what a group of some of the ranks, with a unique name, needs to meet elsewhere."""
        store = dist.PrefixStore(f"hpcdist/{name}", self._store)
        made = Elsewhere(group, store, self._timeout, ranks, self._own)
        made._config = self.names
        return made

    def group_for(self, device: torch.device) -> Any:
        """torch's group for a device's tensors; all members call it, at the same operation."""
        name = self.names[device.type]
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(name, device.type)
        return made

    def _make(self, name: str, device: str) -> Any:
        ours: Any = self._group()
        rank, size = ours.getRank(), ours.getSize()
        store = dist.PrefixStore(f"{name}/", self._store)
        c10d: Any = dist.distributed_c10d
        kinds = dist.ProcessGroup.BackendType
        if name == "nccl":
            if not dist.is_nccl_available():
                raise RuntimeError(
                    f"the group was given {name!r} for {device}, and this torch is built without "
                    "it: give 'hpcdist' alone, which takes CUDA tensors too"
                )
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            options.is_high_priority_stream = False  # as torch has it by default
            options.global_ranks_in_group = self._ranks
            options.group_name = ours.getGroupName()
            backend = c10d.ProcessGroupNCCL(store, rank, size, options)
            kind = kinds.NCCL
        elif name == "gloo":
            backend = c10d.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
            kind = kinds.GLOO
        else:
            raise ValueError(
                f"the group was given the backend {name!r} for {device} beside {self._own!r}; "
                "beside it torch's 'nccl' and 'gloo' can serve other devices"
            )
        backend._set_sequence_number_for_group()
        made: Any = dist.ProcessGroup(store, rank, size)
        made._set_default_backend(kind)
        for each, other in self.names.items():
            if other == name:
                made._register_backend(torch.device(each), kind, backend)
        made._set_group_name(f"{ours.getGroupName()} ({name})")
        return made

    def call(self, name: str, device: torch.device, args: Any, named: Any) -> Any:
        """Call a method of the other group, by its name in this version of torch."""
        group = self.group_for(device)
        method = next(
            found
            for found in (getattr(group, each, None) for each in (name, *_OTHERS.get(name, ())))
            if found is not None
        )
        alone = name in ("send", "recv") and device.type not in self._coalescing
        if alone and group._get_backend(device).supports_coalescing:
            return self._message(group, device, method, args, named)
        return method(*args, **named)

    def start_coalescing(self, device: torch.device) -> None:
        """Start what follows on a device together; newer versions of torch ask for it."""
        self.group_for(device)._start_coalescing(device)
        self._coalescing.add(device.type)

    def end_coalescing(self, device: torch.device) -> Any:
        """Return one work for what was called since :meth:`start_coalescing`."""
        self._coalescing.discard(device.type)
        return self.group_for(device)._end_coalescing(device)

    def _message(self, group: Any, device: torch.device, method: Any, args: Any, named: Any) -> Any:
        """Start the messages of a batch together.

        A torch that takes ours for no group of its own class calls it for one message after the
        other. Over NCCL two ranks that both send first would wait for each other.
        """
        operations = _batch_of_caller()
        if operations is None:
            return method(*args, **named)
        mine = sum(each.tensor.device.type == device.type for each in operations)
        batch, left = self._batch
        if batch != id(operations) or not left:
            group._start_coalescing(device)
            left = mine
        self._batch = (id(operations), left - 1)
        method(*args, **named)
        # what torch is given last stands for all of them; of the others it takes no note
        return group._end_coalescing(device) if left == 1 else None

    # --- what a group passes on ------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations from now on."""
        self._timeout = timeout
        for group in self._made.values():
            group.set_timeout(timeout)

    def end(self, how: str) -> None:
        """Shut down or abort what has been made."""
        made, self._made = self._made, {}
        for group in made.values():
            getattr(group, how)()


def _batch_of_caller() -> Any:
    """The list that torch's batch_isend_irecv is working on, if it is what called."""
    frame = sys._getframe(4)
    for _ in range(8):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == "batch_isend_irecv" and "distributed_c10d" in code.co_filename:
            return frame.f_locals.get("p2p_op_list")
        frame = frame.f_back  # type: ignore[assignment]
    return None
