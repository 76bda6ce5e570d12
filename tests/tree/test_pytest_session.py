"""pytest under mpirun with this repository's conftest: refusals, failures on one rank, hangs."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from closing import error_of
from jobs import run_job
from patience import patience
from places import TESTS

pytestmark = [pytest.mark.jobs, pytest.mark.any_mpi]

CONFTEST = TESTS / "conftest.py"

BODY = """
import time
import numpy as np  # without torch a job starts in a fourth of the time
import pytest
import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

def all_here():
    data = np.ones(4)
    dist.all_reduce(data)
    parallel_assert(data[0] == dist.get_world_size())

"""


@pytest.fixture
def session(tmp_path):
    """Write a test file beside a copy of conftest, and run it on some ranks."""
    text = CONFTEST.read_text().replace("GROUP_TIMEOUT = 20.0", "GROUP_TIMEOUT = 3.0")
    assert "GROUP_TIMEOUT = 3.0" in text
    (tmp_path / "conftest.py").write_text(text)
    (tmp_path / "support").symlink_to(TESTS / "support")

    def run(np: int, body: str, *arguments: str, option: str = "--with-mpi", env=None):
        (tmp_path / "test_it.py").write_text(BODY + body)
        command = ["-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-q", *arguments]
        if option:
            command.append(option)
        return run_job(np, *command, str(tmp_path), env={"HPCDIST_TEST_REPORT": "", **(env or {})})

    return run


def test_refuses_to_skip_everything(session):
    ended = session(2, "def test_a(): all_here()\n", option="")
    assert ended.code != 0
    assert "one of 2 that a launcher started, but without --with-mpi" in ended.text
    assert "passed" not in ended.text


LATE = """
import os

@pytest.fixture(scope="session", autouse=True)
def late():
    if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
        time.sleep(4.5)

def test_a():
    all_here()
    assert dist.group.WORLD.timeout.total_seconds() == 3
"""


def test_a_late_start_is_no_failure(session):
    """A rank that gets too little of busy cores starts later than its operations may take."""
    ended = session(2, LATE)
    assert ended.code == 0 and "1 passed" in ended.text, ended.text


def test_without_mpirun_mpi_tests_are_skipped(tmp_path):
    """Without a launcher nothing is refused: the skip is shown."""
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "support").symlink_to(TESTS / "support")
    body = "import pytest\n@pytest.mark.ranks\ndef test_a(): 1 / 0\n"
    (tmp_path / "test_it.py").write_text(body)
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path)],
        capture_output=True, text=True, timeout=60, env={**plain, "HPCDIST_TEST_REPORT": ""},
    )  # fmt: skip
    assert "1 skipped" in done.stdout, done.stdout + done.stderr


OUTCOMES = """
def test_before(): all_here()
def test_alone():
    assert dist.get_rank() != 1, "only here"
def test_waiting():
    if dist.get_rank() == 1: raise KeyError("before the collective")
    dist.barrier()
def test_after(): all_here()
def test_together(): parallel_assert(dist.get_rank() == 0, "who")
@pytest.fixture
def broken():
    if dist.get_rank() == 1: raise OSError("no disk")
def test_setup(broken): dist.barrier()
def test_skip():
    if dist.get_rank() == 1: pytest.skip("not here")
def test_all_skip(): pytest.skip("nowhere")
def test_destroys(): dist.destroy_process_group()
def test_at_the_end(): all_here()
def test_random(rng):
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, int(rng.integers(1 << 62)))
    parallel_assert(len(set(got)) == 1)
    print("drew", got[0])
"""


def test_outcomes_that_differ_between_ranks(session, tmp_path):
    """Each counts once, says where, and the tests after it run as if nothing had been."""
    report = tmp_path / "report.json"
    ended = session(3, OUTCOMES, "-rfP", env={"HPCDIST_TEST_REPORT": str(report)})
    text = ended.text
    assert ended.code != 0
    # and only rank 0 counts
    assert text.count("5 failed, 5 passed, 1 skipped") == 1 and text.count(" passed") == 1, text
    assert "failed on ranks [1]" in text and "[rank 1] E       AssertionError: only here" in text
    assert "[rank 1] E       KeyError: 'before the collective'" in text
    assert "DistTimeoutError" in text and "rank 1 has not joined" in text  # what the others saw
    assert "skipped on ranks [1] only" in text
    assert "[rank 1] E       OSError: no disk" in text
    # what fails together is told once
    assert "rank 1: who" in text and "rank 2: who" in text
    assert "test_it.py::test_together" in text
    assert not any("test_together" in line for line in text.splitlines() if line[:5] == "[rank")
    # What tests/run.py reads has all ranks' reports, the cause before what it has led to.
    kept = json.loads(report.read_text())
    assert [kept[name] for name in ("failed", "passed", "skipped")] == [5, 5, 1]
    # One test waits for the group's timeout; the ranks' imports before them take what they take.
    assert sum(seconds for seconds, _ in kept["slowest"]) < 20 * patience(), kept["slowest"]
    told = {name.rpartition("::")[2]: error_of(text) for name, text in kept["failures"]}
    assert told["test_alone"].startswith("rank 1: / AssertionError: only here"), told
    assert told["test_setup"].startswith("rank 1: / OSError: no disk"), told
    assert re.match("rank 1: / KeyError.* rank 0: .*rank 1 has not joined", told["test_waiting"])
    seed = text.split("HPCDIST_TEST_SEED=")[1].split()[0]
    again = session(1, OUTCOMES, "-rfP", "-k", "random", env={"HPCDIST_TEST_SEED": seed}).text
    drew = text.split("drew ")[1].split()[0]
    assert f"drew {drew}" in again, f"{text}\n{again}"


def test_a_hang_ends_with_all_stacks(session):
    ended = session(
        2,
        "@pytest.mark.deadline(1)\n"
        "def test_hang():\n"
        "    if dist.get_rank() == 1: time.sleep(600)\n"
        "    dist.group.WORLD.timeout = __import__('datetime').timedelta(seconds=500)\n"
        "    dist.barrier()\n"
        "def test_never(): all_here()\n",
    )
    assert ended.code != 0 and ended.seconds < 40 * patience()
    for rank, where in [(0, "dist.barrier()"), (1, "time.sleep(600)")]:
        assert re.search(rf"\[rank {rank} of 2\] the deadline of [1-6]\b\S* s has", ended.text)
        assert f"[rank {rank} of 2]     " in ended.text and where in ended.text
    assert "test_hang" in ended.text and "passed in" not in ended.text


def test_ranks_with_different_tests_do_not_hang(session):
    body = (
        "import os\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))\n"
        "if rank == '1':\n"
        "    def test_more(): pass\n"
        "def test_a(): all_here()\n"
    )
    ended = session(2, body)
    assert ended.code != 0 and "run different tests" in ended.text, ended.text
    assert ended.seconds < 40 * patience()
