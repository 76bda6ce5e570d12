"""The table of tests that do not pass, and why: expected.txt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_HEAD = re.compile(r"(skipped|failed): (.+)")
#: What torch says where a GPU is missing.
_NO_GPU = re.compile(
    "CUDA driver version|no GPUs found|No CUDA GPUs|NVIDIA driver|ccelerator device"
    "|modulo by zero|CUDA error|built in|GPU modules|ackend doesn't support "
)
_TEST = re.compile(r"(test_\w+)(?: \[([\w ,]+)\])?")


class Seen(Protocol):
    """What became of a test."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """A test that is skipped or fails where this holds.

    Attributes
    ----------
    kind, reason : str
        "skipped" or "failed", and a text that stands in the suite's reason.
    why : str
        The reason in our words.
    sides, sizes : frozenset
        Where; empty means everywhere.
    """

    test: str
    kind: str
    reason: str
    why: str
    sides: frozenset[str]
    sizes: frozenset[int]

    def holds(self, side: str, np: int) -> bool:
        return (not self.sides or side in self.sides) and (not self.sizes or np in self.sizes)


class Table:
    """Every entry.

    Parameters
    ----------
    text : str
        Blocks of a head, ``skipped: text of the suite`` or ``failed: text of the error``, a line
        ``why: ...``, and indented tests, each with the sides and numbers of ranks it is about in
        brackets unless those are all.
    """

    def __init__(self, text: str) -> None:
        self.entries: list[Entry] = []
        kind = reason = why = ""
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            head, test = _HEAD.fullmatch(line), _TEST.fullmatch(line.strip())
            if head:
                kind, reason, why = head[1], head[2], ""
            elif line.startswith("why: "):
                why = line[5:]
            elif test and line.startswith(" ") and why:
                words = (test[2] or "").replace(",", " ").split()
                sizes = frozenset(int(word) for word in words if word.isdigit())
                sides = frozenset(word for word in words if not word.isdigit())
                if not sides <= {"bridge", "native"}:
                    raise ValueError(f"line {number}: sides are bridge and native: {line!r}")
                self.entries.append(Entry(test[1], kind, reason, why, sides, sizes))
            else:
                raise ValueError(f"line {number} is no head, no why and no test: {line!r}")

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read the table from a file."""
        return cls(path.read_text())

    def differences(
        self, side: str, np: int, outcomes: Mapping[str, Seen], complete: bool
    ) -> list[str]:
        """Say what is not as the table has it.

        Parameters
        ----------
        side : str
            "bridge" or "native".
        np : int
            Ranks.
        outcomes : mapping
            Of each test that ran.
        complete : bool
            Whether all tests ran: then an entry for a test that the suite has not is needless.
        """
        found = []
        known: dict[str, Entry] = {}
        for entry in self.entries:
            if entry.holds(side, np):
                if entry.test in known:
                    found.append(f"{entry.test}: two entries hold")
                known[entry.test] = entry
        for test, seen in outcomes.items():
            entry = known.pop(test, None)
            if seen.kind == "passed":
                if entry:
                    found.append(f"{test}: passed; its entry ({entry.kind}) is needless")
            elif not entry or entry.kind != seen.kind or entry.reason not in seen.reason:
                expected = f"{entry.kind}: {entry.reason}" if entry else "passed"
                found.append(f"{test}: {seen.kind}: {seen.reason[:300]} (expected: {expected})")
        if complete:
            found += [
                f"{test}: the suite has no such test; its entry is needless" for test in known
            ]
        return found

    def regressions(self, side: str, np: int, outcomes: Mapping[str, Seen]) -> list[str]:
        """Say what goes wrong with another torch than the table's, as :meth:`differences`.

        Other versions, and builds for GPUs, skip other tests and say other words. What remains are
        tests that crash, and those that fail although they have no entry and need no GPU.
        """
        known = {entry.test for entry in self.entries if entry.holds(side, np)}
        return [
            f"{test}: {seen.kind}: {seen.reason[:300]}"
            for test, seen in outcomes.items()
            if seen.kind == "crashed"
            or (seen.kind == "failed" and test not in known and not _NO_GPU.search(seen.reason))
        ]


def of_this_torch() -> bool:
    """Whether the table was written for the torch that is imported: 2.13, its build for CPUs."""
    import torch

    return str(torch.__version__).startswith("2.13.") and torch.version.cuda is None
