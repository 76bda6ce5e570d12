"""The operations as a trace in Chrome's format, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcdist.cli.merge_traces import merge, read_trace, write_trace
from hpcdist.recordings import Recording
from hpcdist.recordings.analysis.bars import timeline


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
            try:
                trace = read_trace(profiles[rank])
            except ValueError as error:
                raise ValueError(f"{profiles[rank]}: {error}") from error
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
