"""The MPI backend: starts MPI, and makes the native communicators of groups."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcdist import _engine, _environment, _loader, config, debug_level, launchers
from hpcdist.errors import DistBackendError

from . import finalize
from .base import BackendOptions
from .registry import Backend

#: Levels of the entry check, by the number that the engine has for each.
LEVELS = {"off": 0, "on": 1, "full": 2, "fast": 3}


def level_name(number: int) -> str:
    """Return the name of a level of the entry check."""
    return next(name for name, each in LEVELS.items() if each == number)


@dataclass(frozen=True)
class MPIOptions:
    """Options of the MPI backend, for the argument ``pg_options``.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or int, optional
        For :func:`hpcdist.init_process_group`: the communicator that becomes the world, from mpi4py
        or as the integer ``comm.handle``. It is duplicated, and stays the caller's own. None means
        MPI_COMM_WORLD.
    check : {"off", "fast", "on", "full"}, optional
        Level of the entry check in this group. None means the setting ``HPCDIST_CHECK``, else
        ``"full"`` at debug level DETAIL, else ``"on"``; for a subgroup below DETAIL its parent's
        level.

    Raises
    ------
    ValueError
        If `check` is not a level, or `comm` is MPI_COMM_NULL or an intercommunicator.
    TypeError
        If `comm` is not a communicator.

    Notes
    -----
    Every member of the group must give the same options. Source: the idea of
    ``torch.distributed.ProcessGroupNCCL.Options``; torch's MPI backend has none.
    """

    #: The backend these options are for.
    backend: ClassVar[str] = "mpi"

    comm: Any = None
    check: str | None = None

    def __post_init__(self) -> None:
        if self.check is not None and self.check not in LEVELS:
            raise ValueError(f"check must be one of {', '.join(LEVELS)}, not {self.check!r}")
        if self.comm is not None:
            _handle(self.comm)

    @property
    def handle(self) -> int | None:
        """The communicator as an integer, or None."""
        return None if self.comm is None else _handle(self.comm)


def _handle(comm: Any) -> int:
    """Return the integer handle of a communicator of mpi4py."""
    if isinstance(comm, int) and not isinstance(comm, bool):
        return comm
    handle = getattr(comm, "handle", None)
    if not isinstance(handle, int):
        raise TypeError(
            f"comm must be a communicator of mpi4py 4 or newer, or its integer comm.handle, not "
            f"{type(comm).__name__}"
        )
    # an mpi4py communicator is false exactly if it is MPI_COMM_NULL
    if not comm:
        raise ValueError("comm is MPI_COMM_NULL: this process is not in that communicator")
    if getattr(comm, "is_inter", False):
        raise ValueError("comm is an intercommunicator; merge it first (comm.Merge())")
    return handle


def _options(pg_options: Any) -> MPIOptions:
    """Return a group's options, or raise TypeError."""
    if pg_options is None:
        return MPIOptions()
    if not isinstance(pg_options, MPIOptions):
        raise TypeError(
            f"pg_options of the mpi backend must be hpcdist.MPIOptions, not "
            f"{type(pg_options).__name__}"
        )
    return pg_options


def level(pg_options: Any, parents: int) -> int:
    """Return the level of the entry check in a subgroup.

    Parameters
    ----------
    pg_options : MPIOptions or None
        Of the subgroup.
    parents : int
        The level of the group that it is made from.

    Raises
    ------
    TypeError
        If `pg_options` is not MPIOptions.
    ValueError
        If it has a communicator.
    """
    given = _options(pg_options)
    if given.comm is not None:
        raise ValueError(
            "MPIOptions(comm=...) is for init_process_group: a group gets its communicator "
            "from its ranks"
        )
    if given.check is not None:
        return LEVELS[given.check]
    if debug_level.get_debug_level() >= debug_level.DebugLevel.DETAIL:
        return LEVELS[debug_level.check_level()]
    return parents


def start() -> tuple[int, int]:
    """Start MPI unless it is running.

    Returns
    -------
    tuple of int
        Rank in MPI_COMM_WORLD and its size.

    Raises
    ------
    DistBackendError
        If MPI was finalized already (it cannot be started twice in a process), or a second libmpi
        was loaded since hpcdist was imported.
    ValueError
        If a variable holds something else than its setting accepts.

    Notes
    -----
    All processes of the job must call it.
    """
    for text in config.faults().values():  # now, and not at the operation that first reads it
        raise ValueError(text)
    if _engine.mpi_state() == "finalized":
        raise DistBackendError(
            "MPI has been finalized in this process and cannot start again; call "
            "hpcdist.init_process_group before MPI.Finalize"
        )
    # modules imported after hpcdist may have loaded a second libmpi
    _loader.verify()
    if not launchers.starts_mpi() and launchers.of_an_ancestor(os.environ):
        with _environment.variables(dict.fromkeys(("PMI_FD", "PMI_RANK", "PMI_SIZE"))):
            _engine.init_mpi()
    else:
        _engine.init_mpi()
    finalize.prepare()
    _engine.look_for_nans(config.get("nan_check"))
    return _engine.world_rank_size()


def create(options: BackendOptions, pg_options: Any = None) -> _engine.Comm:
    """Make the native communicator of a group.

    Parameters
    ----------
    options : BackendOptions
        The group.
    pg_options : MPIOptions, optional
        Communicator of the world, level of the entry check.

    Returns
    -------
    hpcdist._engine.Comm
        It owns a duplicate, on which nothing else sends.

    Raises
    ------
    TypeError
        If `pg_options` is not MPIOptions.
    ValueError
        If a subgroup is given a communicator.
    DistTimeoutError
        If a member does not call.

    Notes
    -----
    All members must call it, and only they.
    """
    seconds = options.timeout.total_seconds()
    if options.parent is not None:
        check = level(pg_options, options.parent.check)
        left = max(options.end - time.monotonic(), 0.001)  # the wait for other threads counts
        within = seconds if left > 0.99 * seconds else left
        comm = options.parent.create_group(
            list(options.parent_ranks), options.group_id, within, met=options.met, check=check
        )
        comm.timeout = seconds
        return comm
    if options.global_ranks_in_group:
        raise DistBackendError(
            f"the group {options.group_id!r} cannot use the mpi backend, because the group it is "
            "made from does not: pass backend='mpi' to init_process_group"
        )
    given = _options(pg_options)
    node_limit = config.get("node_memory")
    start()
    check = LEVELS[given.check or debug_level.check_level()]
    handle = given.handle
    within = min(seconds, max(options.end - time.monotonic(), 1.0))
    if handle is None:
        comm = _engine.Comm.world(options.group_id, seconds, check, within)
    else:
        comm = _engine.Comm.from_handle(handle, options.group_id, seconds, check, within)
    comm.node_limit = node_limit
    return comm


Backend.register_backend(Backend.MPI, create, extended_api=True, devices=["cpu"])
