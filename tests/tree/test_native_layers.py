"""The floors of the native code, as docs/architecture.md draws them: checked in the source text."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator

import pytest
from c_sources import circles, sources, uses_between
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

PYX = ROOT / "pyx" / "hpcdist"
FOLDERS = ("kernels", "engine", "store", "nccl")
FILES = {folder: sources(PYX / folder) for folder in FOLDERS}
USES = {folder: uses_between(FILES[folder]) for folder in FOLDERS}

#: Lines of a C function, from its name to its last brace.
LONGEST_FUNCTION = 60


def drawn(title: str) -> dict[str, int]:
    """Read a drawing of floors: names -> their floor; the ground floor is 0."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawing = re.search(r"```text\n(.*?)```", text.split(f"### {title}\n", 1)[1], re.DOTALL)
    assert drawing is not None, f"docs/architecture.md has no drawing below {title!r}"
    rows = [re.split(r"\s{3,}", row)[0].split() for row in drawing[1].splitlines()]
    return {name: number for number, row in enumerate(reversed(rows)) for name in row}


def floors_of(folder: str) -> dict[str, int]:
    """Return the floor of each module of a folder; the engine's rooms have one each."""
    if folder == "store":
        return {f"hd_{name}": floor for name, floor in drawn("Floors of `store/`").items()}
    rooms = drawn("Rooms of `engine/`")
    assert set(rooms) == {path.name for path in (PYX / folder).iterdir() if path.is_dir()}
    return {file.path.stem: rooms[file.path.parent.name] for file in FILES[folder]}


@pytest.mark.parametrize("folder", ["engine", "store"])
def test_a_file_uses_its_own_floor_and_those_below(folder):
    floors = floors_of(folder)
    assert sorted(floors) == sorted({file.path.stem for file in FILES[folder]})
    for module, used in USES[folder].items():
        for other, names in used.items():
            if other in floors:
                assert floors[other] <= floors[module], (
                    f"{folder}/{module} uses {sorted(names)} of {other}, which lies above it"
                )


def test_no_two_files_have_one_name():
    names = collections.Counter(file.path.name for files in FILES.values() for file in files)
    assert names.most_common(1)[0][1] == 1, "a header is included without its folder"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_files_use_each_other_in_a_circle(folder):
    assert circles(USES[folder]) == []


def test_a_circle_is_found(tmp_path):
    """The parser sees calls, pointers, variables and includes; not comments, texts or structs."""
    (tmp_path / "hd_a.h").write_text("int hd_a(int (*f)(void), char *t);\n")
    (tmp_path / "hd_a.c").write_text(
        '#include "hd_a.h"\n#include "hd_b.h"\n/* hd_c() */\n'
        "struct hd_s {\n    int (*hd_c)(void);\n};\n"
        'int hd_a(int (*f)(void), char *t)\n{\n    return f() + (t == "hd_c()");\n}\n'
    )
    (tmp_path / "hd_b.c").write_text(
        "int hd_count;\nstatic int one(void) { return hd_a(hd_c, 0); }\n"
    )
    (tmp_path / "hd_b.h").write_text("extern int hd_count;\n")
    (tmp_path / "hd_c.c").write_text("__attribute__((cold)) int hd_c(void)\n{\n    return 0;\n}\n")
    uses = uses_between(sources(tmp_path))
    assert uses == {
        "hd_a": {"hd_b": {"hd_b.h"}},
        "hd_b": {"hd_a": {"hd_a"}, "hd_c": {"hd_c"}},
        "hd_c": {},
    }
    assert circles(uses) == [["hd_a", "hd_b"]]


@pytest.mark.parametrize("folder", ["engine", "store"])
def test_a_header_declares_what_its_file_defines(folder):
    defined = {file.path.stem: file.public for file in FILES[folder] if file.path.suffix == ".c"}
    for file in FILES[folder]:
        if file.path.suffix == ".c":
            assert file.path.with_suffix(".h").exists(), f"{file.path.name} has no header"
            assert file.path.stem in file.includes, f"{file.path.name} does not include its header"
        else:
            strangers = file.prototypes - defined.get(file.path.stem, set())
            assert not strangers, f"{file.path.name} declares {sorted(strangers)} of another file"


@pytest.mark.parametrize("folder", ["engine", "store"])
def test_a_file_includes_the_headers_of_what_it_calls(folder):
    for file in FILES[folder]:
        used = USES[folder][file.path.stem]
        calls = {other for other, names in used.items() if names & file.uses()}
        missing = calls - file.includes
        assert not missing, f"{file.path.name} calls {sorted(missing)} without their headers"


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_short(folder):
    long = {
        f"{file.path.name}: {name}": lines
        for file in FILES[folder]
        for name, (lines, _) in file.functions.items()
        if lines > LONGEST_FUNCTION
    }
    assert long == {}, "split them"


def cython_functions(text: str) -> Iterator[tuple[str, int]]:
    """Each function's first line, and how many lines it has behind signature and docstring."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not re.match(r" *(cdef|cpdef|def)\b(?! class)[^=#]*\(", line):
            continue
        depth = 0
        for end in range(number, len(lines)):
            depth += lines[end].count("(") - lines[end].count(")")
            if depth == 0:
                break
        if not re.search(r":\s*(#.*)?$", lines[end]):
            continue  # a declaration
        deeper = re.compile(rf" {{{len(line) - len(line.lstrip()) + 1}}}|\s*$")
        body = "\n".join(itertools.takewhile(deeper.match, lines[end + 1 :])).rstrip()
        yield line.strip(), len(re.sub(r'\A\s*""".*?"""\n?', "", body, flags=re.S).splitlines())


def test_cython_functions_are_short():
    found = {
        f"{path.name}: {name}": lines
        for path in sorted(PYX.rglob("*"))
        if path.suffix in (".pyx", ".pxi")
        for name, lines in cython_functions(path.read_text())
    }
    assert len(found) > 300
    long = {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION}
    assert long == {}, "split them"


def test_lines_of_a_cython_function_are_counted():
    text = (
        "cdef int one(\n    int a, int b\n) except -1:\n"
        '    """Two\n    lines."""\n    if a:\n\n        return b\n    return a\n\n\n'
        "cdef int two(int a)\n"
        "cdef class C:\n    def three(self):\n        return self.f(1)\n    cdef int n\n"
    )
    assert [lines for _, lines in cython_functions(text)] == [4, 1]
