"""README and docs keep to what is there: commands, links, code, and a row for every public name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

import hpcdist
from hpcdist import config

pytestmark = pytest.mark.local

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SUPPORT = ROOT / "docs" / "support.md"


def fences(path: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and text."""
    found = re.findall(r"^```([\w-]*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    assert path.read_text().count("\n```") == 2 * len(found), f"{path.name}: a fence is open"
    return found


def text_of(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


@cache
def anchors(path: Path) -> set[str]:
    """What a heading can be linked by, as GitHub makes it."""
    titles = re.findall(r"^#+ (.+)$", text_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_pages_are_there():
    names = {path.relative_to(ROOT).as_posix() for path in PAGES}
    assert {
        "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/support.md",
        "docs/sharp-bits.md", "docs/performance.md", "docs/starting.md",
    } <= names  # fmt: skip


# --- code and commands -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_code_blocks_parse(page):
    known = {
        "python": ast.parse,
        "sh": check_shell,
        "text": str,
        "diff": str,
        "c": str,
        "cython": str,
    }
    for language, text in fences(page):
        assert language in known, f"a block of language {language!r}: {text[:60]!r}"
        known[language](text)


def check_shell(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_names_in_the_code_of_the_readme_exist():
    used = set()
    for language, text in fences(ROOT / "README.md"):
        if language == "python":
            used |= set(re.findall(r"\b(?:dist|hpcdist)\.(\w+)", text))
    assert len(used) > 15
    assert used <= {*hpcdist.__all__, "show_versions"}


PROGRAMS = [text for language, text in fences(ROOT / "README.md") if language == "python"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: f"{len(text.splitlines())} lines")
def test_the_code_of_the_readme_runs(program):
    """As the README says: also on one process without a launcher."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def readme_commands() -> list[str]:
    """The shell commands under the heading that announces two."""
    text = (ROOT / "README.md").read_text()
    part = re.search(r"^## Two commands$(.*?)^## ", text, re.M | re.S)
    assert part, "README has no part called 'Two commands'"
    return [block.strip() for block in re.findall(r"^```sh\n(.*?)^```$", part[1], re.M | re.S)]


def ci_commands() -> str:
    """What .ci/run runs, in the words a user would type."""
    text = "".join((ROOT / ".ci" / name).read_text() for name in ("common", "environments", "run"))
    for theirs, users in (
        ("\\\n", " "),
        ("python -m pip", "pip"),
        ('env --chdir="$work" ', ""),
        ('"$PWD/examples/train_digits.py"', "examples/train_digits.py"),
    ):
        text = text.replace(theirs, users)
    return text


def test_the_two_commands_are_those_of_ci():
    commands = readme_commands()
    assert len(commands) == 2
    script = ci_commands()
    assert set(re.findall(r"^ *ready (\w+)$", script, re.M)) == {"openmpi", "mpich"}
    for command in commands:
        steps = [step.strip() for step in command.split("&&")]
        assert len(steps) == 2, command
        for step in steps:
            # run: as an argument of the functions that time it, not in a message or a comment
            wanted = re.escape(step.replace("openmpi", "$mpi"))
            line = rf'^\s*(?:if )?(?:check|stage)\b.*" {wanted}\s*(?:$|;|\|\|)'
            assert re.search(line, script, re.M), f"not in .ci/run: {step}"


def test_other_ways_to_install_exist():
    """The extras that the pages name are those of pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    part = re.search(r"^\[project.optional-dependencies\]$(.*?)^\[", project, re.M | re.S)
    extras = set(re.findall(r"^(\w+) = \[", part[1], re.M))
    for page in PAGES:
        for names in re.findall(r'"(?:\.|hpcdist)\[([\w,]+)\]"', page.read_text()):
            assert set(names.split(",")) <= extras, f"{page.name}: {names}"


# --- links -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        place, _, anchor = target.partition("#")
        path = (page.parent / place).resolve() if place else page
        assert path.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert path.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(path), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_named_in_text_exist(page):
    """`collectives/p2p.py`, `store/hd_mac.c`, `tests/run.py`: what looks like ours is there."""
    shelves = [ROOT / shelf for shelf in ("", "hpcdist", "pyx/hpcdist", "tests")]
    pattern = r"`((?:[\w.]+/)*[\w.]+\.(?:py|pyx|pxd|pxi|c|h|md|toml|pyi))`"
    for name in re.findall(pattern, text_of(page)):
        found = any((shelf / name).exists() for shelf in shelves)
        found = found or any(any(ROOT.glob(f"{top}/**/{name}")) for top in TREES)
        assert found or name in FOREIGN, f"{page.name} names {name}, which is not there"


#: Folders in which a file may be named by the end of its path.
TREES = ("hpcdist", "pyx", "tests", "examples", "_build", "jobscripts")
#: Names of files that are not ours: written by the build, or examples.
FOREIGN = {"mpi.h", "first.py", "train.py", "_build_info.py", "pyx/hpcdist/_name.pyx"}


def test_settings_named_in_the_pages_exist():
    known = {item.variable for item in config.options()} | {"HPCDIST_MPICC", "HPCDIST_MPI"}
    known.add("HPCDIST_MPICC_ALL")
    tests_own = {
        "HPCDIST_TEST_SEED",
        "HPCDIST_TEST_LONG",
        "HPCDIST_TEST_MPIRUN",
        "HPCDIST_TEST_REPORT",
    }
    for page in PAGES:
        for name in re.findall(r"\bHPCDIST_[A-Z_]+[A-Z]\b", page.read_text()):
            assert name in known | tests_own, f"{page.name}: {name}"


# --- the support table -------------------------------------------------------------------------


HEADER = ["name", "Open MPI", "MPICH", "Intel MPI", "tested in", "notes"]


def rows() -> list[list[str]]:
    """The rows of the tables that have this header."""
    found, inside = [], False
    for line in SUPPORT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        inside = line.startswith("|") and (inside or cells == HEADER)
        if inside and cells != HEADER and not line.startswith("|---"):
            assert len(cells) == len(HEADER), line
            found.append(cells)
    return found


def test_every_public_name_has_a_row():
    named = {
        name
        for row in rows()
        for quoted in re.findall(r"`([\w.]+)`", row[0])
        for name in quoted.split(".")
    }
    missing = [name for name in hpcdist.__all__ if name not in named]
    assert not missing, f"no row in docs/support.md: {missing}"


def test_what_works_and_what_is_planned():
    assert len(rows()) > 90
    for name, openmpi, mpich, intel, tested, _ in rows():
        assert openmpi in ("yes", "planned", "see notes") and mpich == intel == openmpi, name
        assert (tested == "–") or openmpi != "planned", f"{name} is planned, and tested?"
        if openmpi == "planned":
            # what is planned is not there: else the table is out of date
            for word in set(re.findall(r"`(\w+)`", name)) - {"DistStoreError", "QueueEmptyError"}:
                assert word not in hpcdist.__all__, f"{word} is called planned, but is there"


@pytest.mark.parametrize("row", [row for row in rows() if row[1] == "yes"], ids=lambda row: row[0])
def test_the_tests_named_speak_of_it(row):
    quoted = re.findall(r"`([^`]+)`", row[0])
    word = next((each.rpartition(".")[2] for each in quoted if each in hpcdist.__all__), "")
    for path in re.findall(r"\]\(([^)]+)\)", row[4]):
        text = (SUPPORT.parent / path).read_text()
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text), f"{path} lacks {word}"
