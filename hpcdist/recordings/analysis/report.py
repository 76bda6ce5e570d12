"""The analysis as one dictionary: what JSON prints, and what text and page show."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hpcdist.recordings.model import Operation, Recording

from .match import Divergence, collectives, divergences

#: A rank is a straggler if the others waited for it for this share of the recorded time.
STRAGGLER = 0.05


def analysis(recordings: list[Recording]) -> dict[str, Any]:
    """Analyze the recorders of a job.

    Parameters
    ----------
    recordings : list of Recording
        In the order of ranks.

    Returns
    -------
    dict
        Plain values; times in seconds, absolute ones since 1970.
    """
    known = {one.rank for one in recordings}
    size = max(one.size for one in recordings)
    times = [t for one in recordings for o in one.operations for t in (o.called, o.ended or 0)]
    begin, end = min((t for t in times if t), default=0), max(times, default=0)
    waits, rows = _waits(recordings), _operations(recordings)
    return {
        "job": recordings[0].job,
        "program": recordings[0].program,
        "ranks": size,
        "missing_ranks": [rank for rank in range(size) if rank not in known],
        "begin": begin / 1e9,
        "seconds": (end - begin) / 1e9,
        "divergences": [_divergence(one) for one in divergences(recordings)],
        "processes": [_process(one) for one in recordings],
        "waits": _late(waits, (end - begin) / 1e9),
        "operations": rows,
    }


def _divergence(one: Divergence) -> dict[str, Any]:
    collective = one.collective
    variants: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(collective.calls.items()):
        variants[f"{call}{_ending(call)}"].append(rank)
    return {
        "kind": one.kind,
        "group": collective.group.name,
        "number": collective.seq,
        "at": one.at / 1e9,
        "calls": [{"ranks": ranks, "call": call} for call, ranks in variants.items()],
        "absent": collective.absent,
        "unknown": [
            rank
            for rank in collective.group.ranks
            if rank not in collective.calls and rank not in collective.absent
        ],
    }


def _ending(call: Operation) -> str:
    if call.state == "failed":
        return f": {call.failure}"
    return "" if call.finished else f": {call.state}, has not ended"


def _process(one: Recording) -> dict[str, Any]:
    last = one.operations[-1] if one.operations else None
    return {
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "state": "alive" if one.alive else "left in order" if one.left else "ended or copied",
        "seen": one.seen / 1e9,
        "operations": last.number if last else 0,
        "kept": len(one.operations),
        "last": str(last) if last else "",
        "last_state": (last.failure or last.state) if last else "",
        "last_called": last.called / 1e9 if last else 0.0,
        "unfinished": [str(o) for o in one.operations if not o.finished],
        "stacks": one.stacks,
    }


def _waits(recordings: list[Recording]) -> dict[int, dict[str, float]]:
    """What each rank waited for others, and what the others waited for it, in seconds.

    A rank that is behind stays so in asynchronous calls, because nobody waits in them: there it
    counts by how far it fell further behind since the collective before, as in hd_late.c.
    """
    waits: dict[int, dict[str, float]] = {
        one.rank: {"waited": 0.0, "caused": 0.0, "last": 0, "worst": 0.0} for one in recordings
    }
    before: dict[str, tuple[int, int]] = {}  # by series: the rank that stays behind, nanoseconds
    for one in collectives(recordings):
        if not one.whole or len(one.calls) < 2:
            continue
        late, behind = one.late()
        who, lag = before.pop(one.series, (late, 0))
        if all(call.queued for rank, call in one.calls.items() if rank != late):
            before[one.series] = late, behind
            behind = max(0, behind - lag) if who == late else behind
        last = one.calls[late].called
        for rank, call in one.calls.items():
            if not call.queued:  # an asynchronous call holds up no rank
                waits[rank]["waited"] += (last - call.called) / 1e9
        waits[late]["caused"] += behind / 1e9
        waits[late]["last"] += 1
        waits[late]["worst"] = max(waits[late]["worst"], behind / 1e9)
    return waits


def _late(waits: dict[int, dict[str, float]], seconds: float) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "waited": row["waited"],
            "others_waited": row["caused"],
            "times_last": int(row["last"]),
            "worst": row["worst"],
            "straggler": seconds > 0 and row["caused"] > STRAGGLER * seconds and len(waits) > 1,
        }
        for rank, row in waits.items()
    ]


def _operations(recordings: list[Recording]) -> list[dict[str, Any]]:
    """Time and bandwidth by rank and operation; of those whose end was timed."""
    arrived: dict[tuple[str, int], int] = {}
    for one in collectives(recordings):
        if one.whole:
            arrived[one.series, one.seq] = max(call.called for call in one.calls.values())
    rows = []
    for recording in recordings:
        by_name: dict[str, list[Operation]] = defaultdict(list)
        for operation in recording.operations:
            by_name[operation.name].append(operation)
        for name, operations in sorted(by_name.items()):
            rows.append({"rank": recording.rank, "operation": name, **_sums(operations, arrived)})
    return rows


def _sums(operations: list[Operation], arrived: dict[tuple[str, int], int]) -> dict[str, Any]:
    waited = moved = 0
    timed = size = 0
    for one in operations:
        if one.ended is None or one.state != "done":
            continue
        begun = max(
            one.called,
            one.started or 0,
            one.agreed or 0,
            arrived.get((one.series, one.seq), 0) if one.group and not one.message else 0,
        )
        timed += 1
        size += one.bytes
        waited += max(0, min(begun, one.ended) - one.called)
        moved += max(0, one.ended - begun)
    return {
        "calls": len(operations),
        "bytes": sum(one.bytes for one in operations),
        "timed": timed,
        "waited": waited / 1e9,
        "moved": moved / 1e9,
        "bandwidth": size / (moved / 1e9) if moved else 0.0,
        "failed": sum(one.state == "failed" for one in operations),
    }
