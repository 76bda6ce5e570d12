"""Starts torch.distributed, with any of its backends, from MPI's ranks and addresses."""

from __future__ import annotations

import contextlib
import inspect
import secrets
import socket
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch.distributed as dist

from hpcdist import _engine, config
from hpcdist._torch_version import explain
from hpcdist.backends import mpi
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.refusal import refusing
from hpcdist.errors import DistBackendError
from hpcdist.groups import joining
from hpcdist.groups.limits import limit_of
from hpcdist.groups.world import world
from hpcdist.startup import attendance, checks, spares, steps, variables
from hpcdist.startup.rendezvous.urls import stated
from hpcdist.store import HashStore, TCPStore
from hpcdist.torch.process_group import NAME
from hpcdist.torch.store import let_go, to_torch

#: Bytes of the store's key, and of what rank 0 tells: the key, host and port.
_KEY, _LENGTH = 32, 320
_API = "hpcdist.torch mpi://"

#: torch's view of the store that was opened last for its default group.
_opened: dist.Store | None = None


def register() -> None:
    """Register the init method ``mpi://`` with torch.distributed; once is enough."""
    with contextlib.suppress(RuntimeError):  # it is registered already
        dist.register_rendezvous_handler("mpi", meet)


def init_process_group(
    backend: str | None = None, timeout: timedelta | None = None, **arguments: Any
) -> None:
    """Initialise torch.distributed under mpirun, srun or torchrun, with nothing to configure.

    All processes of the job must call it. They meet by ``mpi://`` where an MPI launcher started
    them, and by ``env://`` where torchrun did; with MPICH those make one MPI job too.

    Parameters
    ----------
    backend : str, optional
        A backend of torch's, such as ``"gloo"`` or ``"cpu:hpcdist,cuda:nccl"``; by default
        ``"hpcdist"``.
    timeout : datetime.timedelta, optional
        After this long a missing peer is an error; by default what the backend has.
    **arguments
        Of ``torch.distributed.init_process_group``, but ``init_method``, ``store``, ``rank`` and
        ``world_size``: those come from MPI.

    Raises
    ------
    TypeError
        If one of the arguments that MPI answers is given.
    ValueError
        If torch.distributed is initialised already.
    RuntimeError
        If torch fails and is newer than what hpcdist was tested with; the text says so.
    """
    answered = {"init_method", "store", "rank", "world_size"} & set(arguments)
    if answered:
        raise TypeError(f"{sorted(answered)} come from MPI and cannot be given")
    kind = backend or NAME
    method = steps.default_method(NAME in kind)
    with explain():
        dist.init_process_group(kind, init_method=method, timeout=timeout, **arguments)


def meet(
    url: str, timeout: timedelta | None = None, **_rest: Any
) -> Iterator[tuple[Any, int, int]]:
    """Open a store on rank 0, and send its address and key to the others over MPI.

    All processes of the job must call it: torch does, for the init method ``mpi://``.

    Parameters
    ----------
    url : str
        ``mpi://``, to which torch adds a rank and a world size that the program gives.
    timeout : datetime.timedelta, optional
        Of the store, and for the ranks to come.

    Yields
    ------
    tuple
        torch's view of the store, rank and size.

    Raises
    ------
    DistBackendError
        If several processes were started and no MPI launcher made them one job.
    ValueError
        If the job is to have spares, and a backend of torch's own was asked for; or if MPI
        contradicts the rank or the world size. The other ranks raise DistMismatchError then.
    """
    claimed, aside = stated(url), spares.wanted()
    if aside and not _served_by(NAME):
        raise ValueError(
            f"HPCDIST_SPARES={aside}: groups of torch's own backends have no spares. Unset it, or "
            f"name the backend {NAME!r}"
        )
    if world.spares and world.pg is not None:
        yield _meet_in(world.pg)
        return
    if steps.alone():
        _refuse(steps.expected_size("env://", -1))
    limit = timeout or limit_of(config.get("timeout"))
    with attendance.Watch(limit.total_seconds()):
        rank, size = mpi.start()
        comm = _engine.Comm.world(_API, limit.total_seconds(), 1)
    try:
        if aside >= size:
            aside = 0  # an error on all ranks when the group is made
        active = size - aside
        # a spare takes another number than its own
        told = claimed[0] if rank < active else -1
        steps.raise_together(comm, checks.contradiction(told, claimed[1], rank, active))
        store = _open(comm, limit)
        variables.export_place(comm, _API, aside)
    finally:
        comm.free()
    if rank == 0 and _served_by(dist.Backend.GLOO, named=False):
        warnings.warn(
            "mpi:// was given and no backend was named, so torch takes gloo for CPU tensors: pass "
            f"{NAME!r} as the backend, or 'gloo' to silence this warning",
            stacklevel=2,
        )
    yield store, rank, size - aside


def _meet_in(pg: Any) -> tuple[Any, int, int]:
    """Let the ranks of hpcdist's default group meet: its spares wait there already.

    A former spare gets a store with the others when it joins them; it cannot make groups before.
    """
    joins = joining.is_closed(pg)
    store = to_torch(HashStore()) if joins else _open(pg.carrier, pg.timeout)
    return store, pg.rank(), pg.size()


def _open(comm: Carrier, limit: timedelta) -> dist.Store:
    """Open a store, which lives until the next default group has its own if it is one's."""
    if _initializing() is None:  # the program itself meets by mpi://, for whatever it needs
        return to_torch(open_store(comm, limit, _API))
    return open_for_default(comm, limit, _API)


def open_for_default(comm: Carrier, limit: timedelta, api: str) -> dist.Store:
    """Open a store for torch's default group, and let go of the one that was opened so before.

    Parameters
    ----------
    comm, limit, api
        As for :func:`open_store`; all ranks must call it, and use the former one no more.

    Returns
    -------
    torch.distributed.Store
        torch's view of the store.
    """
    global _opened
    store = to_torch(open_store(comm, limit, api))
    comm.barrier(api=api)  # a rank may still be in the former one's last operation
    if _opened is not None:
        let_go(_opened)
    _opened = store
    return store


def open_store(comm: Carrier, limit: timedelta, api: str) -> TCPStore:
    """Open a store on rank 0, and tell the others where it is and its key.

    All ranks must call it.

    Parameters
    ----------
    comm : hpcdist._engine.Comm
        Of those that will use the store.
    limit : datetime.timedelta
        Timeout of the store.
    api : str
        Name of the function that is running, for messages.

    Returns
    -------
    TCPStore
        Connected.
    """
    place = np.zeros(_LENGTH, np.uint8)
    store = None
    with refusing(comm, api):
        if comm.rank == 0:
            host = "127.0.0.1" if len(comm.node_ranks) == comm.size else socket.gethostname()
            key = secrets.token_bytes(_KEY)
            store = TCPStore(host, 0, comm.size, True, limit, wait_for_workers=False, auth_key=key)
            text = key + f"{host}:{store.port}".encode()
            place[: len(text)] = np.frombuffer(text, np.uint8)
    comm.broadcast(place, 0, api=api)
    if store is not None:
        return store
    received = place.tobytes()
    host, port = received[_KEY:].rstrip(b"\0").decode().rsplit(":", 1)
    return TCPStore(
        host, int(port), comm.size, False, limit, wait_for_workers=False, auth_key=received[:_KEY]
    )


def _initializing() -> FrameType | None:
    """Return the frame of torch.distributed.init_process_group, if it is running."""
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "init_process_group"
        and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
    ):
        frame = frame.f_back
    return frame


def _served_by(name: str, named: bool = True) -> bool:
    """Whether torch.distributed.init_process_group is running, and a backend is to serve.

    Parameters
    ----------
    name : str
        The backend.
    named : bool
        False: only if the program names none, and torch takes it.
    """
    frame = _initializing()
    asked = None if frame is None else frame.f_locals.get("backend")
    if asked is None or not (named or asked == dist.Backend.UNDEFINED):
        return False
    take_over = sys.modules.get("hpcdist_torch_plugin.take_over")
    if take_over is not None and asked != dist.Backend.UNDEFINED:
        asked = take_over.replaced(asked, take_over.names())
    if name == asked:  # MPI's is in no table
        return True
    served = dist.distributed_c10d.BackendConfig(dist.Backend(asked))
    return name in served.get_device_backend_map().values()


def _refuse(size: int) -> None:
    """Raise if ``mpi://`` would make each of several processes its own world."""
    steps.refuse_without_launcher(size)
    if size > 1:
        raise DistBackendError(
            f"mpi:// takes ranks from an MPI launcher, and there is none: WORLD_SIZE says {size}, "
            "but MPI would see one process. Omit init_method (env://), or start with: mpirun "
            f"-n {size} python ..."
        )
