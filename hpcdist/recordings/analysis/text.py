"""The analysis in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_WHAT = {
    "mismatch": "the ranks called different things",
    "absent": "not all ranks called it",
    "failed": "all ranks called it, and it failed",
    "failed of some": "the ranks whose call is known all called it, and it failed",
}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Return the analysis as lines of text.

    Parameters
    ----------
    found : dict
        Of :func:`hpcdist.recordings.analysis.report.analysis`.
    """
    size, seconds = found["ranks"], found["seconds"]
    yield f"job {found['job']}, {size} ranks, {seconds:.3f} s: {found['program']}"
    if found["missing_ranks"]:
        yield f"no recorder of {ranks_in_words(found['missing_ranks'])}"
    yield ""
    yield from _divergences(found["divergences"], bool(found["missing_ranks"]))
    yield ""
    yield from _processes(found["processes"])
    yield ""
    yield from _waits(found["waits"])
    yield ""
    yield from _operations(found["operations"])


def ranks_in_words(ranks: list[int]) -> str:
    """Return "rank 3", or "ranks 0-3, 8"."""
    words, row = [], list[int]()
    for rank in [*sorted(ranks), None]:
        if row and rank != row[-1] + 1:
            words.append(f"{row[0]}" if len(row) == 1 else f"{row[0]}-{row[-1]}")
            row = []
        if rank is not None:
            row.append(rank)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def _divergences(found: list[dict[str, Any]], some_missing: bool) -> Iterator[str]:
    if not found:
        ranks = "the ranks with a recorder" if some_missing else "all ranks"
        yield f"No divergence: {ranks} called the same collectives, as far as is recorded."
        return
    for place, one in enumerate(found):
        name = "First divergence" if place == 0 else "Also"
        kind = "failed of some" if one["kind"] == "failed" and one["unknown"] else one["kind"]
        yield f"{name}: collective #{one['number']} of group '{one['group']}': {_WHAT[kind]}"
        for variant in one["calls"]:
            yield f"  {ranks_in_words(variant['ranks'])}: {variant['call']}"
        if one["absent"]:
            yield f"  {ranks_in_words(one['absent'])}: has not called it"
        if one["unknown"]:
            yield f"  {ranks_in_words(one['unknown'])}: its call is not recorded"


def _processes(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "Each rank's last operation:"
    for one in found:
        state = one["last_state"]
        yield (
            f"  rank {one['rank']} ({one['host']} pid {one['pid']}, {one['state']}): "
            + (f"{one['last']}: {state}" if one["last"] else "none")
        )
        for call in one["unfinished"]:
            if call != one["last"]:
                yield f"    not ended: {call}"


def _waits(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "Who waited for whom (whole collectives; an asynchronous call waits for nobody):"
    yield f"  {'rank':>5} {'waited':>10} {'others waited for it':>21} {'last':>6} {'worst':>10}"
    for one in found:
        yield (
            f"  {one['rank']:>5} {_time(one['waited']):>10} {_time(one['others_waited']):>21} "
            f"{one['times_last']:>6} {_time(one['worst']):>10}"
            + ("  straggler" if one["straggler"] else "")
        )


def _operations(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "Time and bandwidth (of calls that waited or moved much; others took less than 50 us):"
    yield (
        f"  {'rank':>5} {'operation':<24} {'calls':>6} {'timed':>6} {'waited':>10} {'moved':>10} "
        f"{'bandwidth':>12} {'failed':>6}"
    )
    for one in found:
        yield (
            f"  {one['rank']:>5} {one['operation']:<24} {one['calls']:>6} {one['timed']:>6} "
            f"{_time(one['waited']):>10} {_time(one['moved']):>10} {_rate(one['bandwidth']):>12} "
            f"{one['failed'] or '':>6}"
        )


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"


def _rate(bandwidth: float) -> str:
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth >= factor:
            return f"{bandwidth / factor:.3g} {unit}"
    return f"{bandwidth:.3g} B/s" if bandwidth else ""
