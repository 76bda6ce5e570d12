"""How each file of tests is run: its kind, one of the marks in its ``pytestmark``.

Read from the source text, because tests/run.py has to know it before anything is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
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
