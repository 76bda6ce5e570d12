"""The steps of a start: the default init URL, the roll call, and MPI without a launcher."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from hpcdist import _engine, launchers
from hpcdist.backends import mpi
from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistBackendError, DistMismatchError
from hpcdist.launchers import commands, pmi
from hpcdist.launchers.pmi.server import pid_space
from hpcdist.launchers.table import ENVIRONMENT
from hpcdist.startup.rendezvous import meeting
from hpcdist.startup.rendezvous.urls import stated
from hpcdist.store.prefix import prefixed

_default = ""


def set_default_method(url: str) -> None:
    """Set init_process_group's default init URL in this process; "" resets it."""
    global _default
    _default = url


def default_method(needs_mpi: bool, rank: int = -1, size: int = -1) -> str:
    """Return the default init URL.

    Parameters
    ----------
    needs_mpi : bool
        Whether a backend runs over MPI; then a world of one needs no address.
    rank, size : int
        As the caller stated them; -1: not stated. They stand for RANK and WORLD_SIZE.

    Returns
    -------
    str
        ``env://`` where torchrun, or a script, has set its variables and no MPI launcher started
        the process; else ``mpi://``.
    """
    if _default:
        return _default
    if _engine.mpi_state() == "finalized":
        return "mpi://"  # which raises at once
    if _engine.mpi_state() == "up" and _engine.world_rank_size()[1] > 1 and needs_mpi:
        return "mpi://"
    given = {"RANK": str(rank)} if rank >= 0 else {}
    given |= {"WORLD_SIZE": str(size)} if size > 0 else {}
    variables = {**launchers.own_variables(os.environ), **given}
    if launchers.starts_mpi() or not ENVIRONMENT.detect(variables):
        return "mpi://"
    if needs_mpi and variables["WORLD_SIZE"].strip() == "1":
        return "mpi://"
    return "env://"


def alone() -> bool:
    """Whether MPI would start here as a world of one, because no launcher started an MPI job."""
    return _engine.mpi_state() == "none" and not launchers.starts_mpi()


def expected_size(url: str, world_size: int) -> int:
    """Return the number of processes, if it is known before they meet; else -1."""
    if world_size == -1:
        world_size = stated(url)[1]
    text = os.environ.get("WORLD_SIZE", "").strip()
    if world_size == -1 and urlsplit(url).scheme == "env" and text.isdecimal():
        return int(text)
    return world_size if urlsplit(url).scheme != "mpi" else -1


def refuse_without_launcher(size: int) -> None:
    """Raise at once where this MPI cannot do without its launcher.

    Raises
    ------
    DistBackendError
        With the command to use instead.
    """
    family = launchers.mpi_family(_engine.library_version())
    if size <= 1 or family != "Open MPI":
        return
    launcher = launchers.find()
    how = "by hand" if launcher is None else f"by {launcher.name}"
    raise DistBackendError(
        f"{size} processes were started {how}, and Open MPI makes a job only of processes that its "
        f"own launcher starts (it needs PMIx). Start them with:\n  {commands.instead(size)}\n(or "
        "srun --mpi=pmix). MPICH needs no launcher: an environment with hpcdist[mpich] runs this "
        "start as it is."
    )


def meet(
    store: Any, rank: int, size: int, limit: timedelta, where: str, backend: str
) -> meeting.Meeting:
    """Call the roll over a store, hpcdist's or another.

    Raises
    ------
    TypeError
        If it is not a store.
    ValueError, DistMismatchError, DistTimeoutError, DistNetworkError
        As :func:`hpcdist.startup.rendezvous.meeting.hold_roll_call`.
    """
    store = prefixed(store, "hpcdist")
    about = {"node": pmi.node_of_this_process(), "pids": pid_space()}
    # without this rank's number, so that the text is the same on all ranks
    where = urlsplit(where)._replace(query="").geturl() if "://" in where else where
    return meeting.hold_roll_call(store, rank, size, limit.total_seconds(), where, about, backend)


@contextlib.contextmanager
def manager(meeting: meeting.Meeting, end: float) -> Iterator[pmi.Server]:
    """Run this process's own process manager while MPI starts and connections are opened.

    Parameters
    ----------
    meeting : Meeting
        The roll call that preceded.
    end : float
        When the start must be over, of ``time.monotonic``.

    Yields
    ------
    hpcdist.launchers.pmi.Server
        For :func:`start_mpi`.
    """
    server = pmi.Server(
        prefixed(meeting.store, f"pmi/{meeting.name}"),
        meeting.rank,
        meeting.size,
        meeting.published(),
        f"hpcdist-{meeting.name}",
        max(end - time.monotonic(), 1.0),
    )
    try:
        with server:
            yield server
    finally:
        if _engine.mpi_state() == "up":
            _engine.pmi_answer(server.detach())


def start_mpi(server: pmi.Server | None, size: int) -> tuple[int, int]:
    """Start MPI, through its launcher or our own process manager.

    Parameters
    ----------
    server : Server or None
        From :func:`manager`; None where a launcher started the process.
    size : int
        Number of processes that met; -1 if they did not.

    Returns
    -------
    tuple of int
        Rank and size, as MPI reports them.

    Raises
    ------
    DistBackendError
        If MPI does not start, or starts outside the job that met.
    """
    if server is None:
        began = _engine.mpi_state() == "up"
        place = mpi.start()
        if began and place[1] == 1 and size > 1 and not launchers.starts_mpi():
            raise DistBackendError(
                f"{size} processes met, but in this one MPI is up already, as a world of one: "
                "something started it before hpcdist.init_process_group. Import mpi4py.MPI after "
                "it, or set mpi4py.rc.initialize = False first."
            )
        return place
    with server.environment():
        place = mpi.start()
    if place != (server.rank, server.size):
        library = _engine.library_version().splitlines()[0]
        raise DistBackendError(
            f"this process is rank {server.rank} of {server.size}, but {library} started as rank "
            f"{place[0]} of {place[1]}: it does not take PMI-1 from PMI_FD. Start the job with its "
            f"launcher:\n  {commands.instead(server.size)}"
        )
    return place


def raise_together(comm: Carrier, problem: str) -> None:
    """Raise on all ranks if one has a problem; the rank that has it raises its text.

    All ranks must call it.

    Raises
    ------
    ValueError
        On the ranks that have a problem.
    DistMismatchError
        On the others.
    """
    ranks = [comm.rank] if problem else []
    if comm.native is not None and comm.size > 1:
        everyone = array("q", [0] * comm.size)
        comm.all_gather_into_tensor(
            everyone, array("q", [int(bool(problem))]), api="init_process_group"
        )
        ranks = [rank for rank, wrong in enumerate(everyone) if wrong]
    if problem:
        raise ValueError(problem)
    if ranks:
        raise DistMismatchError(
            f"rank {', '.join(map(str, ranks))} gave init_process_group a rank or world_size that "
            "MPI contradicts (its own error says which), so there is no group on any rank"
        )
