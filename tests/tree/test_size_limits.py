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
        if (lines := path.read_text().count("\n")) > limit_of(path)
        if path.suffix != ".py" or (lines := code_lines(path)) > limit_of(path)
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


# --- classes that only divide another one --------------------------------------------------------

#: Classes that are only the base of one other. With it, most would be beyond the limit.
DIVIDED = {"BridgeBase", "Exchanges", "Settings", "Uneven", "WindowMemory"}
#: Bases that make a class more than a part: users implement them, or catch them.
OPEN = ("Protocol", "ABC", "NamedTuple", "Enum", "IntEnum")


def name_of(node):
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def parts_of_one_class(trees):
    """Name the classes that nothing uses but one subclass: as its base, or to call their own."""
    classes, heirs, uses = {}, {}, set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append((path, node))
                for base in node.bases:
                    heirs.setdefault(name_of(base), []).append((path, node))
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
                name = node.name if isinstance(node, ast.alias) else name_of(node)
                line = node.lineno
                inside = (
                    (where, begin.lineno, begin.end_lineno)
                    for where, begin in (*classes.get(name, ()), *heirs.get(name, ()))
                )
                own = any(path == w and (a <= line <= b) for w, a, b in inside)
                imported = isinstance(node, ast.alias) and any(
                    path == w for w, _ in heirs.get(name, ())
                )
                if name in heirs and not own and not imported:
                    uses.add(name)
    return {
        name
        for name, found in classes.items()
        if len(heirs.get(name, ())) == 1
        and len(found) == 1
        and name not in uses
        and not any(name_of(b) in OPEN or "Error" in name_of(b) for b in found[0][1].bases)
    }


def test_no_class_is_only_a_part_of_another():
    files = [path for path in PYTHON_FILES if path.is_relative_to(ROOT / "hpcdist")]
    found = parts_of_one_class({path: ast.parse(path.read_text()) for path in files})
    assert found <= DIVIDED, f"merge each into its subclass: {sorted(found - DIVIDED)}"
    assert found >= DIVIDED, f"no longer there: {sorted(DIVIDED - found)}"


def test_what_is_a_part_of_another():
    text = """
class Part: ...
class Whole(Part):
    def __init__(self): Part.__init__(self)
class Used: ...
class Heir(Used): ...
def check(each): return isinstance(each, Used)
class Wrong(ValueError): ...
class Worse(Wrong): ...
"""
    assert parts_of_one_class({ROOT: ast.parse(text)}) == {"Part"}
