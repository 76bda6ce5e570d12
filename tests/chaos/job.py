"""One episode's job: start it, inject faults from outside, bound it, look at what is left."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from chaos.board import BEGAN, DEAD_AT, LIMIT, PID, STREAMS, Board
from chaos.oracle import Stop
from chaos.program import Episode

TESTS = Path(__file__).resolve().parents[1]
#: Seconds that a job may take to start; that it may go on after its episode.
STARTS, AFTER = 120.0, 100.0
#: Seconds beyond a deadline after which a call counts as a hang.
HANGS = 15.0

CRASH = re.compile(
    r"Segmentation fault|Fatal Python error|Bus error|terminate called|double free|corrupt|"
    r"Assertion .* failed|[Ss]ignal:? (11|7|6|4|8)\b|SIGNAL: (11|7|6|4|8)\b|stack smashing"
)
#: Frames that every stack has.
NOT_OURS = ("Py", "pymain", "libc", "?", "futex", "pthread", "GI_", "clone", "start_", "epoll")
#: The tmpfs in front of mpirun; what it still holds at the end is written down.
PRIVATE = (
    'mount -t tmpfs -o size="$1" tmpfs /dev/shm && folder=$2 && shift 2 && { "$@"; status=$?; '
    'ls -A /dev/shm > "$folder/left"; exit $status; }'
)


@dataclass
class Ended:
    """How a job ended.

    Attributes
    ----------
    code : int
        Of mpirun.
    seconds : float
        The whole job.
    after_death : float
        From a rank's death to the end; -1 when nobody died.
    hang : str
        What did not end, with the stacks of all ranks; empty when everything did.
    hung_at : float
        When that was found out: what came later was disturbed.
    stops : list of Stop
        When which rank was stopped.
    crash, text : str
        Lines that speak of a crash; what mpirun and the ranks said.
    left : list of str
        Processes and files of shared memory that were left behind.
    """

    code: int = 0
    seconds: float = 0.0
    after_death: float = -1.0
    hang: str = ""
    hung_at: float = math.inf
    stops: list[Stop] = field(default_factory=list)
    crash: str = ""
    text: str = ""
    left: list[str] = field(default_factory=list)


def may_mount() -> bool:
    """Whether this user may give a job a /dev/shm of its own."""
    if not shutil.which("unshare"):
        return False
    test = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"]
    return subprocess.run(test, capture_output=True, timeout=60).returncode == 0


def in_private_shm(drawn: Episode, folder: Path, command: list[str]) -> list[str]:
    """The command in a mount namespace with a /dev/shm of its own, as large as the episode's."""
    size = str(-drawn.shm) if drawn.shm < 0 else "4g"
    return ["unshare", "-m", "sh", "-c", PRIVATE, "sh", size, str(folder), *command]


def mpi_starts(drawn: Episode, folder: Path, mpirun: list[str], env: dict[str, str]) -> bool:
    """Whether MPI starts without hpcdist where /dev/shm is as small as an episode's."""
    program = [sys.executable, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"]
    command = in_private_shm(drawn, folder, [*mpirun, "-n", str(drawn.ranks), *program])
    done = subprocess.run(command, env=env, capture_output=True, timeout=STARTS)
    return done.returncode == 0


def marked(marker: str) -> dict[int, str]:
    """The processes of a job: ids and command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() not in (process / "environ").read_bytes():
                continue
            if (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue  # its parent's affair
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            found[int(process.name)] = command.decode(errors="replace")[:200]
    return found


def _native(said: str) -> str:
    """What gdb says: a line a thread, without arguments, and without libc's and Python's frames."""
    threads: list[list[str]] = []
    for line in said.splitlines():
        frame = re.match(r"#\d+ +(?:0x\w+ in )?(\S+) ", line)
        if line.startswith("Thread"):
            threads.append([line.split("(")[0].strip()])
        elif frame and threads and not frame[1].lstrip("_").startswith(NOT_OURS):
            threads[-1].append(frame[1])
    return "\n".join(f"    {each[0]}: {' < '.join(each[1:])}" for each in threads)


class Job:
    """A running episode."""

    def __init__(self, drawn: Episode, folder: Path, mpirun: list[str], arguments: list[str],
                 env: dict[str, str], private: bool) -> None:  # fmt: skip
        self.drawn, self.folder, self.ended = drawn, folder, Ended()
        self.board = Board(folder / "board", drawn.ranks, create=True)
        self.rng = random.Random(f"{drawn.seed}:{drawn.number}:driver")
        self.marker = f"CHAOS_JOB={uuid.uuid4()}"
        full = {**env, **drawn.env, "CHAOS_JOB": self.marker.partition("=")[2]}
        program = [sys.executable, str(TESTS / "chaos.py"), "--rank", str(folder), *arguments]
        command = [*mpirun, "-n", str(drawn.ranks), *program]
        if private:
            full["CHAOS_PRIVATE_SHM"] = "1"
            command = in_private_shm(drawn, folder, command)
        self.began = time.monotonic()
        with (folder / "output").open("wb") as sink:
            self.process = subprocess.Popen(
                command, env=full, cwd=folder, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def run(self) -> Ended:
        """Watch over the job until it has ended."""
        try:
            self.watch()
        finally:
            self.go_on()
            if self.process.poll() is None:
                self.kill()
        self.ended.code = self.process.returncode
        now = time.monotonic()
        self.ended.seconds = now - self.began
        died = max(float(cell) for cell in self.board.cells[:, DEAD_AT])
        if died:
            self.ended.after_death = now - died
        self.look()
        return self.ended

    def watch(self) -> None:
        limit = self.began + STARTS
        started = False
        stops = self.drawn.row.stops
        following = time.monotonic() + 1.0
        while self.process.poll() is None:
            now = time.monotonic()
            if not started and self.board.cells[:, PID].all():
                started, limit = True, now + self.drawn.seconds + AFTER
            stuck = self.stuck(now)
            if stuck or now > limit:
                what = stuck or f"the job did not end within {now - self.began:.0f} s"
                self.ended.hung_at = now
                self.ended.hang = f"{what}\n{self.stacks()}"
                return
            if stops and now > following and started:
                self.stop_some(stops[1])
                following = time.monotonic() + self.rng.expovariate(1 / stops[0])
            time.sleep(0.005 if stops else 0.03)

    def stuck(self, now: float) -> str:
        """A call that goes on long after its deadline."""
        for rank in range(self.drawn.ranks):
            for stream in range(STREAMS):
                limit = self.board.cell(rank, stream, LIMIT)
                over = now - self.board.cell(rank, stream, BEGAN) - limit
                if limit and over > HANGS:
                    where = f"rank {rank}, stream {stream} is in a call"
                    return f"{where} {over:.0f} s after its deadline"
        return ""

    def stop_some(self, longest: float) -> None:
        """SIGSTOP to one rank or several, and SIGCONT after a while."""
        ranks = [rank for rank in range(self.drawn.ranks) if self.rng.random() < 0.4]
        ranks = ranks or [self.rng.randrange(self.drawn.ranks)]
        seconds = min(longest, self.rng.choice([0.001, 0.005, 0.02, 0.1, 0.4, longest]))
        began = time.monotonic()
        for rank in ranks:
            self.send(rank, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.3, 1.0) * seconds)
        for rank in ranks:
            self.send(rank, signal.SIGCONT)
            self.ended.stops.append(Stop(rank, began, time.monotonic() + 0.01))

    def send(self, rank: int, number: int) -> None:
        """A signal to a rank of ours, if it is still that process."""
        pid = int(self.board.cells[rank, PID])
        with contextlib.suppress(OSError):
            if pid and self.marker.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, number)

    def go_on(self) -> None:
        for rank in range(self.drawn.ranks):
            self.send(rank, signal.SIGCONT)

    def stacks(self) -> str:
        """The stacks of all ranks, by faulthandler and, where there is one, by gdb."""
        self.go_on()
        for rank in range(self.drawn.ranks):
            self.send(rank, signal.SIGUSR1)
        time.sleep(1.0)
        found = [f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("stacks.*")]
        if shutil.which("gdb"):
            for rank in range(self.drawn.ranks):
                pid = str(int(self.board.cells[rank, PID]))
                call = ["gdb", "-nx", "-p", pid, "-batch", "-ex", "thread apply all bt 12"]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = subprocess.run(call, capture_output=True, text=True, timeout=40)
                    found.append(f"gdb, rank {rank}:\n" + _native(said.stdout))
        return "\n".join(found)

    def kill(self) -> None:
        """End what is left of the job, process by process."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        for pid in marked(self.marker):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(20)

    def look(self) -> None:
        """What the job said and left behind."""
        parts = [self.folder / "output", *sorted(self.folder.glob("stderr.*"))]
        texts = [f"{path.name}:\n{path.read_text(errors='replace')}" for path in parts]
        self.ended.text = "\n".join(texts)
        lines = self.ended.text.splitlines()
        self.ended.crash = "\n".join(line for line in lines if CRASH.search(line))[:2000]
        left, until = marked(self.marker), time.monotonic() + 3
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = marked(self.marker)
        self.ended.left = [f"process {pid}: {command}" for pid, command in left.items()]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        files = self.folder / "left"
        names = files.read_text().split() if files.exists() else []
        self.ended.left += [
            f"/dev/shm/{name}"
            for name in names
            if name != "chaos.filler" and not name.startswith("hpcdist.")
        ]
