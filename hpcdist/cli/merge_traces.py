"""Put the profiler's traces of several ranks into one, to see them side by side.

Write one trace a rank with prof.export_chrome_trace(f"trace{rank}.json"), then merge them in the
order of the ranks and open the result in https://ui.perfetto.dev or chrome://tracing. Names that
end in .gz are compressed. The clocks of the hosts are taken as they are, so between hosts times
are as good as their clocks agree.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Process ids of one rank's events are moved into a range of its own, this wide.
_SPAN = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("out", type=Path, help="file to write; .gz compresses it")
    parser.add_argument("traces", type=Path, nargs="+", help="one trace a rank, rank 0 first")


def run(options: argparse.Namespace) -> int:
    """Merge the files; 1 if one cannot be read or written."""
    traces = []
    for path in options.traces:
        try:
            traces.append(read_trace(path))
        except (OSError, ValueError) as error:
            print(f"hpcdist merge-traces: {path}: {error}", file=sys.stderr)
            return 1
    merged = merge(traces)
    try:
        write_trace(options.out, merged)
    except OSError as error:
        print(f"hpcdist merge-traces: {options.out}: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {len(traces)} ranks, {len(merged['traceEvents'])} events")
    return 0


def merge(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge traces in Chrome's format.

    Parameters
    ----------
    traces : list of dict
        One a rank, rank 0 first, each with its list ``traceEvents``. They are used up.

    Returns
    -------
    dict
        One trace: each rank's processes have the rank in their names and stand in its order.
    """
    # The profiler counts from a moment that it writes down: all go by the first one's.
    base = traces[0].get("baseTimeNanoseconds", 0) if traces else 0
    events: list[dict[str, Any]] = []
    for rank, trace in enumerate(traces):
        shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1000
        own = trace["traceEvents"]
        events.extend(_names(own, rank))
        events.extend(_moved(own, rank, shift))
    return {**(traces[0] if traces else {}), "traceEvents": events}


def _names(events: list[dict[str, Any]], rank: int) -> Iterator[dict[str, Any]]:
    """Rows that name a rank's processes, in place of those that the profiler wrote."""
    labels: dict[int, str] = {}
    for event in events:
        pid = event.get("pid")
        if isinstance(pid, int):
            labels.setdefault(pid, "")
            if event.get("ph") == "M" and event.get("name") == "process_labels":
                about = event.get("args")
                labels[pid] = about.get("labels", "") if isinstance(about, dict) else ""
    for place, (pid, label) in enumerate(sorted(labels.items())):
        name = f"rank {rank}: process {pid} {label}".rstrip()
        own = {"ph": "M", "pid": _pid(pid, rank), "tid": 0, "ts": 0}
        yield {**own, "name": "process_name", "args": {"name": name}}
        yield {**own, "name": "process_sort_index", "args": {"sort_index": 1000 * rank + place}}


def _pid(pid: int, rank: int) -> int:
    return rank * _SPAN + pid % _SPAN


def _moved(events: list[dict[str, Any]], rank: int, shift: float) -> Iterator[dict[str, Any]]:
    """A rank's events with processes, times and identities that do not meet another rank's."""
    for event in events:
        if event.get("ph") == "M" and event.get("name") in _REPLACED:
            continue
        if isinstance(event.get("pid"), int):
            event["pid"] = _pid(event["pid"], rank)
        if "ts" in event:
            event["ts"] += shift
        if "id" in event and event.get("ph") in ("s", "t", "f"):  # arrows between events
            event["id"] = f"{rank}.{event['id']}"
        yield event


_REPLACED = ("process_name", "process_labels", "process_sort_index")


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace in Chrome's format.

    Parameters
    ----------
    path : Path
        The file; .gz says that it is compressed.

    Returns
    -------
    dict
        With a list ``traceEvents``.

    Raises
    ------
    OSError, ValueError
        If it cannot be read, or is no such trace.
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
    except (EOFError, zlib.error) as error:  # of a file that was not written to its end
        raise ValueError(f"the compressed data are damaged: {error}") from error
    except RecursionError as error:
        raise ValueError("not a trace in Chrome's format: it is nested too deeply") from error
    if isinstance(trace, list):  # the other form that the format allows
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("not a trace in Chrome's format: it has no list traceEvents")
    if not all(isinstance(event, dict) for event in trace["traceEvents"]):
        raise ValueError("not a trace in Chrome's format: an event is no object")
    numbers = [trace.get("baseTimeNanoseconds", 0)]
    numbers += [event["ts"] for event in trace["traceEvents"] if "ts" in event]
    if not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError("not a trace in Chrome's format: a time is no number")
    return trace


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace beside its place and rename it, so that a full disk leaves no half of a file.

    Parameters
    ----------
    path : Path
        The file; .gz compresses it.
    trace : dict
        In Chrome's format.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    if path.exists() and not path.is_file():  # a pipe, as /dev/stdout, cannot be replaced
        with opened(path, "wt", encoding="utf-8") as file:
            json.dump(trace, file)
        return
    path = path.resolve()  # not a link, but what it stands for
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    try:
        with opened(name, "wt", encoding="utf-8") as file:
            json.dump(trace, file)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
