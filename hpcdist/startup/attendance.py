"""Bounds the start in time: names the missing processes, and ends a start that cannot finish.

MPI_Init waits for all processes of the job, and no exception can interrupt it. So a thread watches
the clock and the launcher's other processes on this node. When the time is over, or one of them has
ended, the thread prints the reason and ends the job.

A process that starts MPI binds a Unix socket in Linux's abstract namespace, whose name contains the
job and the rank. The kernel removes it with the process, also after a kill.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from hpcdist import _engine, _environment, launchers, log
from hpcdist.errors import DistBackendError, DistTimeoutError
from hpcdist.startup import apart

_log = log.get_logger("world")

#: Exit status, the same as that of the engine's watchdog.
_STATUS = 70
#: Prefixes of the names of processes whose children are the ranks of a node.
_PARENTS = ("hydra", "prte", "orted", "mpirun")
#: The same of the launcher's process on this node.
_LAUNCHERS = (*_PARENTS, "mpiexec", "slurmstepd")
#: Seconds between two checks of the other processes.
_TICK = 0.25
#: Seconds for which a process must be missing before it counts as ended: a launcher on a busy node
#: may take long from one process to the next.
_PATIENCE = 5.0
#: Stands for the rank of a process that may be any.
_HIDDEN = -1
#: Ranks on other nodes that an error names.
_NAMED = 16
#: Seconds after the deadline, so that calls that can raise do so first.
_GRACE = 0.5

# Descriptors, because Python warns of a socket that is open when the process ends.
_claim: int | None = None
_asked = ""  # what hydra has answered
_shown: int | None = None  # kept after a failed start: the others check it


class Arrived(NamedTuple):
    """A rank that has arrived: its place among those of its node, and the namespaces it is in."""

    local_rank: str
    space: apart.Space


class Watch:
    """Context manager that bounds one start of the default group in time.

    Parameters
    ----------
    seconds : float
        How long the start may take.

    Raises
    ------
    DistBackendError
        On entry, if another process is this rank of the job already.
    DistTimeoutError
        On exit, in place of one that was raised: the same error with the missing ranks.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._over = threading.Event()
        self._launch = launchers.detect() if launchers.starts_mpi() else None
        self._job = _job() if self._launch is not None else None
        self._launcher = _ancestor(_LAUNCHERS)
        self._end = time.monotonic() + seconds
        self._variables = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        global _shown
        if _shown is not None:
            os.close(_shown)
            _shown = None
        if self._launch is None or (self._launch.size or 1) < 2:
            return self
        if self._job is not None:
            if _engine.mpi_state() == "none":
                _claim_rank(self._job, self._launch.rank)
            space = "/".join(apart.own_space())
            place = f"{self._launch.rank}/start/{self._launch.local_rank}"
            _shown = _bind(self._name(f"{place}/{space}"))
        thread = threading.Thread(target=self._run, name="hpcdist-attendance", daemon=True)
        thread.calls_no_operation = True  # type: ignore[attr-defined]  # for the engine
        thread.start()
        self._let_apart(self._launch)
        return self

    def _let_apart(self, launch: launchers.Launch) -> None:
        """Have MPI start another way if the ranks of this node are apart."""
        if (
            _engine.mpi_state() != "none"
            or launch.local_size == 1
            or apart.shares_with_launcher(_LAUNCHERS)
        ):
            return
        family = launchers.mpi_family(_engine.library_version())
        changed = apart.settings(
            family,
            launch.local_size,
            lambda: [each.space for each in self._here().values()],
            self._end,
        )
        self._variables.enter_context(_environment.variables(changed))
        if changed and launch.rank == 0:
            _log.warning(apart.said(family, changed))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _shown
        self._over.set()
        self._variables.close()
        if error is None and _shown is not None:
            os.close(_shown)
            _shown = None
        if isinstance(error, DistTimeoutError):
            raise DistTimeoutError(f"{error} {self._missing()}".rstrip()) from None

    def _name(self, what: str) -> str:
        return f"hpcdist-{self._job}/{what}"

    def _run(self) -> None:
        end = self._end
        ended: list[int] | None = None
        since = time.monotonic()
        missing = ""
        alone = 0  # looks that found no launcher
        apart_since = 0.0
        while not self._over.wait(_TICK):
            # a process that no launcher started may go on without a reader
            alone = alone + 1 if self._launch is not None and _is_gone(self._launcher) else 0
            if alone > 2:  # with no one to end this rank, MPI_Init would spin for ever
                self._end_job("the launcher's process on this node has died.")
            if _engine.mpi_state() != "none":
                # calls that can raise get long for it, also on a busy node
                grace = _GRACE if _engine.start_blocks() else 4 * _GRACE
                if time.monotonic() > end + grace:
                    self._end_job(f"timeout after {self.seconds:.3g} s. {self._missing()}")
                continue
            before, ended = ended, self._ended()
            if before != ended:
                since = time.monotonic()
            if ended is not None and time.monotonic() - since > _PATIENCE:
                who = f"rank {ended[0]}" if ended else "a rank of this node"
                self._end_job(f"{who} has ended before it called init_process_group.")
            apart_since = (apart_since or time.monotonic()) if self._waits_for_ever() else 0.0
            if apart_since and time.monotonic() - apart_since > _PATIENCE:
                self._end_job(
                    "the ranks of this node have a /dev/shm each, and MPI waits for what another "
                    "rank writes to its own. Share it (containers: --ipc=host), or set "
                    "MPIR_CVAR_NOLOCAL=1."
                )
            if time.monotonic() > end:
                missing = missing or self._missing()  # look before another rank ends the job
            if time.monotonic() > end + _GRACE:
                self._end_job(f"timeout after {self.seconds:.3g} s. {missing}")

    def _waits_for_ever(self) -> bool:
        """Whether MPICH starts over a /dev/shm that the ranks of this node do not share."""
        launch = self._launch
        if launch is None or not launch.local_size or "MPIR_CVAR_NOLOCAL" in os.environ:
            return False
        if "MPICH" not in launchers.mpi_family(_engine.library_version()):
            return False  # before the look at all sockets, which is made at each tick
        here = self._here()
        # not those of several nodes that share a network namespace: hydra fills one after the other
        first = min(here, default=0)
        block = {rank: str(rank - first) for rank in range(first, first + launch.local_size)}
        if {rank: each.local_rank for rank, each in here.items()} != block:
            return False
        return len({each.space[1] for each in here.values()}) > 1

    def _end_job(self, why: str) -> None:
        launch = self._launch
        assert launch is not None
        if self._over.is_set():
            return
        _engine.abort(
            _STATUS,
            f"[hpcdist rank {launch.rank} of {launch.size}, {socket.gethostname()} pid "
            f"{os.getpid()}] init_process_group: {why} MPI cannot be told to give up here: ending "
            "the job",
        )

    def _missing(self) -> str:
        """Return a sentence that names the missing ranks, as far as this node shows them."""
        launch = self._launch
        if launch is None or self._job is None or not launch.size:
            return "Some rank has not called it."
        here = self._here()
        if launch.local_size != launch.size:
            if len(here) == launch.local_size:
                return _elsewhere([rank for rank in range(launch.size) if rank not in here])
            there = ", ".join(map(str, sorted(here)))
            size = launch.local_size or "?"
            return f"Of {size} processes on this node, rank {there} has arrived."
        absent = [rank for rank in range(launch.size) if rank not in here]
        if not absent:
            return ""
        plural = "ranks {} have" if len(absent) > 1 else "rank {} has"
        return f"On this node, {plural.format(', '.join(map(str, absent)))} not called it."

    def _here(self) -> dict[int, Arrived]:
        """Return the ranks that have arrived on this node."""
        begin = f"@{self._name('')}"
        found: dict[int, Arrived] = {}
        with contextlib.suppress(OSError):
            for line in apart.text_of("/proc/net/unix").split("\n"):
                name = line.rpartition(" ")[2].strip()
                if name.startswith(begin) and "/start/" in name:
                    rank, _, local_rank, pids, shm = name[len(begin) :].split("/")
                    found[int(rank)] = Arrived(local_rank, (pids, shm))
        return found

    def _ended(self) -> list[int] | None:
        """Return the ranks of this node whose process has ended; None if none has or it is unknown.

        MPICH's launcher never ends a job for such a rank, Open MPI's does for those that fail.
        """
        launch = self._launch
        parent = os.getppid()
        if launch is None or not launch.local_size or not apart.is_launcher(parent, _PARENTS):
            return None
        try:
            children = _children(parent)
            alive = [rank for rank in map(_rank_of, children) if rank is not None]
        except OSError:
            return None
        if str(os.getpid()) not in children:
            return None
        if len(alive) >= launch.local_size:
            return None
        if launch.local_size != launch.size or _HIDDEN in alive:
            return []
        return [rank for rank in range(launch.size) if rank not in alive]


def _elsewhere(ranks: list[int]) -> str:
    """Return the sentence where all ranks of this node have arrived."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    plural = "s" if len(ranks) > 1 else ""
    return (
        "All ranks of this node have arrived; some on other nodes have not, or the network fails: "
        f"rank{plural} {', '.join(map(str, ranks[:_NAMED]))}{more}."
    )


def _ancestor(names: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the pid of the nearest ancestor with such a name, and when it began.

    None if it cannot be seen: this rank is in a PID namespace of its own, or it has died.
    """
    for pid in apart.ancestors():
        if apart.is_launcher(pid, names) and (stat := apart.stat_of(pid)):
            return pid, stat[19]
    return None


def _is_gone(launcher: tuple[int, str] | None) -> bool:
    """Whether the launcher has died: one that cannot be seen no longer reads its rank's output."""
    if launcher is not None:
        stat = apart.stat_of(launcher[0])
        return not stat or stat[0] == "Z" or stat[19] != launcher[1]
    manager = os.environ.get("PMI_FD", "")  # hydra's connection: MPI spins once it is closed
    if manager.isdecimal() and _hang_up([int(manager)], select.POLLHUP):
        return True
    return _hang_up([1, 2], select.POLLERR | select.POLLHUP)


def _hang_up(descriptors: list[int], how: int) -> bool:
    """Whether the other ends of all of them have been closed."""
    ends = select.poll()
    for descriptor in descriptors:
        ends.register(descriptor, 0)
    found = ends.poll(0)
    return len(found) == len(descriptors) and all(bits & how for _, bits in found)


def _children(pid: int) -> list[str]:
    """Return the live children of a process, of all its threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [child for each in threads for child in (each / "children").read_text().split()]


def _rank_of(pid: str) -> int | None:
    """Return the rank of a running process; None for others, _HIDDEN where it shows no variables.

    So it is where a program has written its title there, as setproctitle does.
    """
    if apart.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] == "Z":
        return None
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    for entry in entries:
        if entry.startswith((b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")):
            return int(entry.partition(b"=")[2])
    return None if any(entry.startswith((b"PATH=", b"HOME=")) for entry in entries) else _HIDDEN


def _job() -> str | None:
    """Return a name of this job, the same in all its processes of a node; None if there is none."""
    env = os.environ
    if "PMIX_NAMESPACE" in env:
        key = env["PMIX_NAMESPACE"]
    elif "SLURM_STEP_ID" in env and "MPI_LOCALRANKID" not in env:
        key = f"slurm-{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    else:
        # by its process where that can be seen: hydra answers before MPI has started alone
        hydra = _ancestor(("hydra",))
        key = f"hydra-{hydra[0]}" if hydra else _hydras_job()
        if not key:
            return None
    return hashlib.sha256(f"{os.getuid()} {key}".encode()).hexdigest()[:16]


def _hydras_job() -> str:
    """Return hydra's name for the job, by which ranks know each other across PID namespaces too."""
    global _asked
    manager = os.environ.get("PMI_FD", "")
    if (
        not _asked
        and manager.isdecimal()
        and "MPI_LOCALRANKID" in os.environ  # Slurm has another protocol there
        and _engine.mpi_state() == "none"
    ):
        with contextlib.suppress(OSError):
            os.write(int(manager), b"cmd=get_my_kvsname\n")
            answer = select.poll()
            answer.register(int(manager), select.POLLIN)
            if answer.poll(1000 * _PATIENCE):
                _asked = os.read(int(manager), 1024).decode(errors="replace").strip()
    return _asked


def _bind(name: str) -> int | None:
    """Bind an abstract name and return the descriptor that has it; None if that fails."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        taken.bind(f"\0{name}")
    except OSError:
        taken.close()
        return None
    return taken.detach()


def _claim_rank(job: str, rank: int | None) -> None:
    """Claim this rank for the life of the process.

    Raises
    ------
    DistBackendError
        If another process has claimed it: a rank started this process, which inherited its
        variables.
    """
    global _claim
    name = f"hpcdist-{job}/{rank}"
    if _claim is None:
        _claim = _bind(name)
    if _claim is None and f"@{name}\n" in apart.text_of("/proc/net/unix"):
        raise DistBackendError(
            f"another process has started MPI as rank {rank} of this job; this one (pid "
            f"{os.getpid()}, a child of {os.getppid()}) inherited that rank's variables, and MPI "
            "would wait for ever here. Only the processes that the launcher started can call "
            "init_process_group: have the child call it, or its parent, not both"
        )
