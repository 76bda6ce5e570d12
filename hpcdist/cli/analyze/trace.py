"""The operations as a timeline: for the page, and in Chrome's format for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcdist.cli.merge_traces import merge, read_trace, write_trace
from hpcdist.recordings import Operation, Recording

__all__ = ["merged", "timeline"]

#: Nanoseconds: what an operation takes whose end was not timed, at most.
SHORT = 50_000


def end_of(operation: Operation, after: Operation | None, seen: int) -> int:
    """Return when an operation ended, as far as it is known, in nanoseconds since 1970."""
    if operation.ended is not None:
        return operation.ended
    if not operation.finished:
        return max(seen, operation.called)
    return min(operation.called + SHORT, after.called if after else operation.called + SHORT)


def timeline(recordings: list[Recording]) -> list[dict[str, Any]]:
    """Return a bar for each operation.

    Parameters
    ----------
    recordings : list of Recording
        Of one job.

    Returns
    -------
    list of dict
        Rank, name, text, state, and begin and end in nanoseconds since 1970.
    """
    bars = []
    for recording in recordings:
        following = [*recording.operations[1:], None]
        for operation, after in zip(recording.operations, following, strict=True):
            bars.append(
                {
                    "rank": recording.rank,
                    "name": operation.name,
                    "text": str(operation),
                    "bytes": operation.bytes,
                    "state": operation.failure or operation.state,
                    "begin": operation.called,
                    "agreed": operation.agreed,
                    "end": end_of(operation, after, recording.seen),
                }
            )
    return bars


def merged(out: Path, recordings: list[Recording], profiles: list[Path]) -> None:
    """Write a trace in Chrome's format.

    Parameters
    ----------
    out : Path
        The file.
    recordings : list of Recording
        Of one job.
    profiles : list of Path
        The profiler's traces, rank 0 first, or none.

    Raises
    ------
    OSError, ValueError
        If a trace cannot be read or written.
    """
    bars = timeline(recordings)
    base = min((bar["begin"] for bar in bars), default=0)
    ranks = max([one.rank for one in recordings] + [len(profiles) - 1]) + 1
    traces = []
    for rank in range(ranks):
        if rank < len(profiles):
            trace = read_trace(profiles[rank])
        else:
            trace = {"baseTimeNanoseconds": base, "traceEvents": []}
        begin = trace.get("baseTimeNanoseconds", 0)
        trace["traceEvents"] += [_event(bar, begin) for bar in bars if bar["rank"] == rank]
        trace["traceEvents"] += [
            {"ph": "M", "name": "thread_name", "pid": _PID, "tid": 0,
             "args": {"name": "flight recorder"}},
            {"ph": "M", "name": "process_labels", "pid": _PID, "tid": 0,
             "args": {"labels": "hpcdist"}},
        ]  # fmt: skip
        traces.append(trace)
    write_trace(out, merge(traces))


#: Process id of the recorder's row; the profiler has small and real ones.
_PID = 9_000_000


def _event(bar: dict[str, Any], base: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "hpcdist",
        "name": bar["name"],
        "pid": _PID,
        "tid": 0,
        "ts": (bar["begin"] - base) / 1000,
        "dur": (bar["end"] - bar["begin"]) / 1000,
        "args": {"call": bar["text"], "state": bar["state"], "bytes": bar["bytes"]},
    }
