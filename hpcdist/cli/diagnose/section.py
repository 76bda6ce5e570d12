"""The result of a check: facts, and findings that name a problem and its fix."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Jobs fail, hang, are wrong, or are several times slower than they need be.
FAULT = "fault"
#: Costs something, or will under circumstances that cannot be seen from here.
WARNING = "warning"
#: Worth knowing.
NOTE = "note"


@dataclass
class Place:
    """Where a check looks; other places for tests.

    Parameters
    ----------
    env : mapping
        The environment variables.
    root : pathlib.Path
        What stands for ``/``.
    cpus : frozenset of int
        Cores this process may use.
    running : bool
        Whether MPI has been started in this process.
    sibling : tuple of (int, int, bytes) or None
        Process, address and content of memory that another rank of this host offers to be read.
    """

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    cpus: frozenset[int] = frozenset()
    running: bool = False
    sibling: tuple[int, int, bytes] | None = None

    def read(self, path: str) -> str:
        """The first 64 KiB of a file, stripped; "" where there is none that can be read."""
        try:
            with open(self.root / path, "rb") as file:
                return file.read(65536).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """The whole number in a file, or None."""
        try:
            return int(self.read(path))
        except ValueError:
            return None

    def entries(self, path: str) -> list[str]:
        """Names in a folder, sorted; none where there is no folder."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []


class Section:
    """Facts and findings about one subject.

    Parameters
    ----------
    name : str
        Name in the JSON form.
    title : str
        Heading in the text form.
    """

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.facts: list[dict[str, Any]] = []
        self.findings: list[dict[str, str]] = []

    def fact(self, name: str, value: Any, same: str = "job") -> None:
        """Add a fact.

        Parameters
        ----------
        name : str
            What it is.
        value : str, int, float, bool or None
            Its value.
        same : {"job", "host", "rank"}
            The ranks on which it should be the same: all ranks, those of a host, or none.
        """
        self.facts.append({"name": name, "value": value, "same": same})

    def find(self, severity: str, what: str, fix: str) -> None:
        """Add a finding: what is wrong, and the command or variable that fixes it."""
        self.findings.append({"severity": severity, "what": what, "fix": fix})

    def plain(self) -> dict[str, Any]:
        """Return the section as lists, dictionaries and texts, to be sent to another rank."""
        return {
            "name": self.name, "title": self.title, "facts": self.facts, "findings": self.findings,
        }  # fmt: skip
