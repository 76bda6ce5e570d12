"""How each file of tests is run: its kind, one of the marks in its ``pytestmark``.

Read from the source text, because tests/run.py has to know it before anything is imported.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: Kinds of files; ``by_hand`` files are run by no stage of tests/run.py.
KINDS = ("local", "ranks", "standin", "jobs", "by_hand")


def marks(path: Path) -> list[str]:
    """Return the names of the marks in a file's ``pytestmark``, in their order."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            each = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            calls = (mark.func if isinstance(mark, ast.Call) else mark for mark in each)
            found += [ast.unparse(mark).removeprefix("pytest.mark.") for mark in calls]
    return found


def kind(path: Path) -> str:
    """Return the kind of a file; raise ValueError unless it has exactly one."""
    found = [mark for mark in marks(path) if mark in KINDS]
    if len(found) != 1:
        raise ValueError(
            f"{path.relative_to(TESTS.parent)}: its pytestmark names {len(found)} kinds of "
            f"tests; give it one of {', '.join(KINDS)} (CONTRIBUTING.md, Tests)"
        )
    return found[0]


def find(places: Iterable[Path] = ()) -> list[Path]:
    """Return the files of tests among files and in folders; by default all there are."""
    found: list[Path] = []
    for place in places or [TESTS]:
        found += [place] if place.is_file() else sorted(place.rglob("test_*.py"))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Rare:
    """Which of the tests marked ``rare`` are run: the files whose turn it is.

    Attributes
    ----------
    part, of : int
        Part 2 of 3 is a third of the files, 1 of 1 all of them, 0 of 1 none.
    """

    part: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Rare:
        """Read ``2/3``; raise ValueError for what is no such thing."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or not 0 <= int(found[1]) <= int(found[2]) or not int(found[2]):
            raise ValueError(f"{text!r} is no part of the rare tests: write 1/3, 2/3 or 3/3")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.part}/{self.of}"

    def takes(self, path: Path) -> bool:
        """Whether it is a file's turn; the same on all machines."""
        number = zlib.crc32(path.resolve().relative_to(TESTS).as_posix().encode())
        return number % self.of == self.part - 1
