"""Which rank's operation belongs to which: the collectives of a group go by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcdist.recordings.model import Group, Operation, Recording

#: Their ranks may give different sizes.
_UNEVEN = ("gather", "scatter", "all_to_all")


@dataclass
class Collective:
    """One collective of a group, as its ranks called it.

    Attributes
    ----------
    group : Group
        As its lowest rank knows it.
    seq : int
        Its number.
    calls : dict of int to Operation
        By world rank.
    absent : list of int
        World ranks that have not called it, though their recorders reach to where it would be.
    """

    group: Group
    seq: int
    calls: dict[int, Operation]
    absent: list[int]

    @property
    def series(self) -> str:
        """The series of its number, see :attr:`hpcdist.recordings.Group.series`."""
        return next(iter(self.calls.values())).series

    @property
    def first(self) -> int:
        """When the first rank called it, in nanoseconds since 1970."""
        return min(operation.called for operation in self.calls.values())

    @property
    def whole(self) -> bool:
        """Whether every rank of the group has called it and its call is known."""
        return len(self.calls) == self.group.size

    def late(self) -> tuple[int, int]:
        """Return the rank that called it last, and its nanoseconds behind the one before it."""
        order = sorted(self.calls, key=lambda rank: self.calls[rank].called)
        if len(order) < 2:
            return order[0], 0
        return order[-1], self.calls[order[-1]].called - self.calls[order[-2]].called


@dataclass(frozen=True)
class Divergence:
    """The first collective of a group in which its ranks did not do the same.

    Attributes
    ----------
    at : int
        When the first rank called it, in nanoseconds since 1970.
    kind : {"mismatch", "absent", "failed"}
        They called different things; ranks did not call it; it failed on ranks that all called it,
        as far as their calls are recorded.
    collective : Collective
        What they called.
    """

    at: int
    kind: str
    collective: Collective


def collectives(recordings: list[Recording]) -> Iterator[Collective]:
    """Put the ranks' collectives together.

    Parameters
    ----------
    recordings : list of Recording
        Of one job.

    Yields
    ------
    Collective
        Series by series, in the order of their numbers.
    """
    groups: dict[str, Group] = {}
    calls: dict[str, dict[int, dict[int, Operation]]] = {}
    members: dict[str, set[int]] = {}
    oldest: dict[tuple[str, int], int] = {}
    overwriting: set[int] = set()  # ranks whose recorders have begun to overwrite
    for recording in recordings:
        for group in recording.groups:
            for series in group.series:
                groups.setdefault(series, group)
                members.setdefault(series, set()).add(recording.rank)
        full = bool(recording.operations) and recording.operations[0].number > 1
        if full:
            overwriting.add(recording.rank)
        for operation in recording.operations:
            if operation.group is None or operation.message:
                continue
            series, seq = operation.series, operation.seq
            calls.setdefault(series, {}).setdefault(seq, {})[recording.rank] = operation
            if full:
                oldest.setdefault((series, recording.rank), seq)
    for series, numbers in calls.items():
        for seq in sorted(numbers):
            absent = [
                rank
                for rank in sorted(members[series])
                # what a recorder has overwritten may have been this call, also if nothing is left
                if rank not in numbers[seq]
                and oldest.get((series, rank), seq if rank in overwriting else 0) < seq
            ]
            yield Collective(groups[series], seq, numbers[seq], absent)


def divergences(recordings: list[Recording]) -> list[Divergence]:
    """Find the first divergence of each group.

    Parameters
    ----------
    recordings : list of Recording
        Of one job.

    Returns
    -------
    list of Divergence
        The earliest first.
    """
    found: dict[int, Divergence] = {}
    for one in collectives(recordings):
        before = found.get(one.group.uid)
        # over NCCL an error ends all that is in flight, also what was called before its cause
        lost = before and before.kind == "failed" and _in_flight(before.collective)
        if before and not lost:
            continue
        kind = _judge(one)
        if kind and (not before or kind != "failed"):
            found[one.group.uid] = Divergence(one.first, kind, one)
    return sorted(found.values(), key=lambda divergence: divergence.at)


def _in_flight(one: Collective) -> bool:
    """Whether no rank waited for it."""
    return all(call.queued for call in one.calls.values())


def _judge(one: Collective) -> str:
    calls = list(one.calls.values())
    # a refused call has no tensor, and would differ from all others in that: its failure says more
    whole = [call for call in calls if call.dtype or not call.failure]
    if len({call.name for call in calls}) > 1 or len(set(map(_fingerprint, whole))) > 1:
        return "mismatch"
    if one.absent and any(not call.finished or call.state == "failed" for call in calls):
        return "absent"
    if any(call.state == "failed" for call in calls):
        return "failed"
    return ""


def _fingerprint(call: Operation) -> tuple[object, ...]:
    """What must be the same in the calls of all ranks."""
    uneven = call.kind in _UNEVEN
    size = () if uneven else (call.elements, call.shape)
    return (call.name, call.dtype, call.op, call.peer, call.kind, *size)
