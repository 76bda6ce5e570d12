"""Lets MPI start where the ranks of a node do not share their process ids, or their /dev/shm.

A container for each rank separates both. Open MPI's shared memory takes two processes with the same
id for one, and MPICH waits for ever for what another rank wrote to its own /dev/shm. Where ranks
are apart MPI is told to go another way, which is slower.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path

#: Where process ids mean something, and where files of /dev/shm do; "0" for what cannot be seen.
Space = tuple[str, str]

#: Seconds that a rank waits to see the others of its node.
_PATIENCE = 10.0
_TICK = 0.005
#: A process that has one of these is a rank, or lies between a rank and its launcher.
_RANK = (b"PMIX_RANK=", b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")

#: Names of the programs that run scripts; a process is called as its script is.
_INTERPRETER = re.compile(r"(|ba|da|z|k|mk|c|tc)sh\b|python|perl|busybox")

#: Per MPI: its variable, and the value for ranks that are apart. What the user has set counts.
_OPEN_MPI = ("OMPI_MCA_btl", "^sm")
_MPICH = ("MPIR_CVAR_NOLOCAL", "1")


def own_space() -> Space:
    """Return what this process shares with those that have the same."""
    return _space("self", Path("/dev/shm"))


def _space(process: str, shm: Path) -> Space:
    found = []
    for path in (Path("/proc", process, "ns", "pid"), shm):
        try:
            about = os.stat(path)
            found.append(f"{about.st_dev:x}.{about.st_ino:x}")
        except OSError:
            found.append("0")
    return found[0], found[1]


def text_of(path: str) -> str:
    """Return the text of a file of /proc.

    Names in it are bytes: the kernel cuts a process's after 15, within a character too.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    return Path(path).read_text(errors="replace")


def stat_of(process: int | str) -> list[str]:
    """Return the fields of a process from its state on (3 in proc(5)); [] if it cannot be seen."""
    try:
        return text_of(f"/proc/{process}/stat").rpartition(")")[2].split()
    except OSError:
        return []


def began() -> float:
    """Return when this process began, of ``time.time``; 0 if it cannot be seen."""
    stat = stat_of("self")
    if not stat:
        return 0.0
    since_boot = int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def comm_of(pid: int) -> str:
    """Return the name of a process; empty if it cannot be seen."""
    try:
        return text_of(f"/proc/{pid}/comm")
    except OSError:
        return ""


def is_launcher(pid: int, names: tuple[str, ...]) -> bool:
    """Whether a process is a known launcher, and no script of the user's with such a name.

    Parameters
    ----------
    pid : int
        Of the process.
    names : tuple of str
        How the names of known launchers begin.
    """
    if not comm_of(pid).startswith(names):
        return False
    try:
        return not _INTERPRETER.match(os.path.basename(os.readlink(f"/proc/{pid}/exe")))
    except OSError:
        return True  # another user's


def ancestors() -> list[int]:
    """Return the pids of this process's ancestors, the nearest first, as far as they can be seen.

    In the numbers of /proc, which may be another namespace's than this process's own.
    """
    found: list[int] = []
    pid = int((stat_of("self") or ["", "0"])[1])
    while pid > 0 and len(found) < 64:
        found.append(pid)
        pid = int((stat_of(pid) or ["", "0"])[1])
    return found


def shares_with_launcher(names: tuple[str, ...]) -> bool:
    """Whether this process shares its ids and /dev/shm with the launcher, and so with all ranks.

    Parameters
    ----------
    names : tuple of str
        How the names of known launchers begin; others are known by their variables.
    """
    for pid in ancestors():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            environ = []  # another user's
        if is_launcher(pid, names) or not any(e.startswith(_RANK) for e in environ):
            theirs = _space(str(pid), Path("/proc", str(pid), "root", "dev", "shm"))
            # what may not be looked at is not known to be shared, except by ids
            return theirs[0] in ("0", own_space()[0]) and theirs[1] == own_space()[1]
    return False


def settings(
    family: str,
    local_size: int | None,
    spaces: Callable[[], Collection[Space]],
    until: float,
) -> dict[str, str]:
    """Return the variables to set while MPI starts.

    Parameters
    ----------
    family : str
        The MPI.
    local_size : int or None
        Ranks on this node.
    spaces : callable
        Returns the spaces of those that have arrived, this rank's among them.
    until : float
        When the start must be over, of ``time.monotonic``.
    """
    until = min(until, time.monotonic() + _PATIENCE)
    seen = spaces()
    while local_size and len(seen) < local_size and time.monotonic() < until:
        time.sleep(_TICK)
        seen = spaces()
    whole = len(seen) >= (local_size or 2)
    pids, shm = ({space[k] for space in seen} for k in (0, 1))
    if family == "Open MPI":
        # TCP serves in every case
        apart, (name, value) = not whole or len(pids) > 1 or len(shm) > 1, _OPEN_MPI
    else:
        apart, (name, value) = len(shm) > 1, _MPICH
    return {name: value} if apart and name not in os.environ else {}


def said(family: str, changed: dict[str, str]) -> str:
    """Return the sentences about what was changed."""
    (name, value), *_ = changed.items()
    if family == "Open MPI":
        return (
            "the ranks of this node have process ids or a /dev/shm of their own, which Open MPI's "
            f"shared memory cannot bear: messages between them go over TCP ({name}={value}). Share "
            "both (containers: --pid=host --ipc=host), or set the variable yourself."
        )
    return (
        "the ranks of this node have a /dev/shm each, so MPI takes them for ranks of several nodes "
        f"({name}={value}): messages between them go through the network, and each has local rank "
        "0. Share it (containers: --ipc=host), or set the variable yourself."
    )
