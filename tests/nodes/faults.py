"""Jobs on two nodes, a fault in each, and what has to come of it, judged from outside."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from link import Pair, gone, until
from nodes import command_line, die_with_parent, is_mpich

PROGRAM = str(Path(__file__).with_name("program.py"))
OPERATIONS = (
    "small", "large", "async", "messages", "long_messages", "lists", "barrier", "new_group",
    "backward", "start",
)  # fmt: skip
#: After these all goes on.
PASSING = ("pause", "cut_1s", "down_1s", "slow")
#: With HPCDIST_FT=1: a rank, all ranks of a node, and what started these as well are killed.
SURVIVED = ("ft_rank", "ft_ranks")
FT = (*SURVIVED, "ft_daemon")
FAULTS = ("kill", "daemon", "stop", "cut", "down", *PASSING, *FT)
#: Operations that any number of ranks can go on with. A death while a group is made, or while Open
#: MPI writes much to the connection that breaks, may end the job: docs/surviving.md.
SURVIVABLE = ("small", "barrier")
#: Seconds: the group's timeout, and for faults that pass where nothing waits for it.
TIMEOUT, LONG_TIMEOUT = 3.0, 30.0
#: Seconds for TCP and a launcher to notice that the link is back.
NOTICE = 30.0


@dataclass
class Case:
    """What is tried.

    Attributes
    ----------
    fault, operation : str
        Of `FAULTS` and `OPERATIONS`.
    per_node : int
        Ranks on each node.
    end : str
        What ranks do after an error: "raise" or "catch".
    slack : float
        Seconds that everything may take longer, on a machine that does other things too.
    """

    fault: str
    operation: str
    per_node: int = 1
    end: str = "raise"
    slack: float = 0.0

    @property
    def timeout(self) -> float:
        return LONG_TIMEOUT if self.fault in PASSING and self.slack else TIMEOUT


@dataclass
class Outcome:
    """What came of it.

    Attributes
    ----------
    problems : list of str
        What was not as it must be.
    error, end, daemons : float
        Seconds: the latest error after its deadline (negative: before it), the end of the last
        rank after the fault, and how long a launcher's daemon stayed after that.
    text : str
        What mpirun and the ranks printed, and the ranks' files.
    """

    problems: list[str] = field(default_factory=list)
    error: float = 0.0
    end: float = 0.0
    daemons: float = 0.0
    text: str = ""


def is_possible(mpirun: str, fault: str, operation: str) -> bool:
    """Whether a fault is tried with an operation and an MPI."""
    return fault not in FT or (operation in SURVIVABLE and not is_mpich(mpirun))


class Job:
    """A job that runs."""

    def __init__(self, pair: Pair, case: Case, folder: Path) -> None:
        self.pair, self.case, self.folder = pair, case, folder
        self.size = 2 * case.per_node
        program = [PROGRAM, case.operation, str(case.timeout), case.end, str(folder)]
        ft = case.fault in FT
        command = command_line(pair.mpirun, pair.shell, case.per_node, program, ft)
        with (folder / "output").open("wb") as sink:
            self.mpirun = subprocess.Popen(
                [*pair.nodes[0].enter, *command],
                env={**pair.env, "HPCDIST_FT": "1"} if ft else pair.env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )

    def lines(self, rank: int) -> list[tuple[float, str, str]]:
        """What a rank has written: time, word, text."""
        path = self.folder / f"rank.{rank}"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        parts = [line.split(" ", 2) for line in whole.splitlines()]
        return [(float(t), word, text) for t, word, text in parts]

    def pid(self, rank: int) -> int:
        return int(self.lines(rank)[0][2])

    def calls(self, rank: int) -> int:
        return sum(word == "calls" for _, word, _ in self.lines(rank))

    def errors(self) -> dict[int, tuple[float, str]]:
        """When each rank got an error, and its text."""
        found = {}
        for rank in range(self.size):
            for when, word, text in self.lines(rank):
                if word == "error":
                    found[rank] = (when, text)
        return found

    def runs(self, rank: int) -> bool:
        return not gone(self.pid(rank))

    def text(self) -> str:
        """All that was printed, and the ends of the ranks' files."""
        found = [(self.folder / "output").read_text(errors="replace")]
        for rank in range(self.size):
            path = self.folder / f"stderr.{rank}"
            said = path.read_text(errors="replace") if path.exists() else ""
            last = "\n".join(f"{t:.3f} {word} {text}" for t, word, text in self.lines(rank)[-3:])
            found.append(f"--- rank {rank}\n{said}{last}")
        return "\n".join(found)


# ---- one case ----


def inject(job: Job, victim: int) -> None:
    """Make the fault happen."""
    fault, pair = job.case.fault, job.pair
    if fault in ("kill", "ft_rank"):
        os.kill(job.pid(victim), signal.SIGKILL)
    elif fault in FT:
        daemon = [pair.daemon(1)] if fault == "ft_daemon" else []
        for pid in (*daemon, *map(job.pid, range(job.case.per_node, job.size))):
            os.kill(pid, signal.SIGKILL)
    elif fault == "daemon":
        os.kill(pair.daemon(1), signal.SIGKILL)
    elif fault in ("stop", "pause"):
        os.kill(job.pid(victim), signal.SIGSTOP)
    elif fault == "slow":
        pair.slow()
    elif fault.startswith("cut"):
        pair.cut()
    else:
        pair.down()


def check_passing(job: Job, victim: int, out: Outcome) -> None:
    """All goes on after a second, and the results are right."""
    time.sleep(1)
    if job.case.fault == "pause":
        os.kill(job.pid(victim), signal.SIGCONT)
    elif job.case.fault != "slow":
        job.pair.restore()
    before = [job.calls(rank) for rank in range(job.size)]
    more = lambda: all(job.calls(r) > before[r] + 1 for r in range(job.size))  # noqa: E731
    if not until(lambda: more() or bool(job.errors()) or job.mpirun.poll() is not None, 60):
        out.problems.append("does not go on")
    (job.folder / "stop").touch()
    if not until(lambda: job.mpirun.poll() is not None, 60):
        out.problems.append("does not end")
    elif job.mpirun.returncode or job.errors():
        out.problems.append(f"status {job.mpirun.returncode}, errors {job.errors()}")


def check_survivors(job: Job, victim: int, out: Outcome) -> None:
    """The ranks that are left recover, go on with right results, and end well."""
    last = job.case.per_node if job.case.fault == "ft_ranks" else job.size
    living = [r for r in range(last) if job.case.fault == "ft_ranks" or r != victim]
    began = time.time()
    left = lambda r: [t for t, word, n in job.lines(r) if word == "left" and int(n) == len(living)]  # noqa: E731
    if not until(lambda: all(map(left, living)) or bool(job.errors()), 5 + job.case.slack):
        out.problems.append("does not recover")
    out.error = max((t - began for r in living for t in left(r)), default=0.0)
    before = [job.calls(rank) for rank in living]
    more = lambda: all(job.calls(r) > n + 1 for r, n in zip(living, before, strict=True))  # noqa: E731
    if not until(lambda: more() or bool(job.errors()), 60):
        out.problems.append("does not go on")
    (job.folder / "stop").touch()
    if not until(lambda: job.mpirun.poll() is not None, 60):
        out.problems.append("does not end")
    ends = [r for r in living if any(word == "ends" for _, word, _ in job.lines(r)[-1:])]
    if job.errors() or ends != living:
        out.problems.append(f"errors {job.errors()}; ranks {ends} of {living} end")


def missing_named(job: Job, rank: int, text: str, victim: int) -> bool:
    """Whether a text names a rank that `rank` cannot reach, or one that has said so."""
    waits = re.search(r"(?:from|to) rank (\d+), tag|rank (\d+) of group '\w+' failed", text)
    if waits and int(waits[1] or waits[2]) in job.errors():
        return True
    if job.case.fault in ("kill", "stop"):
        return bool(re.search(rf"rank {victim}\b", text))
    there = range(job.case.per_node, job.size) if rank < job.case.per_node else range(
        job.case.per_node
    )  # fmt: skip
    ranks = "|".join(map(str, there))
    host = "node-b" if rank < job.case.per_node else "node-a"
    return bool(re.search(rf"ranks? [\d, ]*\b({ranks})\b|{host}", text))


def check_errors(job: Job, victim: int, began: float, out: Outcome) -> None:
    """Each living rank has an error in time that names who is missing."""
    living = [r for r in range(job.size) if not (job.case.fault == "stop" and r == victim)]
    told = lambda: set(job.errors())  # noqa: E731
    limit = TIMEOUT + 12 + job.case.slack
    until(lambda: all(r in told() or not job.runs(r) for r in living), limit)
    now = time.time()
    errors = job.errors()
    for rank in living:
        begun = max([began, *(t for t, word, _ in job.lines(rank) if word == "calls")])
        if rank in errors:
            when, text = errors[rank]
        else:  # the watchdog's last words, just before the process ended
            path = job.folder / f"stderr.{rank}"
            text, when = path.read_text(errors="replace"), path.stat().st_mtime
            if job.runs(rank):
                out.problems.append(f"rank {rank} has no error after {now - begun:.1f} s")
                continue
            beside = [r for r in living if r // job.case.per_node == rank // job.case.per_node]
            words = "".join((job.folder / f"stderr.{r}").read_text() for r in beside)
            if not set(beside) & set(errors) and not missing_named(job, rank, words, victim):
                out.problems.append(f"ranks {beside} ended without a word about who is missing")
        out.error = max(out.error, when - begun - TIMEOUT)
        if when - begun > TIMEOUT + 1 + job.case.slack:
            out.problems.append(f"rank {rank}: error {when - begun - TIMEOUT:.2f} s after timeout")
        if rank in errors and not missing_named(job, rank, text, victim):
            out.problems.append(f"rank {rank} names nobody who is missing: {text}")


def check_end(job: Job, began: float, limit: float, out: Outcome) -> None:
    """All ranks end in time, with a status that is no success."""
    pids = [job.pid(r) for r in range(job.size)]
    if not until(lambda: all(map(gone, pids)), began + limit - time.time()):
        left = [r for r, pid in enumerate(pids) if not gone(pid)]
        out.problems.append(f"ranks {left} run {limit:g} s after the fault")
    out.end = time.time() - began


def check_left(job: Job, out: Outcome) -> None:
    """Nothing is left on the nodes."""
    began = time.time()
    if not until(lambda: not job.pair.running(), NOTICE):
        out.problems.append(f"still running: {job.pair.running()}")
    out.daemons = time.time() - began
    if files := job.pair.shared_memory():
        out.problems.append(f"in /dev/shm: {files}")


def judge(job: Job, rng: random.Random, out: Outcome) -> None:
    fault = job.case.fault
    ready = lambda: all(job.calls(r) >= 3 for r in range(job.size))  # noqa: E731
    if not until(lambda: ready() or job.mpirun.poll() is not None, 90) or not ready():
        out.problems.append("does not start")
        return
    victim = rng.randrange(job.size)
    time.sleep(rng.random() * 0.3)
    began = time.time()
    inject(job, victim)
    if fault in PASSING:
        check_passing(job, victim, out)
        return
    if fault in SURVIVED:
        check_survivors(job, victim, out)
        return
    # MPICH's mpirun does not notice that a daemon of its own has died: the other node's ranks wait
    limit = job.case.slack + (5 if fault == "kill" else TIMEOUT + 5)
    if fault in ("kill", "daemon", "ft_daemon"):
        check_end(job, began, limit, out)
        text = job.text()
        named = rf"rank {victim}\b|node-b" if fault == "kill" else r"node-b|died"
        if not re.search(named, text):
            out.problems.append("the log does not name who died")
        if not re.search(r"#\d+", text + job.pair.recordings()) and job.case.operation != "start":
            out.problems.append("neither the log nor a recorder names an operation and its number")
    else:
        check_errors(job, victim, began, out)
        check_end(job, began, TIMEOUT + 12 + job.case.slack, out)
    if fault == "stop":
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid(victim), signal.SIGCONT)
    job.pair.restore()
    if not until(lambda: job.mpirun.poll() is not None, NOTICE):
        out.problems.append(f"mpirun runs {NOTICE:g} s after the ranks' end")
    elif not job.mpirun.returncode and fault in ("kill", "daemon", "ft_daemon"):
        out.problems.append("status 0")


def run(pair: Pair, case: Case, rng: random.Random) -> Outcome:
    """Run one case."""
    out = Outcome()
    with tempfile.TemporaryDirectory(prefix="hpcdist-case.") as name:
        job = Job(pair, case, Path(name))
        try:
            judge(job, rng, out)
            pair.restore()
            check_left(job, out)
        finally:
            out.text = job.text()
            pair.clean()
            job.mpirun.kill()
            job.mpirun.wait()
    return out
