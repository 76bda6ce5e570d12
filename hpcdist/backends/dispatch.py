"""Dispatch: in a group with several backends, each operation goes to its tensors' backend."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from hpcdist._engine import withdraw
from hpcdist.operations import OPERATIONS

from .base import GroupBackend
from .carrier import Carrier


def _by_argument(name: str, place: int) -> Callable[..., Any]:
    """Make a method that picks the backend by one argument, a tensor or a list of tensors."""

    def method(self: Dispatch, *args: Any, **about: Any) -> Any:
        tensor = args[place]
        try:
            backend = self._known[tensor.device]
        except (AttributeError, KeyError, TypeError):  # a list, or a device not seen before
            while isinstance(tensor, (list, tuple)) and tensor:
                tensor = tensor[0]
            backend = self._backend_for(tensor)
        return getattr(backend, name)(*args, **about)

    method.__name__ = name
    return method


class Dispatch:
    """Takes the place of a backend, and forwards each operation.

    Parameters
    ----------
    backends : dict
        Device type to backend. Operations without a tensor go to the host's, or the first.
    """

    def __init__(self, backends: dict[str, Carrier]) -> None:
        self._backends = backends
        self._host = backends.get("cpu") or next(iter(backends.values()))
        #: Keyed by the device itself: asking torch for its type takes a quarter of a launch over
        #: NCCL.
        self._known: dict[Any, Carrier] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    @property
    def timeout(self) -> float:
        """Seconds after which a missing peer is an error."""
        return self._host.timeout

    @timeout.setter
    def timeout(self, value: float) -> None:
        for each in self._backends.values():
            each.timeout = value

    def _backend_for(self, tensor: object) -> Carrier:
        device = getattr(tensor, "device", None)
        kind = getattr(device, "type", "cpu")  # an array's device is not torch's
        try:
            found = self._backends[kind]
        except KeyError:
            served = ", ".join(f"{device} ({type(each).__name__})"
                               for device, each in self._backends.items())  # fmt: skip
            raise ValueError(
                f"a tensor is on {kind!r}, and the group {self._host.name!r} serves {served}; name "
                "a backend for it in init_process_group, as in 'cpu:mpi,cuda:nccl'"
            ) from None
        with suppress(TypeError):  # some arrays have unhashable devices
            self._known[device] = found
        return found

    def batch_isend_irecv(self, operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
        """Begin messages, those of one backend together; return handles in list order."""
        works: list[Any] = [None] * len(operations)
        places: dict[Any, list[int]] = {each: [] for each in self._backends.values()}
        for place, (_, tensor, _, _) in enumerate(operations):
            places[self._backend_for(tensor)].append(place)
        places = {backend: mine for backend, mine in places.items() if mine}
        if len(places) > 1:  # nothing begins if another backend would refuse its part
            for backend, mine in places.items():
                look = getattr(backend, "look_at_batch", None)
                if look is not None:
                    look([operations[i] for i in mine])
        with withdrawing(works):
            for backend, mine in places.items():
                begun = batch(backend, [operations[i] for i in mine])
                for i, work in zip(mine, begun, strict=True):
                    works[i] = work
        return works


for _about in OPERATIONS.values():
    if _about.serves is not None:
        setattr(Dispatch, _about.name, _by_argument(_about.name, _about.serves))


def serving(backend: Carrier | Dispatch, tensor: object) -> Carrier:
    """Return the backend that moves a tensor, from a group's :func:`combine`.

    Parameters
    ----------
    backend : object
        A backend, or the :class:`Dispatch` of several.
    tensor : object
        A tensor, or an array on the host.
    """
    return backend._backend_for(tensor) if isinstance(backend, Dispatch) else backend


def agreeing(backend: Carrier | Dispatch, tensors: Any = None) -> Carrier:
    """Return the backend over which the ranks agree about a collective, and send refusals.

    Parameters
    ----------
    backend : object
        A backend, or the :class:`Dispatch` of several.
    tensors : tensor or list of tensor, optional
        Tensors of the collective; None for objects and barriers.
    """
    if isinstance(backend, Dispatch):
        while isinstance(tensors, (list, tuple)):
            tensors = tensors[0] if tensors else None
        several = backend
        try:
            backend = several._backend_for(tensors)
        except ValueError:  # on a device that no backend serves
            backend = several._host
    return backend.agreed_on if isinstance(backend, GroupBackend) else backend


def barrier_device(backend: Carrier | Dispatch, index: Any) -> dict[str, Any]:
    """Return the argument that tells a backend's barrier its device, if it runs on one.

    Parameters
    ----------
    backend : object
        A backend, or the :class:`Dispatch` of several.
    index : int or None
        Index of the device; None lets the backend choose.
    """
    if index is None or not getattr(backend, "has_devices", False):
        return {}
    return {"device": operator.index(index)}


def combine(backends: dict[str, Any]) -> Carrier:
    """Return what a group's operations call: its only backend itself, or a :class:`Dispatch`."""
    different = list(dict.fromkeys(backends.values()))
    return different[0] if len(different) == 1 else cast(Carrier, Dispatch(backends))


def batch(backend: Carrier, operations: Sequence[tuple[bool, Any, int, int]]) -> list[Any]:
    """Begin several messages: in the backend's way, or all receives before the first send.

    Parameters
    ----------
    backend : object
        A backend.
    operations : sequence of (bool, tensor, int, int)
        Whether to send, the tensor, the peer, the tag.

    Returns
    -------
    list
        The handles, in the order of the operations.
    """
    together = getattr(backend, "batch_isend_irecv", None)
    if together is not None:
        return list(together(operations))
    works: list[Any] = [None] * len(operations)
    with withdrawing(works):
        for sends in (False, True):
            call = backend.isend if sends else backend.irecv
            for place, (sent, tensor, peer, tag) in enumerate(operations):
                if sent is sends:
                    works[place] = call(tensor, peer, tag)
    return works


@contextmanager
def withdrawing(works: list[Any]) -> Iterator[None]:
    """Withdraw the messages of a batch after an exception: its caller gets no handles.

    Parameters
    ----------
    works : list
        Handles, and None for messages that have not begun.
    """
    try:
        yield
    except BaseException:
        withdraw(works)
        raise
