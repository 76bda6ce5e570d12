"""What all tests share: MPI under pytest, deadlines, and ranks that stay in step.

Under ``mpirun -n N python -m pytest --with-mpi FILES`` every rank runs the same tests, those marked
``ranks`` or ``standin``, in the same order. After each one the ranks exchange its outcome on a
communicator of their own, so a test that fails on one rank counts as failed on all, the exit codes
agree, and nobody waits for anybody.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    import slurm

sys.path.insert(0, str(Path(__file__).parent / "support"))

#: Seconds a test may take, unless marked ``deadline(seconds)``; more where cores are shared.
DEADLINE = 60.0
#: The same for one that starts jobs, whose ranks all import torch, on busy cores.
JOBS_DEADLINE = 150.0
#: Timeout of the process group under test: a rank that failed leaves the others waiting this long.
GROUP_TIMEOUT = 20.0
#: The same of its start, which must not end a job whose ranks get too little of busy cores.
START_TIMEOUT = 60.0

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_PASSED, _FAILED, _SKIPPED = 0, 1, 2
#: Bytes of a rank's report that the others get.
_REPORT = 1 << 14
#: How a file's tests are run, and which of them all ranks run.
_KINDS = {"local", "ranks", "standin", "jobs", "by_hand"}
_WITH_MPI = {"ranks", "standin"}


def _launched_size() -> int:
    return max((int(os.environ.get(name) or 1) for name in _SIZES), default=1)


class Ranks:
    """This rank among those that run the same pytest; does nothing when there is one.

    It talks on a communicator of its own, so a test that leaves the process group in disorder does
    not disturb it. Every exchange carries its number: ranks that got out of step are told so.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.comm = None
        self.count = 0

    def open(self) -> None:
        from hpcdist import _engine

        # Longer than any deadline: when ranks really hang, the deadline shows their stacks first.
        self.comm = _engine.Comm.world("pytest", 3600.0, 1)
        self.rank, self.size = self.comm.rank, self.comm.size

    def exchange(self, number: int, what: int = 0) -> list[int]:
        """Return every rank's number; ends the job when ranks are in different places."""
        if self.comm is None:
            return [number]
        from hpcdist import DistError, _engine

        self.count += 1
        out = np.empty(self.size, np.int64)
        own = np.array([number], np.int64)
        try:
            self.comm.all_gather_into_tensor(
                out, own, api="pytest", extra=zlib.crc32(b"%d %d" % (self.count, what))
            )
        except DistError as exc:
            say(f"the ranks run different tests, so none can go on: {exc}")
            _engine.abort(3, "")
        return out.tolist()

    def share(self, text: str) -> list[str]:
        """Return every rank's text, cut to ``_REPORT`` bytes: of a longer one the last."""
        if self.comm is None:
            return [text]
        own = np.frombuffer(text.encode()[-_REPORT:].rjust(_REPORT), np.uint8)
        out = np.empty(self.size * _REPORT, np.uint8)
        self.comm.all_gather_into_tensor(out, own, api="pytest")
        found = out.reshape(self.size, _REPORT)
        return [row.tobytes().decode("utf-8", "replace").lstrip() for row in found]

    def close(self) -> None:
        if self.comm is not None:
            self.comm.free()
            self.comm = None


ranks = Ranks()
_stderr = 2
_null = None
_seed = 0
_outcomes: dict[str, str] = {}
_slowest: list[tuple[float, str]] = []
_failures: dict[str, str] = {}
#: Of a test that failed on several ranks: all their reports, until it is logged.
_reports: dict[str, str] = {}


def say(text: str) -> None:
    """Write lines to the terminal, past pytest's capture, with the rank in front."""
    prefix = f"[rank {ranks.rank}] " if ranks.size > 1 else ""
    data = "".join(f"{prefix}{line}\n" for line in text.splitlines()).encode("utf-8", "replace")
    os.write(_stderr, data)


# --- start and end -----------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    global _stderr
    config.addinivalue_line("markers", "deadline(seconds): how long it may take")
    with_mpi = config.getoption("--with-mpi") or config.getoption("--only-mpi")
    if _launched_size() > 1 and not with_mpi:
        raise pytest.UsageError(
            f"this pytest is one of {_launched_size()} that a launcher started, but without "
            "--with-mpi: every MPI test would be skipped, and the rest would run "
            f"{_launched_size()} times. Add --with-mpi, or use python tests/run.py."
        )
    # A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Output is captured per test, and lost when a deadline ends the process: keep the real one.
    _stderr = os.dup(2)
    # Before mpi4py, which pytest-mpi imports: by default it is hpcdist that starts MPI.
    if with_mpi:
        ranks.open()
        from hpcdist.testing import last_words

        last_words(_stderr)
        if ranks.rank:
            _be_quiet(config)


def _be_quiet(config):
    """Let rank 0 alone report progress; the others only speak of their failures."""
    global _null
    _null = open(os.devnull, "w")
    config.pluginmanager.getplugin("terminalreporter")._tw._file = _null


def _is_mpi(item) -> bool:
    return item.get_closest_marker("mpi") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        kinds = _KINDS & {mark.name for mark in item.iter_markers()}
        if len(kinds) != 1:
            raise pytest.UsageError(
                f"{item.path}: its pytestmark must name one of {', '.join(sorted(_KINDS))}"
            )
        if kinds & _WITH_MPI:
            item.add_marker("mpi")
    if ranks.size > 1:
        # The others start mpirun themselves, or need no ranks: run.py runs them without it.
        other = [item for item in items if not _is_mpi(item)]
        if other:
            config.hook.pytest_deselected(items=other)
            items[:] = [item for item in items if _is_mpi(item)]


def pytest_collection_finish(session):
    global _seed
    ids = "\n".join(item.nodeid for item in session.items) + str(session.testsfailed)
    ranks.exchange(0, zlib.crc32(ids.encode()))
    chosen = os.environ.get("HPCDIST_TEST_SEED")
    own = int(chosen) if chosen else random.SystemRandom().randrange(1 << 31)
    _seed = ranks.exchange(own)[0]


def pytest_sessionfinish(session, exitstatus):
    from hpcdist.testing import deadline

    with deadline(DEADLINE, "the end of the test session", _stderr):
        session.exitstatus = max(ranks.exchange(int(exitstatus), -1))
        report = os.environ.get("HPCDIST_TEST_REPORT")
        if report and ranks.rank == 0:
            slowest = sorted(_slowest, reverse=True)[:5]
            failures = [
                [f"{session.config.rootpath}/{name}", _failures[name]] for name in _failures
            ]
            counts = Counter(passed=0, failed=0, skipped=0)
            counts.update(_outcomes.values())
            found = {**counts, "slowest": slowest, "failures": failures}
            Path(report).write_text(json.dumps(found))


def pytest_unconfigure(config):
    # Rank 0 has written its summary by now: a rank that exits with an error ends the others.
    if ranks.comm is not None:
        ranks.exchange(0, -2)
        ranks.close()
    if _null is not None:
        _null.close()


# --- one test ----------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    from patience import patience

    from hpcdist.testing import deadline

    marker = item.get_closest_marker("deadline")
    usual = JOBS_DEADLINE if item.get_closest_marker("jobs") else DEADLINE
    seconds = round((marker.args[0] if marker else usual) * patience(), 1)
    if "jobs" in sys.modules:  # which a test that starts jobs has imported
        sys.modules["jobs"].until = time.monotonic() + seconds
    with deadline(seconds, item.nodeid, _stderr):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # Each rank agrees once per test, wherever the test ended for it.
    if _is_mpi(item) and (call.when == "call" or (call.when == "setup" and not report.passed)):
        _agree(item, call, report)
    if report.failed and _is_mpi(item):
        report.sections.append(("seed", f"HPCDIST_TEST_SEED={_seed} repeats the random data"))
    return report


def _together(call) -> bool:
    """Whether a test failed by parallel_assert or parallel_raises: alike on all ranks."""
    text = str(call.excinfo.value) if call.excinfo is not None else ""
    return text.startswith(("parallel_assert failed on", "parallel_raises failed on"))


def _agree(item, call, report):
    own = _FAILED if report.failed else _SKIPPED if report.skipped else _PASSED
    outcomes = ranks.exchange(own, zlib.crc32(item.nodeid.encode()))
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome == _FAILED]
    if not failed and len(set(outcomes)) > 1:
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome == _SKIPPED]
        report.longrepr = f"the test was skipped on ranks {failed} only"
        report.outcome = "failed"
    elif failed:
        _share(item, call, report, failed)
    if failed:
        _new_world()


def _share(item, call, report, failed):
    """Put together the reports of the ranks that failed: what rank 0 has is all that is kept."""
    own = ranks.rank in failed
    texts = ranks.share(report.longreprtext if own else "")
    # First the cause: a rank whose exception took it out of step lets the others wait.
    order = sorted(failed, key=lambda rank: ("DistTimeoutError" in texts[rank], rank))
    together = "\n".join(f"E   rank {rank}:\n{texts[rank]}" for rank in order)
    if not own:
        report.outcome = "failed"
        report.longrepr = f"the test failed on ranks {failed}\n{together}"
    elif not _together(call):
        _reports[item.nodeid] = together
        if ranks.rank:
            say(f"FAILED {item.nodeid}\n{report.longreprtext}")


def _new_world():
    """Start the process group anew: after a failure its ranks may be in different places."""
    import hpcdist

    if hpcdist.is_initialized():
        try:
            hpcdist.destroy_process_group()
        except hpcdist.DistError as exc:
            say(f"after the failure: {exc}")
    _init()


def _init():
    from datetime import timedelta

    import hpcdist

    hpcdist.init_process_group(timeout=timedelta(seconds=START_TIMEOUT))
    hpcdist.group.WORLD.timeout = timedelta(seconds=GROUP_TIMEOUT)


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        # A test whose fixtures fail after it is one failed test, however it ended itself.
        if _outcomes.get(report.nodeid) != "failed":
            _outcomes[report.nodeid] = report.outcome
        _slowest.append((report.duration, report.nodeid))
    if report.failed:
        text = _reports.pop(report.nodeid, report.longreprtext)
        _failures[report.nodeid] = _failures.get(report.nodeid, "") + text
    if report.failed and report.when == "teardown" and ranks.rank:
        say(f"ERROR after {report.nodeid}\n{report.longreprtext}")


def pytest_terminal_summary(terminalreporter):
    """Say how many tests no Slurm cluster could be started for."""
    skipped = [
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    ]
    absent = [reason for reason in skipped if reason.startswith("slurm: ")]
    if absent:
        terminalreporter.write_line(f"{len(absent)} tests not run, {absent[0]}", yellow=True)


def pytest_collectreport(report):
    if report.failed and ranks.rank:
        say(f"ERROR collecting {report.nodeid}\n{report.longreprtext}")


def pytest_internalerror(excrepr):
    if ranks.rank:
        say(f"INTERNAL ERROR\n{excrepr}")


# --- fixtures ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _process_group():
    import hpcdist

    if not hpcdist.is_initialized():
        _init()
    yield
    if hpcdist.is_initialized():
        hpcdist.destroy_process_group()


@pytest.fixture(autouse=True)
def _world(request):
    """Give each MPI test the default process group; a test that destroys it need not restore it."""
    if _is_mpi(request.node):
        request.getfixturevalue("_process_group")
        import hpcdist

        if not hpcdist.is_initialized():
            _init()
        if request.node.get_closest_marker("one_node"):
            comm = hpcdist.group.WORLD.carrier
            if len(comm.node_ranks) < comm.size:
                pytest.skip("for ranks of one node")


@pytest.fixture
def no_world(_world):
    """Leave the default group out during a test; the next test has one again."""
    import hpcdist

    hpcdist.destroy_process_group()


@pytest.fixture
def rng(request):
    """Random numbers that differ between tests and runs, and are the same on all ranks."""
    return np.random.default_rng((_seed, zlib.crc32(request.node.nodeid.encode())))


class Count:
    """Reports how many cases a test ran, and the seconds of the slowest: count(cases, slowest).

    All ranks call it; tests/reliability.py adds the numbers up. `grown` tells what a process held
    more in the end, as :func:`resources.change` does; the most of all ranks is reported.
    """

    def __init__(self, node: pytest.Item) -> None:
        self._node = node
        self._mpi = _is_mpi(node)
        self._reported = 0.0

    def __call__(
        self, cases: int, slowest: float = 0.0, grown: dict[str, int] | None = None
    ) -> None:
        if self._mpi:
            slowest = max(ranks.exchange(int(slowest * 1e6))) * 1e-6
            grown = {name: max(ranks.exchange(more)) for name, more in (grown or {}).items()}
        line = {"test": self._node.name, "np": ranks.size, "cases": cases, "slowest": slowest}
        self._write("HPCDIST_TEST_COUNTS", "a", {**line, "grown": grown or {}})

    def progress(self, done: int, total: int) -> None:
        """Say how far the test is; may be called often."""
        if time.monotonic() - self._reported > 0.5:
            self._reported = time.monotonic()
            self._write("HPCDIST_TEST_PROGRESS", "w", {"done": done, "total": total})

    def _write(self, variable: str, mode: str, line: dict) -> None:
        path = os.environ.get(variable)
        if path and (ranks.rank == 0 or not self._mpi):
            with open(path, mode) as out:
                out.write(json.dumps(line) + "\n")


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """A Slurm cluster with two nodes; the tests skip without one, and fail in CI."""
    import slurm

    slurm.require()
    with slurm.cluster() as found:
        yield found


@pytest.fixture
def count(request):
    """A :class:`Count` for this test."""
    return Count(request.node)
