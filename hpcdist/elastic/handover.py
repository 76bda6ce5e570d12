"""What a former spare gets from the other ranks: the last commit of the rank whose place it has.

All ranks come here once after each recovery of a job with spares. They first tell each other who is
still to join and what each State consists of, so that all take the same way from there, and raise
the same errors. What all ranks have, parameters for example, comes from the lowest rank that has
it; what the dead rank alone had, from the neighbour with its copy. Where groups are made again, the
latter is also what only some ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcdist import log
from hpcdist.collectives.objects import broadcast_object_list
from hpcdist.elastic.alone import is_parallel
from hpcdist.elastic.commit import Commit, packed, unpacked
from hpcdist.elastic.exchange import gathered, swap
from hpcdist.elastic.refusals import refuse_fewer
from hpcdist.elastic.shards import Shards, StateLostError, put_back_all
from hpcdist.groups.world import world

_log = log.get_logger("elastic")


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others.

    Attributes
    ----------
    joins : bool
        It was a spare, and the ranks have not committed together with it yet.
    has : bool
        It has the last commit. So has one that joins if it got it before another rank died.
    number : int
        Which State of its program recovers.
    parts : dict
        By name, what each part is.
    alone : list of str or None
        As of :class:`~hpcdist.elastic.commit.Commit`.
    lost : str
        Which part is of a group that was not made again.
    size : int
        Ranks that made the last commit; 0 where it has none.
    held : list of int
        Ranks, as numbered at the last commit, of which it has what they alone had.
    problem : str
        Why it cannot join.
    """

    joins: bool
    has: bool
    number: int
    parts: dict[str, str]
    alone: list[str] | None
    lost: str
    size: int
    held: list[int]
    problem: str


def restore(state: Any) -> None:
    """Return to the last commit, and give it to the ranks that are still to join.

    All ranks must call it, after each recovery and when a former spare's State resumes.

    Parameters
    ----------
    state : State
        Of this rank; on one that joins it gets the others' last commit.

    Raises
    ------
    ValueError
        On all ranks, if a former spare's State is another one, or does not contain what it has
        built without the others.
    StateLostError
        On all ranks, if what a dead rank alone had is lost with all its copies.
    """
    reports = [_Report(**each) for each in gathered(_report(state))]
    for rank, each in enumerate(reports):
        if each.lost:
            raise ValueError(f"rank {rank} cannot return to the last commit: {each.lost}")
    if before := max(each.size for each in reports):
        refuse_fewer(state.parts, before, world.comm.size)
    if not any(each.joins for each in reports):
        state.rollback()
        return
    joining = [rank for rank, each in enumerate(reports) if not each.has]
    source = next((rank for rank, each in enumerate(reports) if each.has), None)
    if source is None:
        raise StateLostError("all ranks that had the State died, and former spares alone are left")
    _check(reports, source)
    head: list[Any] = [_head(state) if world.comm.rank == source else None]
    broadcast_object_list(head, src=source)
    places = head[0]["commit"]["places"]
    holders = _holders(reports, joining, places)
    rank, problem = world.comm.rank, ""
    if rank in joining:
        found = reports[source].alone
        alone = None if found is None else frozenset(found)
        problem = _receive(state, head[0], source, holders[rank], alone)
    else:
        state.put_back(sharded=False)
        for other in joining:
            _send(state, places[other], other, rank == source, rank == holders[other])
    for other, why in enumerate(gathered(problem) if joining else []):
        if why:
            raise ValueError(f"rank {other}, a former spare, cannot join the others: {why}")
    put_back_all(state.parts, state.committed.parts, state.rebuild, whole=True)
    if joining and rank == source:
        _log.warning("rank %s has the state of step %d", ", ".join(map(str, joining)), state.step)


def _head(state: Any) -> dict[str, Any]:
    """Return what a rank that joins must know beside the parts of the commit."""
    commit = state.committed
    about = {"size": commit.size, "places": commit.places, "step": commit.step}
    return {"commit": about, "progress": state.progress}


def _report(state: Any) -> dict[str, Any]:
    commit = state.committed
    return {
        "joins": world.joining is not None,
        "has": commit is not None,
        "number": state.number,
        "parts": {name: part.layout() for name, part in state.parts.items()},
        "alone": None if commit is None or commit.alone is None else sorted(commit.alone),
        "lost": _lost(state),
        "size": commit.size if commit is not None else 0,
        "held": sorted(commit.copies) if commit is not None else [],
        "problem": _uncovered(state) if world.joining is not None else "",
    }


def _lost(state: Any) -> str:
    """Return which part needs a group that was not made again; "" if none does."""
    for name, part in state.parts.items():
        group = part.group()
        if group is not None and group not in world.groups:
            return (
                f"the group of {name} was not made again. All members must have it, and a former "
                "spare must make as many groups of the same ranks before its State as the others"
            )
    return ""


def _uncovered(state: Any) -> str:
    """Return what this former spare has built without the others, and does not get from them."""
    if state.rebuild != world.joining.rebuilds:
        return f"its State has rebuild={state.rebuild}, unlike those of the others"
    covered: set[int] = set()
    shards = [part for part in state.parts.values() if isinstance(part, Shards)]
    for part in state.parts.values():
        if not isinstance(part, Shards):
            covered |= {id(tensor) for tensor in part.tensors()}
    for thing in world.joining.deferred:
        if not is_parallel(thing):
            if not any(part.is_of(thing) for part in shards):
                return "a ZeroRedundancyOptimizer is not in the State: pass it to State"
            continue
        missing = [name for name, p in thing.module.named_parameters() if id(p) not in covered]
        if missing:
            return (
                f"parameter {missing[0]!r} of a DistributedDataParallel is not in the State: pass "
                "the model to State"
            )
    return ""


def _check(reports: list[_Report], source: int) -> None:
    """Raise the same error on all ranks if a former spare cannot have the others' state."""
    others = reports[source]
    for rank, each in enumerate(reports):
        if not each.joins:
            continue
        who = f"rank {rank}, a former spare, cannot join the others: "
        if each.problem:
            raise ValueError(who + each.problem)
        if each.number != others.number:
            raise ValueError(
                f"{who}it resumes State {each.number} of its program, and the others are in State "
                f"{others.number}: a program with spares has one State"
            )
        alone = others.alone or ()  # these are compared with the copy of them
        for name in [name for name in (*others.parts, *each.parts) if name not in alone]:
            here, there = each.parts.get(name, "nothing"), others.parts.get(name, "nothing")
            if here != there:
                raise ValueError(
                    f"{who}its State has as {name!r} {here}, and rank {source} has {there}: every "
                    "process must build the same State"
                )


def _holders(reports: list[_Report], joining: list[int], places: list[int]) -> dict[int, int]:
    """Return for each rank that joins the lowest one with what it alone had."""
    holders = {}
    for rank in joining:
        have = [other for other, each in enumerate(reports) if places[rank] in each.held]
        if not have:
            raise StateLostError(
                f"what the former rank {places[rank]} alone had, its random numbers, buffers and "
                "values, is lost: all ranks that had a copy died. Load a checkpoint from disk, or "
                "give State more copies"
            )
        holders[rank] = have[0]
    return holders


def _send(state: Any, place: int, to: int, shared: bool, own: bool) -> None:
    """Send a rank that joins what all ranks have, or what it alone had, or both."""
    commit = state.committed
    assert commit is not None
    if shared:
        swap(packed(commit.divide(state.parts)[0]), to, [])
    if own:
        copies = {
            name: part.copy_of(place, commit.parts[name])
            for name, part in state.parts.items()
            if isinstance(part, Shards) and part.of_world
        }
        swap(packed({"own": commit.copies[place], "copies": copies}), to, [])


def _receive(
    state: Any, head: dict[str, Any], source: int, holder: int, alone: frozenset[str] | None
) -> str:
    """Receive both on the rank that joins, and put them in place; or return why it cannot."""
    shared = unpacked(swap(None, None, [source])[source])
    found = unpacked(swap(None, None, [holder])[holder])
    own, about = unpacked(found["own"]), head["commit"]
    try:
        if problem := _unlike(state, own["layouts"], alone or frozenset()):
            return problem
        parts = {}
        for name, part in state.parts.items():
            if isinstance(part, Shards):
                place = about["places"][world.comm.rank]
                where = shared if part.of_world else own["parts"]
                parts[name] = part.join(place, found["copies"].get(name), where[name])
            elif name in (alone or ()):
                parts[name] = own["parts"][name]
            else:
                parts[name] = part.join(shared[name], own["parts"][name])
        shares = {name: own[name] for name in ("live", "others")}
        state.committed = Commit(
            parts, own["values"], own["random"], alone=alone, **shares, **about
        )
        state.put_back(sharded=False)
    except Exception as error:  # of a part that is not what it was taken from
        state.committed = None
        return f"{type(error).__name__}: {error}"
    state.follow(head["progress"])
    return ""


def _unlike(state: Any, theirs: dict[str, str], alone: frozenset[str]) -> str:
    """Return which part of this State is not what the dead rank had; "" if none."""
    ours = {name: part.layout() for name, part in state.parts.items() if name in alone}
    for name in sorted({*theirs, *ours}):
        here = ours.get(name, "nothing")
        there = theirs.get(name, "nothing")
        if here != there:
            return (
                f"its State has as {name!r} {here}, and the rank whose place it has had {there}: "
                "every process must build the State of its rank"
            )
    return ""
