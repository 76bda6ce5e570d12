"""Goes on after the death of ranks: the default group becomes that of the ranks that live."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hpcdist import _engine, log
from hpcdist.backends.create import renewed
from hpcdist.errors import DistBackendError, DistError, DistMismatchError
from hpcdist.groups import joining
from hpcdist.groups.dropped import take_dropped
from hpcdist.groups.kept import keep_all
from hpcdist.groups.limits import seconds_of
from hpcdist.groups.members import Members
from hpcdist.groups.rebuild import Rebuilding
from hpcdist.groups.world import NOT_INITIALIZED, NonMember, world

__all__ = [
    "ReconfigureOptions",
    "Reconfigured",
    "agree",
    "followers",
    "handle_of",
    "reconfigure",
    "refuse_abort_hooks",
    "tolerates_failures",
]

_log = log.get_logger("group")

#: How many exceptions of signal handlers the change to a new world outlasts.
_HANDLERS = 8
#: The most seconds that reconfigure waits for operations in flight of one group; all fail at once.
DRAIN = 5.0
#: Called with the default group after each reconfiguration of it, on all ranks that live, in order:
#: what else keeps ranks, and may communicate to renew them. Called again, and has nothing to do
#: then, where a signal handler raised. Where a State recovers, a former spare is among the ranks.
followers: list[Callable[[Any], None]] = []


@dataclass
class ReconfigureOptions:
    """Options of :meth:`hpcdist.ProcessGroup.reconfigure`, as torch 2.15 has them.

    Parameters
    ----------
    uuid : int
        Accepted for compatibility: MPI numbers its communicators itself.
    handles : collection of str
        The ranks that are meant, from :meth:`~hpcdist.ProcessGroup.get_reconfigure_handle`; empty
        means all that live. A list must be in the order of their ranks.
    timeout : datetime.timedelta, optional
        Time for the others to call; None means the group's timeout.
    hints : dict
        Not used.
    rebuild : bool
        Make the other groups again from their members that live; hpcdist's own.
    """

    uuid: int = 0
    handles: Collection[str] = ()
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)
    rebuild: bool = False


@dataclass(frozen=True)
class Reconfigured:
    """What :meth:`hpcdist.ProcessGroup.reconfigure` did; a handle that is complete already.

    Attributes
    ----------
    lost : tuple of int
        Ranks of the former world that died. Numbers from its size on are spares.
    ranks : tuple of int
        Former ranks of those that live, by their new ranks; for a former spare, the rank whose
        place it has taken.
    seconds : float
        How long it took on this rank.
    joined : tuple of int
        New ranks that were spares.
    """

    lost: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: float
    joined: tuple[int, ...] = ()

    def wait(self, timeout: Any = None) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""


def _native(pg: Any) -> _engine.Comm:
    """Return the group's communicator of MPI, or raise."""
    joining.refuse(pg, "an agreement or reconfiguration")
    comm: _engine.Comm | None = pg.carrier.native
    if comm is None:
        raise DistBackendError(
            f"the process group {pg.members.name!r} cannot be reconfigured: it is not over MPI"
        )
    return comm


def agree(flag: int, group: Any = None, timeout: timedelta | None = None) -> int:
    """Make the bitwise and of a flag of all ranks that live, also after a death.

    All ranks of the group that live must call it.

    Parameters
    ----------
    flag : int
        Any bits of a C int; 1 for yes and 0 for no.
    group : ProcessGroup, optional
        None means the default group.
    timeout : datetime.timedelta, optional
        Time for the others to call; None means the group's timeout.

    Returns
    -------
    int
        The same on all ranks, whenever others die.

    Raises
    ------
    DistTimeoutError
        If a rank that lives does not call in time. The next call goes on with this agreement, and
        the flag given to it.
    DistBackendError
        If the job ends when a rank dies: see ``HPCDIST_FT``.

    Notes
    -----
    Source: ``MPIX_Comm_agree`` of ULFM.
    """
    if isinstance(group, NonMember):
        raise ValueError("this process is not in the given group")
    pg = group if group is not None else world.pg
    if pg is None:
        raise ValueError(NOT_INITIALIZED)
    given = None if timeout is None else seconds_of(timeout)
    comm = _native(pg)
    seconds = comm.timeout if given is None else given
    return _engine.agree(comm, flag, seconds)


def tolerates_failures(pg: Any) -> bool:
    """Whether a group's job goes on without a rank that dies."""
    comm = pg.carrier.native
    if comm is None:
        return joining.is_closed(pg)  # only such a job has spares
    return _engine.tolerates_failures(comm)


def refuse_abort_hooks(pg: Any) -> None:
    """Raise DistBackendError if nothing would call a group's abort hooks."""
    if not tolerates_failures(pg):
        raise DistBackendError(
            f"the process group {pg.members.name!r} has no abort hooks (supports_abort_hooks is "
            "False): hpcdist ends the job from native code, which cannot run Python safely; in a "
            "job that goes on after a death (HPCDIST_FT=1) it has"
        )


def handle_of(pg: Any) -> str:
    """Return the text that stands for this process in :func:`reconfigure`."""
    comm = _native(pg)
    if world.following and pg is world.pg:
        return str(world.following[0])
    return f"hpcdist:{comm.uid:x}:{comm.rank}"


def reconfigure(
    pg: Any,
    opts: ReconfigureOptions | None,
    timeout: timedelta | None,
    *,
    followed: bool = True,
) -> Reconfigured:
    """Let the ranks that live go on: :meth:`hpcdist.ProcessGroup.reconfigure`.

    With `followed` False the caller calls :func:`follow` on all ranks next.
    """
    began = time.monotonic()
    if world.pg is not pg:
        raise ValueError(
            f"the process group {pg.members.name!r} cannot be reconfigured, only the default group "
            "can: its ranks decide what the ranks of all others mean"
        )
    options, following = opts or ReconfigureOptions(), world.following
    if world.rebuilding is not None and not (world.renewal or following):
        # A follower's thread has ended that reconfiguration. Or, with spares, a signal handler
        # raised in it, and its thread may still be in calls of MPI.
        world.rebuilding.settle()
        world.rebuilding = None
    if world.rebuilding is None:
        try:
            # else the others have the new world: an exception came in between
            if not (world.renewal or following):
                _recover(pg, options, timeout)
        finally:
            if world.renewal:  # also where a signal handler raises
                _adopt(pg)
    rebuild = _rebuild(pg, options, timeout)
    _, before, former, lost, joined, _ = world.following or following
    if followed:
        follow(pg)
    world.following, world.rebuilding = (), None
    result = Reconfigured(lost, former, time.monotonic() - began, joined)
    made = pg.carrier
    say = _log.warning if made.rank == 0 else _log.info
    say(
        "the default group goes on with %d of %d ranks after %.3f s; lost: %s%s",
        made.size,
        before,
        result.seconds,
        ", ".join(map(str, lost)) or "none",
        _with_spares(pg, joined),
    )
    if rebuild is None:
        raise DistMismatchError(
            "reconfigure(rebuild=True) was called on some ranks, and without rebuild on others: "
            "the default group goes on, and all other groups are lost"
        )
    return result


def follow(pg: Any) -> None:
    """Renew what else keeps ranks; all ranks must call it."""
    for each in followers:
        each(pg)


def _with_spares(pg: Any, joined: tuple[int, ...]) -> str:
    if not world.spares:
        return ""
    taken = f"; taken by spares: {', '.join(map(str, joined))}" if joined else ""
    return f"{taken}; spares left: {_engine.world_place(_native(pg))[2]}"


def _recover(pg: Any, opts: ReconfigureOptions, timeout: timedelta | None) -> None:
    """Make the new world with the others, into ``world.renewal``."""
    limit = opts.timeout if timeout is None else timeout
    given = None if limit is None else seconds_of(limit)
    comm = _native(pg)
    renewed(pg._backends, comm)  # raises if a backend cannot
    _check_handles(opts.handles, comm)
    for group in list(world.groups):
        group.hooks.abort(group.members.generation, group.members.name)
    seconds = comm.timeout if given is None else given
    _engine.recover(comm, pg.members.name, seconds, world.renewal, opts.rebuild)


def _rebuild(pg: Any, opts: ReconfigureOptions, timeout: timedelta | None) -> bool | None:
    """Make the other groups again, if all ranks want that; return what they want."""

    def repeat() -> None:
        try:
            _recover(pg, ReconfigureOptions(timeout=opts.timeout, rebuild=True), timeout)
        finally:
            if world.renewal:
                _adopt(pg)

    agreed: bool | None = world.following[-1] if world.following else False
    if agreed and not world.spares:  # former spares come later: rebuild.with_spares()
        rebuilding = world.rebuilding = world.rebuilding or Rebuilding(pg, repeat)
        try:
            rebuilding.wait()
        finally:
            if rebuilding.error is not None:
                world.rebuilding = rebuilding.next()
    return agreed


def _adopt(pg: Any) -> None:
    """Take the place of the old world: its groups are of no use any more.

    What a signal handler raises meanwhile comes out when all is done, as the others have done it.
    """
    made, places, _, _, rebuild = world.renewal
    generation, raised, old = pg.members.generation, None, [*reversed(pg._backends.values())]
    for _ in range(_HANDLERS):
        try:
            if pg.members.generation == generation:
                _switch(pg, made)
            keep_all(pg, places if rebuild else None, old)
            old.extend(take_dropped())
            world.counts, world.taken = {}, {}
            log.set_rank(made.rank, made.size)
            _engine.mark_end("", made.rank, _engine.ranks_of_machine(made))
            break
        except BaseException as error:
            raised = error
    for backend in dict.fromkeys(old):
        try:
            backend.free(DRAIN)
        except DistError:
            pass  # what does not end keeps its tensors; nothing waits for it
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised


def _switch(pg: Any, made: _engine.Comm) -> None:
    backends = renewed(pg._backends, made)
    comm = pg.hooks.carry(backends)
    members = Members(tuple(range(made.size)), pg.members.name, pg.members.generation + 1)
    following = (handle_of(pg), len(pg.members.ranks), *world.renewal[1:])
    if world.following:
        following = _both(world.following, following)
    # From here on no call: signal handlers run at calls.
    pg._backends, pg.carrier, world.comm = backends, comm, comm
    pg.members, world.following, world.renewal = members, following, []


def _both(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what two recoveries, one after the other, have found; in a world without spares."""
    handle, size, places, lost, _, _ = first
    _, _, now, then, joined, rebuild = second
    every = tuple(sorted((*lost, *(places[rank] for rank in then))))
    return handle, size, tuple(places[rank] for rank in now), every, joined, rebuild


def _check_handles(handles: Collection[str], comm: _engine.Comm) -> None:
    if not handles:
        return
    job = f"hpcdist:{comm.uid:x}:"
    lost = set(_engine.lost_ranks(comm))
    alive = [f"{job}{rank}" for rank in range(comm.size) if rank not in lost]
    given = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
    if given != alive and sorted(given) != sorted(alive):
        raise ValueError(
            f"the handles {given} are not those of the ranks that live, {alive}: hpcdist cannot "
            "leave a rank out that lives, nor take one in"
        )
    if isinstance(handles, (list, tuple)) and given != alive:
        raise ValueError("the handles are not in the order of their ranks, which hpcdist keeps")
