"""Each row in a process of its own: a crash, a hang or a CUDA error ends that row only."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from gpu_table import JobFailed, NotRehearsed

#: Lines of a row's output that are shown if it fails.
TAIL = 25
#: Seconds in which the processes of a row must be gone once they have been told to end.
PATIENCE = 3.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """Become the parent of whatever a row leaves behind, so that it can be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """The processes that this one started, and those that these started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.parent.name)] = int(parent)
    found, level = [], {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += level
    return found


def end_all() -> None:
    """End every descendant: with SIGTERM, which lets mpirun tidy up, then with SIGKILL."""
    until = time.monotonic() + PATIENCE
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        while descendants() and time.monotonic() < until:
            _reap()
            time.sleep(0.05)
        until = time.monotonic() + PATIENCE
    _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _work(function: Callable[[], str], log: Path, pipe: int) -> None:
    """The child: run the function, and write how it ended into the pipe."""
    os.setsid()  # Ctrl-C is the parent's affair
    # what the parent raises on these must not happen here
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        status, said = "ok", function()
    except NotRehearsed as why:
        status, said = "not rehearsed", str(why)
    except JobFailed as error:
        status, said = "failed", str(error)
    except BaseException as error:
        traceback.print_exc()
        status, said = "failed", f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(pipe, json.dumps([status, said[-60_000:]]).encode())


def isolated(function: Callable[[], str], log: Path, limit: float) -> tuple[str, str]:
    """Run a function in a child of this process, and end all that it leaves running.

    The child is forked, because importing torch again for each row would take seconds; this
    process must not have used CUDA.

    Returns
    -------
    status, result : str
        The status is "ok", "not rehearsed", "failed", "crashed" or "hung".
    """
    log.touch()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            _work(function, log, writing)
        finally:
            os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    said, code = b"", None
    until = time.monotonic() + limit
    try:
        while code is None and time.monotonic() < until:
            said += _read(reading)  # also while it runs: a pipe holds 64 KiB
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.02)
        said += _read(reading)
        if code is None:
            os.kill(child, signal.SIGUSR1)  # its stacks go into the log
            time.sleep(0.5)
            return "hung", f"not done after {limit:.0f} s"
    finally:
        os.close(reading)
        end_all()
    if said:
        status, result = json.loads(said)
        return status, result
    return "crashed", signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


def tail(log: Path, begin: int = 0) -> list[str]:
    """The last lines of what was added to a file from there on."""
    return log.read_bytes()[begin:].decode(errors="replace").splitlines()[-TAIL:]
