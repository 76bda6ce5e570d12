"""No file and no function is so long that one has to scroll to learn its job."""

from __future__ import annotations

import ast
import re

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

FILE, FUNCTION = 400, 60
#: The files in CONTRIBUTING.md's table of reasons.
REASONS = set(
    re.findall(r"^\| `(hpcdist/\S+\.py)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
)
FILES = sorted([*ROOT.glob("hpcdist/**/*.py"), *ROOT.glob("_build/**/*.py")])


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_files_are_short():
    assert len(FILES) > 100
    long = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if (lines := path.read_text().count("\n")) > FILE
    }
    without = {name: lines for name, lines in long.items() if name not in REASONS}
    assert not without, f"split them, or give a reason in CONTRIBUTING.md: {without}"


def test_functions_are_short():
    found = {
        f"{path.relative_to(ROOT)}:{node.name}": lines
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := body_lines(node)) > FUNCTION
    }
    assert not found, f"functions of more than {FUNCTION} lines: {found}"
