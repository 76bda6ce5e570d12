"""Start a job again when it fails: what ``python -m hpcdist launch --max-restarts`` does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcdist import config
from hpcdist.elastic.memory import Memory
from hpcdist.launchers.commands import OpenMpi, Srun, Starter
from hpcdist.startup.commits import folder_of_job, job_of_this_process

#: A job that fails so soon, in seconds, and without a commit, this often in a row, is given up.
SOON, SOON_TIMES = 30.0, 3
#: What mpirun and srun end with after a wrong command line, of the program as well.
USAGE = 2
#: hpcdist's exit status when it ends a job because of a death.
DIED = 71
#: Signals after which nothing is started again; the others are passed on as well.
_LAST = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED = (*_LAST, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
#: States of a node of Slurm in which nothing can be started on it.
_DOWN = ("down", "fail", "drain", "no_respond", "power", "unk", "boot", "*")


@dataclass
class Pool:
    """Where ranks can be started.

    Attributes
    ----------
    ranks : int
        Ranks that are wanted.
    standby : int
        Spare slots of this machine, or spare hosts.
    hosts : list of str
        Hosts, the spare ones last; empty: this machine.
    """

    ranks: int
    standby: int
    hosts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = self.ranks + self.standby
        self.wanted = len(self.hosts) - self.standby
        self.each = self.ranks // self.wanted if self.wanted > 0 else 0

    def now(self) -> tuple[int, tuple[str, ...]]:
        """How many ranks to start, and on which hosts."""
        if not self.hosts and not self.wanted > 0:
            return min(self.ranks, self.slots), ()
        used = tuple(self.hosts[: self.wanted])
        return self.each * len(used), used

    def shrink(self, lost: bool, dead: Sequence[str]) -> None:
        """Take out what a failure has cost: a slot of this machine, or hosts that are gone."""
        if self.wanted > 0:
            self.hosts = [host for host in self.hosts if host not in dead]
        elif lost:
            self.slots -= 1


def lost_a_rank(status: int) -> bool:
    """Whether a launcher's status says that a rank was killed: by a signal, or hpcdist noticed."""
    return (
        status == DIED or status > 128 or status in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
    )


def supervise(
    pool: Pool,
    restarts: int,
    starter: Starter,
    build: Callable[[int, Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]],
) -> int:
    """Run a job until it ends well, or there is nothing left to try.

    Parameters
    ----------
    pool : Pool
        Where.
    restarts : int
        How often the job may be started again.
    starter : Starter
        The launcher.
    build : callable
        Takes the number of ranks, hosts, and an environment; returns the command, which it prints,
        and its environment.

    Returns
    -------
    int
        The exit status of the last try; 1 if the launcher lost it.
    """
    named = job_of_this_process({k: v for k, v in os.environ.items() if k == "HPCDIST_COMMIT_JOB"})
    job = named or f"{os.getpid()}-{secrets.token_hex(6)}"
    env = {**os.environ, "HPCDIST_COMMIT_JOB": job}
    env.setdefault("SLURM_KILL_BAD_EXIT", "1")
    # Under --with-ft ulfm mpirun's status is 0 after a death, whatever happens then.
    blind = isinstance(starter, OpenMpi) and bool(config.get("ft", env))
    soon = tries = 0
    memory = None
    try:
        while True:
            memory = _memory(job, memory)
            if memory is not None:
                memory.clean()
            ranks, hosts = pool.now()
            began = time.time()
            status, stopped = _run(*build(ranks, hosts, env))
            if status == 0 and blind and _left(job, hosts):
                status = 1
            if status in (0, USAGE) or stopped:
                named = named if status else ""
                return status
            soon = soon + 1 if _at_once(memory, began) else 0
            pool.shrink(lost_a_rank(status), _dead(pool.hosts, starter))
            text = f"the job ended with {_words(status)} after {time.time() - began:.1f} s"
            left = _no_more(pool, tries, restarts, soon)
            if left:
                print(f"hpcdist launch: {text}; {left}", file=sys.stderr, flush=True)
                return status
            tries += 1
            ranks, hosts = pool.now()
            where = f" on {', '.join(hosts)}" if hosts else ""
            print(
                f"hpcdist launch: restart {tries} of {restarts}: {text}; now {ranks} "
                f"rank{'s' * (ranks > 1)}{where}",
                file=sys.stderr,
                flush=True,
            )
    except KeyboardInterrupt:  # between two tries
        return 128 + signal.SIGINT
    finally:
        if memory is not None:
            memory.close()
            if not named:  # the next start under a name of the user's goes on from there
                memory.remove()


def _no_more(pool: Pool, tries: int, restarts: int, soon: int) -> str:
    """Why the job is not started again; "" if it is."""
    if tries == restarts:
        return f"it was started again {restarts} times" if restarts else ""
    if soon == SOON_TIMES:
        return f"it has failed {soon} times in a row at once, without a commit"
    if pool.now()[0] < 1:
        return "no rank is left"
    return ""


def _memory(job: str, opened: Memory | None) -> Memory | None:
    """The job's folder on this node; a new one where the last rank to end well has removed it."""
    if opened is not None:
        if opened.folder.exists():
            return opened
        opened.close()
    try:
        return Memory(job)
    except OSError as error:
        print(f"hpcdist launch: no commits in this node's memory: {error}", file=sys.stderr)
        return None


def _left(job: str, hosts: Sequence[str]) -> bool:
    """Whether a try has left its folder: the last rank of a node that ends well removes it."""
    folder = folder_of_job(job)
    if _here(hosts):
        return folder.exists()
    ssh = shutil.which("ssh")
    if ssh is None:
        return False
    return _run_there(ssh, hosts[0], f"test ! -e {shlex.quote(str(folder))}") == 1


def _at_once(memory: Memory | None, began: float) -> bool:
    """Whether a try that has ended was short, and made no commit that this node has."""
    if time.time() - began > SOON:
        return False
    if memory is None:
        return True
    with contextlib.suppress(OSError):
        for path in memory.folder.iterdir():
            if path.name[0].isdecimal() and path.stat().st_mtime >= began:
                return False
    return True


def _words(status: int) -> str:
    number = status - 128 if status > 128 else status
    names = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM}
    if status == DIED:
        return f"status {status} (a rank died)"
    return f"status {status}" + (
        f" ({signal.Signals(number).name})" if number in names and lost_a_rank(status) else ""
    )


# -- the launcher as a child -----------------------------------------------------------------------


def _run(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, bool]:
    """Run the launcher, pass signals on, and return its status and whether a signal ended it."""
    # What this process was started to ignore, by nohup or as a script's background job, it neither
    # heeds nor passes on: while a signal is blocked, it arrives nevertheless.
    mine = {each for each in _PASSED if signal.getsignal(each) is not signal.SIG_IGN}
    mine.add(signal.SIGCHLD)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else a child's status is lost
    before = signal.pthread_sigmask(signal.SIG_BLOCK, mine)
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        # without this process nobody would end the job
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    stopped = False
    try:
        # A session of its own: a Ctrl-C on the terminal arrives once, through this process, and the
        # launcher may read from the terminal.
        child = subprocess.Popen(command, env=env, preexec_fn=prepare, start_new_session=True)
        while child.poll() is None:
            # SIGCHLD of an end before this call is pending
            info = signal.sigtimedwait(mine, 5.0)
            if info is None or info.si_signo == signal.SIGCHLD:
                continue
            stopped |= info.si_signo in _LAST
            child.send_signal(info.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = child.returncode
    return (128 - status if status < 0 else status), stopped


# -- hosts -----------------------------------------------------------------------------------------


def hosts_of_allocation(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the Slurm job that this process is in; empty if it cannot be told."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    done = _ask(["scontrol", "show", "hostnames", nodes]) if nodes else None
    return done.split() if done else []


def _here(hosts: Sequence[str]) -> bool:
    """Whether this machine is among the hosts."""
    names = {"localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().split(".")[0]}
    return not hosts or any(host in names or host.split(".")[0] in names for host in hosts)


def _dead(hosts: Sequence[str], starter: Starter) -> list[str]:
    """Hosts on which nothing can be started, as far as that can be told."""
    if not hosts:
        return []
    if isinstance(starter, Srun):
        text = _ask(
            ["sinfo", "--noheader", "--Node", "--format=%N %T", f"--nodes={','.join(hosts)}"]
        )
        states = dict(line.split()[:2] for line in (text or "").splitlines() if " " in line)
        return [h for h in hosts if any(word in states.get(h, "").lower() for word in _DOWN)]
    found = []
    ssh = shutil.which("ssh")
    for host in hosts:
        if ssh and not _here([host]):  # else it cannot be told
            if _run_there(ssh, host, "true") == 255:
                found.append(host)
    return found


def _run_there(ssh: str, host: str, command: str) -> int:
    """Run a shell's command on a host; 255, which is ssh's own: it did not get there."""
    asked = [ssh, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, command]
    # No pipes: the process that ssh leaves behind to share its connection may keep them open.
    null = subprocess.DEVNULL
    try:
        return subprocess.run(asked, stdin=null, stdout=null, stderr=null, timeout=30).returncode
    except subprocess.TimeoutExpired:
        return 255


def _ask(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
