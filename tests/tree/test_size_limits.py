"""No file and no function is so long that one has to scroll to learn its job."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

#: Lines of a function, without signature and docstring.
FUNCTION = 60
#: Lines of code of a Python file: without blank lines, comments and docstrings. Those of the tests
#: are tables and texts more than logic.
PACKAGE, TESTS = 300, 350
#: Lines of a native file.
NATIVE = 500
#: The files in CONTRIBUTING.md's table of reasons.
REASONS = set(
    re.findall(r"^\| `(\w+/\S+\.(?:py|c))` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
)
PYTHON_FILES = sorted(
    path
    for folder in ("hpcdist", "_build", "examples", "tests")
    for path in ROOT.glob(f"{folder}/**/*.py")
)
NATIVE_FILES = sorted(
    path
    for folder in ("pyx", "tests")
    for path in ROOT.glob(f"{folder}/**/*.*")
    if path.suffix in (".c", ".h", ".pyx", ".pxd", ".pxi")
)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def code_lines(path):
    """Lines of a Python file without blank lines, comments and docstrings."""
    text = path.read_text()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    without = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in without and token.string
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docs)


def limit_of(path):
    if path.suffix != ".py":
        return NATIVE
    return TESTS if path.is_relative_to(ROOT / "tests") else PACKAGE


@pytest.mark.parametrize("files", [PYTHON_FILES, NATIVE_FILES], ids=["Python", "native"])
def test_files_are_short(files):
    assert len(files) > 100
    long = {
        str(path.relative_to(ROOT)): lines
        for path in files
        if (lines := code_lines(path) if path.suffix == ".py" else path.read_text().count("\n"))
        > limit_of(path)
    }
    without = {name: lines for name, lines in long.items() if name not in REASONS}
    assert not without, f"split them, or give a reason in CONTRIBUTING.md: {without}"


def test_functions_are_short():
    found = {
        f"{path.relative_to(ROOT)}:{node.name}": lines
        for path in PYTHON_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := body_lines(node)) > FUNCTION
    }
    assert not found, f"functions of more than {FUNCTION} lines: {found}"
