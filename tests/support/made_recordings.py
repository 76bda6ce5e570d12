"""Recordings of a job that never ran: one group, and when each rank made which calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcdist.recordings import Group, Operation, Recording, Site

BEGIN = 1_700_000_000_000_000_000  # ns since 1970
MS = 1_000_000  # ns


def operation(group: Group, seq: int, ms: float, /, **more: Any) -> Operation:
    """An all_reduce of 1,000 floats, called so long after BEGIN; `more` has what is different."""
    values = {
        "number": seq, "name": "all_reduce", "kind": "all_reduce", "group": group, "seq": seq,
        "dtype": "float32", "elements": 1000, "inputs": 0, "outputs": 1000, "itemsize": 4,
        "shape": (1000,), "peer": -1, "tag": 0, "op": "SUM", "state": "done", "failure": "",
        "queued": False, "called": BEGIN + int(ms * MS), "started": None, "agreed": None,
        "ended": None, "site": Site("/home/me/train.py", 40, "step"),
    }  # fmt: skip
    return Operation(**{**values, **more})


def recording(
    rank: int,
    size: int,
    calls: Callable[[Group], list[Operation]],
    *,
    seen: float = 5000.0,
    alive: bool = False,
) -> Recording:
    """What a rank has recorded, seen so many ms after BEGIN."""
    group = Group("world", rank, size, 77, tuple(range(size)))
    return Recording(
        f"r{rank}", rank, size, 100 + rank, "node1", "0a0b0c0d", "", "python train.py",
        BEGIN + int(seen * MS), False, alive, [group], calls(group),
    )  # fmt: skip
