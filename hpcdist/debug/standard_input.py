"""Standard input of a rank: whether a person can type into it, and where it ends.

Open MPI's mpirun forwards its input to a rank, but not the end of it: the rank's pipe stays open,
and a read from it would block for ever. On mpirun's host, /proc shows mpirun's own input.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import sys

from hpcdist import launchers
from hpcdist.launchers.table import HYDRA, OPEN_MPI

#: Lines may arrive.
OPEN = "open"
#: It is at its end: nothing will arrive.
ENDED = "ended"
#: The launcher gives this rank none.
ABSENT = "absent"

#: Set in the jobs of Slurm, PBS, LSF and Flux, where a closed input does not mean that no person
#: is there: they attach.
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
#: Seconds between two looks at mpirun's input.
_PAUSE = 0.2
#: Seconds that mpirun has to forward the last lines after it has read them.
_LAST = 1.0


def look(rank: int) -> str:
    """Return OPEN, ENDED or ABSENT for standard input of this process, which is `rank`."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):
        # exchanged for an object, by a notebook or a test: that reads by itself
        if hasattr(sys.stdin, "readline"):
            return OPEN
        return ABSENT if launchers.find() else _ended()
    if os.isatty(number) or Lines.rest:
        return OPEN
    launcher = launchers.find()
    if stat.S_ISCHR(mode):  # /dev/null: the shell's, or what a launcher gives the other ranks
        return ABSENT if launcher else _ended()
    if rank and launcher is HYDRA:
        return ABSENT  # a pipe that stays open, and that nothing comes through
    if _readable(number):
        return OPEN
    if _hung_up(number) or (is_pipe_of_openmpi() and _launcher_has_read_all()):
        return _ended()
    return OPEN


def _ended() -> str:
    return ABSENT if any(name in os.environ for name in _BATCH) else ENDED


def is_pipe_of_openmpi() -> bool:
    """Return whether Open MPI's mpirun forwards its input to this process through a pipe."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) and launchers.find() is OPEN_MPI


class Lines:
    """Lines of a pipe that Open MPI's mpirun fills; "" at the end of mpirun's own input.

    Parameters
    ----------
    number : int
        File descriptor of the pipe.
    """

    #: What one breakpoint has read and not used is for the next.
    rest = b""

    def __init__(self, number: int) -> None:
        self._number = number

    def readline(self) -> str:
        """Return the next line with its end, or "" at the end of input."""
        while b"\n" not in Lines.rest:
            if not self._wait() or not (piece := os.read(self._number, 65536)):
                line, Lines.rest = Lines.rest, b""
                return line.decode("utf-8", "replace")
            Lines.rest += piece
        line, _, Lines.rest = Lines.rest.partition(b"\n")
        return line.decode("utf-8", "replace") + "\n"

    def _wait(self) -> bool:
        """Wait for input; False at the end of mpirun's."""
        while not _readable(self._number, _PAUSE):
            if _hung_up(self._number):
                return False
            if _launcher_has_read_all():
                return _readable(self._number, _LAST)
        return True


def _readable(number: int, seconds: float = 0.0) -> bool:
    return any(event & select.POLLIN for event in _poll(number, seconds))


def _hung_up(number: int) -> bool:
    """Whether nobody can write into a pipe any more, and nothing is left in it."""
    events = _poll(number, 0.0)
    return bool(events) and not any(event & select.POLLIN for event in events)


def _poll(number: int, seconds: float) -> list[int]:
    """Return what has happened. Intel MPI's ranks have a socket: its end counts as readable."""
    poll = select.poll()
    poll.register(number, select.POLLIN)
    events = [event for _, event in poll.poll(seconds * 1000)]
    if events and stat.S_ISSOCK(os.fstat(number).st_mode):
        with socket.socket(fileno=os.dup(number)) as other, contextlib.suppress(OSError):
            if other.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return events
        return [select.POLLHUP]
    return events


def _launcher_has_read_all() -> bool:
    """Whether the input of the mpirun that started this process is at its end.

    False where that cannot be seen: mpirun runs on another host, or its input is a socket.
    """
    folder = f"/proc/{os.getppid()}"
    try:
        with open(f"{folder}/comm") as file:
            if file.read().strip() not in ("prterun", "mpirun", "mpiexec", "orterun"):
                return False  # the daemon of another host, whose own input says nothing
        found = os.stat(f"{folder}/fd/0")
        if stat.S_ISREG(found.st_mode):
            with open(f"{folder}/fdinfo/0") as file:
                return int(file.readline().split()[1]) >= found.st_size
        if stat.S_ISCHR(found.st_mode):
            with open(os.devnull) as null:
                return os.fstat(null.fileno()).st_rdev == found.st_rdev
        if not stat.S_ISFIFO(found.st_mode):
            return False
        if _writes_to_its_own(folder):
            return True  # it was started without an input: file 0 is a pipe for its own use
        pipe = os.open(f"{folder}/fd/0", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, IndexError):
        return False
    try:
        return _hung_up(pipe)
    finally:
        os.close(pipe)


def _writes_to_its_own(folder: str) -> bool:
    """Whether a process holds the writing end of the pipe that is its file 0."""
    pipe = os.readlink(f"{folder}/fd/0")
    for number in os.listdir(f"{folder}/fd"):
        if os.readlink(f"{folder}/fd/{number}") == pipe:
            with open(f"{folder}/fdinfo/{number}") as file:
                flags = int(file.read().split()[3], 8)
            if flags & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False
