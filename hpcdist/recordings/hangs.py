"""Which ranks wait for which just now, and did so lately; from the rows of all ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def hangs(rows: list[dict[str, Any]], least: float = 1.0) -> list[dict[str, Any]]:
    """Find the collectives that ranks wait in, and the ranks that have not called them.

    Parameters
    ----------
    rows : list of dict
        Of :func:`hpcdist.recordings.rows.row_of`, of all ranks that are known.
    least : float
        Seconds; a shorter wait does not count.

    Returns
    -------
    list of dict
        The longest wait first. `missing` has the ranks of the group that have not called it, and
        `calls` what the ranks in it called, which is more than one call where they disagree.
    """
    waiting: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for row in rows:
        for one in row["open"]:
            if one["seq"] and one["seconds"] >= least and row["alive"]:
                waiting[one["series"], one["seq"]].append((row["rank"], one))
    found = []
    for (series, seq), ranks in waiting.items():
        calls: dict[str, list[int]] = defaultdict(list)
        for rank, one in ranks:
            calls[one["call"]].append(rank)
        found.append(
            {
                "group": ranks[0][1]["group"],
                "number": seq,
                "seconds": max(one["seconds"] for _, one in ranks),
                "waiting": sorted(rank for rank, _ in ranks),
                "calls": [{"call": call, "ranks": who} for call, who in calls.items()],
                "missing": sorted(
                    row["rank"]
                    for row in rows
                    if series in row["groups"] and row["reached"].get(series, 0) < seq
                ),
            }
        )
    return sorted(found, key=lambda one: -one["seconds"])


def arrivals(
    rows: list[dict[str, Any]], after: int = 0
) -> tuple[dict[int, dict[str, float]], float, int]:
    """Find out for how long the others have waited for each rank in the collectives of late.

    Parameters
    ----------
    rows : list of dict
        Of all ranks that are known.
    after : int
        Nanoseconds since 1970: only collectives that were called later.

    Returns
    -------
    dict, float, int
        By rank: `waited` for it in seconds (the time by which it was behind the one before it), and
        `times` that it was last, of `of` collectives; the seconds that these took in all; when the
        newest one was called. Clocks of different hosts are taken as they are.
    """
    members: dict[str, int] = defaultdict(int)
    for row in rows:
        for series in row["groups"]:
            members[series] += 1
    calls: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        for series, seq, called in row["calls"]:
            calls[series, seq].append((called, row["rank"]))
    whole = [sorted(c) for (series, _), c in calls.items() if len(c) == members[series] > 1]
    whole = [order for order in whole if order[0][0] > after]
    table = {row["rank"]: {"waited": 0.0, "times": 0.0, "of": 0.0} for row in rows}
    for order in whole:
        last = table[order[-1][1]]
        last["waited"] += (order[-1][0] - order[-2][0]) / 1e9
        last["times"] += 1
        for _, rank in order:
            table[rank]["of"] += 1
    newest = max((order[-1][0] for order in whole), default=after)
    begin = min((order[0][0] for order in whole), default=newest)
    return table, (newest - begin) / 1e9, newest
