"""What each rank of a running job does, as plain values: for ``top`` and the debug server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any, TypeVar

from .ask import ask
from .model import Operation, Recording
from .read import find, folder_of_user, read

_T = TypeVar("_T")
#: Operations of each rank that are looked at: sizes, and who arrived last.
NEWEST = 128
#: Letters of a stack that are kept.
_LONGEST = 32 << 10
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
#: The libraries whose frames are not the program's but the wait itself, each with one of its files.
_LIBRARIES = {"hpcdist": "recordings/rows.py", "torch/distributed": "distributed_c10d.py"}
_LIBRARY = re.compile(f"/({'|'.join(_LIBRARIES)})(?=/)")


class SeveralJobsError(ValueError):
    """More than one job fits what the caller has named."""


def rows_of(job: str | None, stacks: bool, pids: bool = True) -> list[dict[str, Any]]:
    """Read the ranks of a job that this node has.

    Parameters
    ----------
    job : str, optional
        Eight digits, the pid of a rank, or Slurm's number; by default the only job of this user.
    stacks : bool
        Whether to ask for stacks.
    pids : bool
        Whether `job` may be a pid: not if it was given on another node.

    Returns
    -------
    list of dict
        A row for each rank; plain values.

    Raises
    ------
    ValueError
        If there is no such job here, or several fit.
    """
    chosen = _choose(_all_here(), job, pids)
    if stacks:
        ask([one.path for one in chosen if one.alive])
        chosen = readable([Path(one.path) for one in chosen])
    now = time.time_ns()
    rows = [row_of(one, now) for one in sorted(chosen, key=lambda one: one.rank)]
    return rows if stacks else [{**row, "stacks": ""} for row in rows]


def _all_here() -> list[Recording]:
    """The recorders of this user on this node, of all jobs."""
    try:
        return readable(find(folder_of_user()))
    except OSError:
        return []


def readable(paths: list[Path], newest: int | None = NEWEST) -> list[Recording]:
    """Read the recorders that can be read.

    Parameters
    ----------
    paths : list of Path
        The files.
    newest : int, optional
        Operations to read of each; None reads all.

    Returns
    -------
    list of Recording
        Without those that are gone.
    """
    found = []
    for path in paths:
        try:
            found.append(read(path, newest))
        except (OSError, ValueError):
            continue  # it has just ended, or is of another version
    return found


def _choose(recordings: list[Recording], job: str | None, pids: bool) -> list[Recording]:
    """The recorders of one job, as `rows_of` names it; ValueError if none or several fit."""
    if job is not None:
        named = {one.job for one in recordings if job in (one.job, one.launch)}
        if pids:  # that of a process of an earlier job may be another's now
            ranks = [one for one in recordings if job == str(one.pid)]
            named |= {one.job for one in [one for one in ranks if one.alive] or ranks}
    else:
        named = {one.job for one in recordings if one.alive}
    if not named:
        raise ValueError(
            f"no rank of {f'job {job}' if job else 'a running job'} of this user is on this node; "
            "--hosts names the nodes"
        )
    if len(named) > 1:
        listed = [
            f"  {one.job}: {one.size} ranks, {one.program}"
            for one in {one.job: one for one in recordings if one.job in named}.values()
        ]
        raise SeveralJobsError("several jobs fit; choose one by its digits:\n" + "\n".join(listed))
    return current(one for one in recordings if one.job in named)


def current(recordings: Iterable[Recording]) -> list[Recording]:
    """Leave out the processes that died before their job went on without them.

    Parameters
    ----------
    recordings : iterable of Recording
        Of one job.

    Returns
    -------
    list of Recording
        The ranks and spares that it has now; also those that died when it last had all of them.
    """
    return _left(recordings, lambda one: (one.alive, one.survival.recoveries))


def merged(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the rows of several nodes in the order of ranks, each rank once.

    Parameters
    ----------
    rows : iterable of dict
        Of :func:`row_of`, of one job.

    Returns
    -------
    list of dict
        As :func:`current` leaves them. Where a former spare has a dead rank's number, the spare's.
    """
    left = _left(rows, lambda row: (row["alive"], row["recoveries"]))
    by_rank = {row["rank"]: row for row in sorted(left, key=lambda row: bool(row["alive"]))}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _left(found: Iterable[_T], known: Callable[[_T], tuple[bool, int]]) -> list[_T]:
    """Those that live, or died when their job last had all of them; `known`: lives, recoveries."""
    found = list(found)
    newest = max((known(one)[1] for one in found), default=0)
    return [one for one in found if known(one)[0] or known(one)[1] == newest]


def row_of(one: Recording, now: int) -> dict[str, Any]:
    """Return what a rank does, as plain values.

    Parameters
    ----------
    one : Recording
        Of the rank.
    now : int
        Nanoseconds since 1970.

    Returns
    -------
    dict
        Times in seconds. `groups` has the name of each group by both its series of numbers,
        `calls` the series, the number and the time of recent collectives, `reached` the last
        collective of each series, `open` the operations that have not ended. `recovering` are the
        seconds of all recoveries, `recovered` those since the last one, or None.
    """
    open_ = [operation for operation in one.operations if not operation.finished]
    last = one.operations[-1] if one.operations else None
    shown = open_[0] if open_ else last
    collectives = [o for o in one.operations if o.group and not o.message]
    return {
        "job": one.job,
        "program": one.program,
        "size": one.size,
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "alive": one.alive,
        "silent": max(0.0, (now - one.seen) / 1e9),
        "inside": bool(open_),
        "operation": str(shown) if shown else "",
        "state": (shown.failure or shown.state) if shown else "",
        "seconds": (now - _since(shown, bool(open_))) / 1e9 if shown else 0.0,
        "others": [str(operation) for operation in open_[1:]],
        "operations": last.number if last else 0,
        "bytes": {o.number: o.bytes for o in one.operations},
        "names": {o.number: o.name for o in one.operations},
        "groups": {series: group.name for group in one.groups for series in group.series},
        "reached": {o.series: o.seq for o in collectives},
        "calls": [(o.series, o.seq, o.called) for o in collectives if not o.queued],
        "open": [_open(operation, now) for operation in open_],
        "stacks": one.stacks[:_LONGEST],
        "stacks_age": (now - one.stacks_at) / 1e9 if one.stacks_at else None,
        "where": where(one.stacks),
        "waits": bool(one.survival.waits),
        "spares": one.survival.spares,
        "deaths": one.survival.deaths,
        "recoveries": one.survival.recoveries,
        "recovering": one.survival.took / 1e9,
        "recovered": (now - one.survival.last) / 1e9 if one.survival.recoveries else None,
    }


def survival(rows: list[dict[str, Any]]) -> str:
    """Return what a job has survived, as a sentence.

    Parameters
    ----------
    rows : list of dict
        Of :func:`row_of`, of the ranks that are known.

    Returns
    -------
    str
        Empty if it has had no recovery.
    """
    newest = max(rows, key=lambda row: row["recoveries"], default=None)
    if newest is None or not newest["recoveries"]:
        return ""
    times, dead = newest["recoveries"], newest["deaths"]
    # a former spare has waited in those before it
    seconds = max(row["recovering"] for row in rows)
    return (
        f"{dead} process{'es have' if dead != 1 else ' has'} died; {times} "
        f"recover{'ies' if times != 1 else 'y'} of {seconds:.3f} s in all, the last "
        f"{newest['recovered']:.0f} s ago"
    )


def _open(operation: Operation, now: int) -> dict[str, Any]:
    return {
        "call": str(operation),
        "group": operation.group.name if operation.group else "",
        "series": operation.series,
        "seq": 0 if operation.message else operation.seq,
        "seconds": (now - operation.called) / 1e9,
    }


def _since(shown: Operation, inside: bool) -> int:
    """When a rank entered its operation, or left it."""
    return shown.called if inside or shown.ended is None else shown.ended


def where(stacks: str) -> str:
    """Return the line of the program that the main thread is in.

    Parameters
    ----------
    stacks : str
        As faulthandler writes them: the main thread last, each innermost frame first.

    Returns
    -------
    str
        ``me/train.py:12 in load < me/train.py:64 in main``; empty if there is none.
    """
    main = stacks[stacks.rfind("hread 0x") :] if "hread 0x" in stacks else ""
    frames = dropwhile(lambda frame: _of_library(frame[0]), _FRAME.findall(main))
    return " < ".join(
        f"{'/'.join(file.rsplit('/', 2)[-2:])}:{line} in {function}"
        for file, line, function in islice(frames, 3)
    )


def _of_library(file: str) -> bool:
    """Whether a file is of a library that waits: the program's folder may have the same name."""
    return any(_is_library(file[: one.end()], one[1]) for one in _LIBRARY.finditer(file))


@lru_cache(maxsize=256)
def _is_library(folder: str, name: str) -> bool:
    above = folder.removesuffix(f"/{name}")
    return above.endswith(("/site-packages", "/dist-packages")) or os.path.isfile(
        f"{folder}/{_LIBRARIES[name]}"
    )
