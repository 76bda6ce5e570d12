"""Scripts in the pattern of torch's examples and tutorials, unchanged or with two lines changed.

They know nothing of hpcdist. ``tests/clients.py --scripts`` compares their numbers with gloo's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import plain_environment, run_job
from mpis import OPEN_MPI
from places import ROOT
from ports import free_port

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

SCRIPTS = Path(__file__).with_name("scripts")
TAKE_OVER = {"HPCDIST_TAKE_OVER": "gloo,mpi"}
ALL = sorted(path.name for path in SCRIPTS.glob("*.py"))
#: Those that start their processes themselves, as torch's tutorials do.
STARTING = [name for name in ALL if "multiprocessing" in (SCRIPTS / name).read_text()]
#: Lines that a script may need changed.
MOST = 2


def changed(script: str) -> tuple[str, list[str]]:
    """A script after the change that docs/torch.md names for its kind, and the new lines."""
    page = (ROOT / "docs" / "torch.md").read_text()
    _, spawned, started = re.findall(r"```diff\n(.*?)```", page, re.S)
    change = spawned if "mp.spawn(" in script else started
    (before,) = re.findall(r"^-(.*)$", change, re.M)
    (after,) = re.findall(r"^\+(.*)$", change, re.M)
    lines = [after if line == before else line for line in script.splitlines()]
    return "\n".join([*lines, ""]), [line for line in lines if line == after]


def numbers(text: str) -> list[str]:
    return sorted(set(re.findall(r"number (\S+) ", text)))


def test_there_are_twelve_and_they_know_nothing_of_hpcdist() -> None:
    assert len(ALL) >= 12 and len(STARTING) == 5
    assert not [name for name in ALL if "hpcdist" in (SCRIPTS / name).read_text()]


@pytest.mark.deadline(160)
@pytest.mark.parametrize("name", [name for name in ALL if name not in STARTING])
def test_a_script_for_torchrun_runs_unchanged(name: str) -> None:
    ended = run_job(2, str(SCRIPTS / name), env=TAKE_OVER)
    assert ended.code == 0 and numbers(ended.text), ended.text
    assert ended.text.count("lets hpcdist serve it") == 1, ended.text


@pytest.mark.deadline(160)
@pytest.mark.parametrize("name", STARTING)
def test_a_script_that_starts_its_processes(name: str, tmp_path: Path) -> None:
    """MPICH runs it unchanged; Open MPI, which needs its launcher, with a line changed."""
    text = (SCRIPTS / name).read_text()
    script, lines = changed(text)
    assert 1 <= len(lines) <= MOST, lines
    path = tmp_path / name
    path.write_text(script if OPEN_MPI else text)
    more = {"TEST_PORT": str(free_port()), **TAKE_OVER}
    if OPEN_MPI and "mp.spawn(" not in text:
        said = run_job(2, str(path), env=more).text
    else:
        said = subprocess.run(
            [sys.executable, str(path)], env=plain_environment(**more), text=True,
            timeout=150, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip
    wanted = numbers("".join(f"number rank{rank}" + end for rank in (0, 1) for end in (" ", ".0 ")))
    assert len(set(wanted) & set(numbers(said))) == 2, said
    assert said.count("lets hpcdist serve it") == 1, said
