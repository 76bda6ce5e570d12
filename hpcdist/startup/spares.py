"""Spares: the last processes of a job wait in init_process_group until a rank dies."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hpcdist import _engine, config, log
from hpcdist.backends.create import renewed
from hpcdist.errors import DistError, RankFailedError
from hpcdist.groups import joining
from hpcdist.groups.world import world
from hpcdist.startup import commits, variables

_log = log.get_logger("world")
#: The most seconds that the end of the default group waits for the other ranks to end it.
_FAREWELL = 1.0
#: Whether the spares of this job have ended; whether this process has, as one of them.
_dismissed = _unused = False


def wanted() -> int:
    """Return how many spares this start is to have.

    Raises
    ------
    ValueError
        If this job has had some, and they have ended.
    """
    if _dismissed:
        raise ValueError(
            "the spares of this job (HPCDIST_SPARES) have ended with its first default group: a "
            "second init_process_group cannot reach them, nor do without them"
        )
    number = int(config.get("spares"))
    _engine.want_spares(number)
    return number


def _native(backends: Mapping[str, Any]) -> Any:
    """Return MPI's communicator of a group's backends, or None."""
    return next((each.native for each in backends.values() if each.native is not None), None)


def problem(backends: Mapping[str, Any], number: int, tolerant: bool) -> str:
    """Return why the job cannot have so many spares; "" if it can. The same on all ranks."""
    if not number:
        return ""
    wants = f"HPCDIST_SPARES={number}"
    native = _native(backends)
    if not tolerant:
        return f"{wants} needs HPCDIST_FT=1: without it the job ends when a rank dies"
    if native is None:
        return f"{wants} needs a default group over MPI"
    if not _engine.tolerates_failures(native):
        return f"{wants} cannot be had: {_engine.missing_fault_tolerance()}"
    if number >= native.size:
        return (
            f"{wants} leaves no rank of the {native.size} that were started: start "
            f"{number} more than are to train, or set HPCDIST_SPARES lower"
        )
    try:
        renewed(backends, native)
    except DistError as error:
        return f"{wants} cannot be had: {error}"
    return ""


@dataclass(frozen=True)
class Taken:
    """The place that a spare has taken.

    Attributes
    ----------
    comm : Comm
        Of the default group.
    places : tuple of int
        By rank, whose place it has in the world before.
    size : int
        Of that world.
    rebuilds : bool
        Whether all ranks make their groups again.
    """

    comm: _engine.Comm
    places: tuple[int, ...]
    size: int
    rebuilds: bool


def divide(
    backends: Mapping[str, Any], number: int, name: str
) -> tuple[dict[str, Any], Taken | None]:
    """Set the last ranks aside; a spare returns when it has taken the place of a rank that died.

    All ranks must call it.

    Returns
    -------
    tuple
        The backends of the default group; the place that this process has taken if it was a spare.

    Raises
    ------
    SystemExit
        On a spare, with status 0, when the other ranks have ended.
    RankFailedError
        On a spare, if all other ranks have died.
    """
    half = _engine.set_aside(_native(backends), number, name)
    for backend in dict.fromkeys(reversed([*backends.values()])):
        backend.free()
    rank, active, _ = _engine.world_place(half)
    if rank < active:
        return renewed(backends, half), None
    try:
        _warm()
        taken = _wait(half, name)
    except RankFailedError:
        raise
    except BaseException:  # of a signal handler, for example, which may well exit
        _die()
    if taken is None:
        _end()
    return renewed(backends, taken.comm), taken


def _warm() -> None:
    """Load what torch loads with its first optimizer: that takes a second, and the others wait."""
    torch = sys.modules.get("torch")
    if torch is not None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.0)
        weight.sum().backward()
        optimizer.step()
    if "hpcdist.torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # torch's DistributedDataParallel asks it


def _wait(comm: _engine.Comm, name: str) -> Taken | None:
    """Wait in recoveries until one of them makes this process a rank; None if all ranks end."""
    while True:
        rank, before, others = _engine.world_place(comm)
        log.set_rank(rank, before + others)
        commits.expect_end(comm, rank)
        _log.info("this process is one of %d spares, and waits until a rank dies", others)
        found: list[Any] = []
        _engine.recover(comm, name, comm.timeout, found)
        comm.free(0.0, agree=False)
        if not found:
            return None
        comm, places, _, _, rebuilds = found
        rank, active, _ = _engine.world_place(comm)
        if rank < active:
            taken = Taken(comm, places, before, bool(rebuilds))
            seen = (places[rank], before) if taken.rebuilds else (rank, active)
            variables.export_taken_place(comm, *seen)
            commits.expect_end(comm, rank)
            return taken


def _die() -> NoReturn:
    """Leave a job that goes on: as a dead spare does, because the others watch for that."""
    _log.warning("this spare cannot wait any more, and ends as if it had died")
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError  # not reached


def _end() -> NoReturn:
    """End this process: the other ranks have no more use for it."""
    global _unused
    _unused = True
    _engine.part_alone()
    log.set_rank(None)
    raise SystemExit(0)


def was_unused() -> bool:
    """Whether this process is a spare that ends: its program may clean up, and has no group."""
    return _unused


def dismiss(pg: Any) -> None:
    """Let the spares end with the default group; local, and all its ranks call it."""
    global _dismissed
    if not world.spares:
        return
    _dismissed = True
    native = _native(pg._backends)
    _engine.farewell(native, min(native.timeout, _FAREWELL))


def admit(pg: Any, taken: Taken) -> None:
    """Close the default group of a former spare until its State has joined the others; local."""
    joining.begin(pg, taken.places, taken.size, taken.rebuilds)
    _log.warning(
        "this process was a spare and has taken the place of rank %d: its State gets that rank's "
        "last commit from the others",
        pg.carrier.rank,
    )
