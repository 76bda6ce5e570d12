"""What the page shows: sampled from the recorders of this node and the reports of others."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from hpcdist.recordings import Recording, ask
from hpcdist.recordings.hangs import arrivals, hangs
from hpcdist.recordings.rows import NEWEST, current, merged, readable, row_of, survival

#: Samples of the history.
_KEPT = 300
#: Samples that the table of slow ranks is made of.
_RECENT = 60
#: Seconds of waiting after which the ranks that are missing are asked once where they are.
_LONG = 3.0
#: Seconds without a report after which a node counts as silent.
SILENT = 10.0


class Node:
    """The ranks of a job on this node.

    Parameters
    ----------
    paths : list of str
        Their recorders.
    """

    def __init__(self, paths: list[str]) -> None:
        self._paths = [Path(path) for path in paths]
        self.name = socket.gethostname()
        #: Containers may have the same name.
        self.id = os.urandom(8).hex()

    def recordings(self, newest: int | None = NEWEST) -> list[Recording]:
        """Read the recorders of the job's ranks here.

        Parameters
        ----------
        newest : int, optional
            Operations of each rank; None reads all.

        Returns
        -------
        list of Recording
            In the order of ranks.
        """
        return sorted(current(readable(self._paths, newest)), key=lambda one: one.rank)

    def ranks(self) -> list[int]:
        """Return the ranks of this node."""
        return [one.rank for one in self.recordings(1)]

    def look(self) -> dict[str, Any]:
        """Return what the ranks here do, and the node's memory.

        Returns
        -------
        dict
            Plain values.
        """
        now = time.time_ns()
        rows = [{**row_of(one, now), **_memory_of(one)} for one in self.recordings()]
        return {"node": self.name, "id": self.id, "rows": rows, "memory": _memory()}

    def stacks(self, ranks: list[int], native: bool) -> None:
        """Have ranks of this node write their stacks into their recorders.

        Parameters
        ----------
        ranks : list of int
            Those of other nodes are left out.
        native : bool
            Also the main thread's native stack, which interrupts it for some microseconds.
        """
        mine = self.recordings(1)
        ask([one.path for one in mine if one.alive and one.rank in ranks], native=native)

    def file(self, rank: int) -> bytes:
        """Return a rank's recorder as it is.

        Parameters
        ----------
        rank : int
            A rank of this node.

        Returns
        -------
        bytes
            Empty if the rank is not here.
        """
        for one in self.recordings(1):
            if one.rank == rank:
                return Path(one.path).read_bytes()
        return b""

    def files(self) -> dict[int, bytes]:
        """Return the recorders of all ranks of this node.

        Returns
        -------
        dict of int to bytes
            By rank.
        """
        return {one.rank: Path(one.path).read_bytes() for one in self.recordings(1)}


class State:
    """What is known of the whole job; made by one thread at a time.

    Parameters
    ----------
    node : Node
        This node.
    dumps : str
        The folder ``HPCDIST_DUMP``, or empty.
    """

    def __init__(self, node: Node, dumps: str) -> None:
        self.node = node
        self.dumps = dumps
        self.job = ""
        #: By the node's id.
        self.reports: dict[str, tuple[float, dict[str, Any]]] = {}
        self._history: deque[dict[str, float]] = deque(maxlen=_KEPT)
        self._before: dict[int, tuple[float, int]] = {}
        self._late: deque[tuple[dict[int, dict[str, float]], float]] = deque(maxlen=_RECENT)
        self._counted = 0  # ns: collectives until then are in it
        self._asked: set[tuple[str, int]] = set()
        self.wanted: set[int] = set()  # ranks of other nodes whose stacks are wanted

    def sample(self) -> dict[str, Any]:
        """Look at all ranks.

        Returns
        -------
        dict
            What the page gets as JSON.
        """
        now = time.time()
        looks = [(now, self.node.look()), *self.reports.values()]
        names = _distinct([look["node"] for _, look in looks])
        ordered = merged(row for _, look in looks for row in look["rows"])
        for row in ordered:
            self._rate(row, now)
        found = hangs(ordered)
        self._find_out(found)
        self._history.append(
            {
                "time": now,
                "calls": sum(row["call_rate"] for row in ordered),
                "bytes": sum(row["byte_rate"] for row in ordered),
                "inside": sum(row["inside"] for row in ordered if row["alive"]),
            }
        )
        first: dict[str, Any] = ordered[0] if ordered else {"program": "", "size": 0}
        self.job = first.get("job", self.job)
        return {
            "job": self.job,
            "program": first["program"],
            "size": first["size"],
            "survival": survival(ordered),
            "time": now,
            "nodes": [
                {
                    "node": name,
                    "ranks": len(look["rows"]),
                    "age": now - at,
                    "silent": now - at > SILENT,
                    "memory": look["memory"],
                }
                for name, (at, look) in zip(names, looks, strict=True)
            ],
            "hangs": found,
            "slowest": self._slowest(ordered),
            "sizes": _sizes(ordered),
            "history": list(self._history),
            "dumps": sorted(self.dump_files()),
            "rows": [{k: v for k, v in row.items() if k not in _INNER} for row in ordered],
        }

    def _rate(self, row: dict[str, Any], now: float) -> None:
        """Calls and bytes per second since the last look at a rank."""
        at, number = self._before.get(row["rank"], (now, row["operations"]))
        calls = row["operations"] - number
        new = [size for n, size in row["bytes"].items() if int(n) > number]
        # of more calls than are looked at, the newest ones stand for all
        moved = sum(new) * calls / len(new) if new else 0.0
        row["call_rate"] = calls / (now - at) if now > at else 0.0
        row["byte_rate"] = moved / (now - at) if now > at else 0.0
        self._before[row["rank"]] = (now, row["operations"])

    def _slowest(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """For how long the others waited for each rank, in the recent samples together."""
        table, seconds, self._counted = arrivals(rows, self._counted)
        if seconds:
            self._late.append((table, seconds))
        whole = sum(seconds for _, seconds in self._late)
        found = []
        for rank in sorted({rank for table, _ in self._late for rank in table}):
            own = [table[rank] for table, _ in self._late if rank in table]
            one = {field: sum(row[field] for row in own) for field in ("waited", "times", "of")}
            found.append({"rank": rank, **one, "share": one["waited"] / whole})
        return sorted(found, key=lambda one: -one["waited"])

    def _find_out(self, found: list[dict[str, Any]]) -> None:
        """Ask the ranks that are missing in a long wait where they are, once."""
        for one in found:
            key = (one["group"], one["number"])
            if one["seconds"] >= _LONG and key not in self._asked:
                self._asked = {key} | (self._asked if len(self._asked) < 1000 else set())
                ranks = one["missing"] or one["waiting"]
                self.node.stacks(ranks, native=False)
                self.wanted |= set(ranks)

    def dump_files(self) -> dict[str, Path]:
        """Return the copies of this job's recorders in the folder HPCDIST_DUMP.

        Returns
        -------
        dict of str to Path
            By name.
        """
        if not self.dumps:
            return {}
        return {p.name: p for p in Path(self.dumps).glob(f"{self.job}-rank*.hpcdist")}


#: What of a row the browser does not get.
_INNER = frozenset({"bytes", "names", "groups", "reached", "calls", "job", "program", "size"})


def _distinct(names: list[str]) -> list[str]:
    """Number the nodes whose name another one has."""
    return [
        name if name not in names[:at] else f"{name} ({names[: at + 1].count(name)})"
        for at, name in enumerate(names)
    ]


def _sizes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many of the recent operations had which size, in powers of four."""
    counts: dict[tuple[str, int], int] = {}
    for row in rows:
        for number, size in row["bytes"].items():
            bucket = 0 if size == 0 else 4 ** ((max(size, 1) - 1).bit_length() + 1 >> 1)
            key = (row["names"][number], bucket)
            counts[key] = counts.get(key, 0) + 1
    return [
        {"operation": name, "bytes": bucket, "count": count}
        for (name, bucket), count in sorted(counts.items())
    ]


def _memory_of(one: Recording) -> dict[str, int]:
    """Resident bytes of a rank now and at most."""
    found = {"VmRSS": 0, "VmHWM": 0}
    try:
        with open(f"/proc/{one.pid}/status") as file:
            for line in file if one.alive else ():
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        pass  # it has just ended, or is in another pid namespace
    return {"resident": found["VmRSS"], "resident_most": found["VmHWM"]}


def _memory() -> dict[str, int]:
    """Bytes of the node's memory and of /dev/shm, and how many are free."""
    found = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * 1024
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "total": found.get("MemTotal", 0),
        "free": found.get("MemAvailable", 0),
        "shm_total": shm.total if shm else 0,
        "shm_free": shm.free if shm else 0,
    }


def decoded(files: dict[int, bytes], folder: Path) -> list[Recording]:
    """Read recorders that were sent.

    Parameters
    ----------
    files : dict of int to bytes
        By rank.
    folder : Path
        Where to put them meanwhile.

    Returns
    -------
    list of Recording
        In the order of ranks; those that cannot be read are left out.
    """
    for rank, data in files.items():
        (folder / str(rank)).write_bytes(data)
    return readable([folder / str(rank) for rank in sorted(files)], None)
