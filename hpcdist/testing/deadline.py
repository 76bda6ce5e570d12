"""The deadline of a test: every rank's stacks, then the end of the job."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
import types
from typing import Any

from hpcdist import launchers

#: Exit code of a process that its deadline ended, as of coreutils' ``timeout``.
EXIT_CODE = 124

# After its stacks a rank waits this long before it ends the job: deadlines of other ranks began a
# little later, and their stacks matter too.
_GRACE = 2.0
# When the thread below cannot run because native code holds the GIL, faulthandler's own C thread
# writes the stacks this long after the deadline and ends the process. Less than _GRACE: another
# rank's end of the job must not come first.
_NATIVE_AFTER = 1.0

# Frames that every stack under pytest begins with.
_HIDDEN = (f"{os.sep}_pytest{os.sep}", f"{os.sep}pluggy{os.sep}", "pytest/__main__", "<frozen")

_lock = threading.RLock()  # a signal handler may set a deadline too
_running: list[deadline] = []


class deadline(contextlib.ContextDecorator):
    """End the whole job when a block takes too long, after showing where each rank is.

    When the time is over, the Python stacks of all threads are written with the rank in front of
    each line, and two seconds later the process ends with exit code 124, which makes the launcher
    end the job. Each rank runs its own deadline, so enter it on all of them: then all show their
    stacks. It also works while the main thread is stuck in native code; if that code holds the GIL
    the stacks come a second later, without line prefixes (the rank is the name of a function in
    them), and the exit code is 1.

    Parameters
    ----------
    seconds : float
        How long the block may take.
    what : str
        What it is, for the report.
    file : int, optional
        File descriptor to write to; by default that of the standard error the process began with.
        Under pytest, give a duplicate made before pytest captures output, or use ``pytest -s``.

    Examples
    --------
    >>> with deadline(60, "two rounds of all_to_all"):
    ...     check()

    It can be a decorator too: ``@deadline(60)``.

    Notes
    -----
    Not collective. Deadlines nest; the native fallback follows the nearest one. It uses
    ``faulthandler.dump_traceback_later``, of which Python has only one: do not use that inside.
    Source: hpcdist; ucxx and pytest-timeout dump the stacks of one process.
    """

    def __init__(self, seconds: float, what: str = "", file: int | None = None) -> None:
        if not seconds > 0:
            raise ValueError(f"a deadline needs a positive number of seconds, not {seconds!r}")
        self.seconds = float(seconds)
        self.what = what
        self.file = file
        self._over = threading.Event()
        self._expires = 0.0

    def _recreate_cm(self) -> deadline:
        return type(self)(self.seconds, self.what, self.file)

    def __enter__(self) -> deadline:
        self._over.clear()
        self._expires = time.monotonic() + self.seconds
        with _lock:
            _running.append(self)
            _arm_native()
        name = f"deadline_of_{self.seconds:g}_s_on_{_rank_text().replace(' ', '_')}"
        watch = _named(_watch, name.replace(".", "_"))
        thread = threading.Thread(target=watch, args=(self,), name=name, daemon=True)
        thread.calls_no_operation = True  # type: ignore[attr-defined]  # for the engine
        thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        with _lock:
            _running.remove(self)
            _arm_native()


def _watch(mine: deadline) -> None:
    """Body of the thread behind one deadline."""
    if mine._over.wait(mine.seconds):
        return
    faulthandler.cancel_dump_traceback_later()
    fd = _descriptor(mine.file)
    _write(fd, _report(mine))
    # Should the GIL not come back from here on, the C thread still ends the process.
    faulthandler.dump_traceback_later(_GRACE + _NATIVE_AFTER, exit=True, file=fd)
    time.sleep(_GRACE)
    _end_job()


def _named(function: Any, name: str) -> Any:
    """Return a function whose frames carry another name: faulthandler prints nothing else of ours.

    That is how a stack written without the GIL tells its rank.
    """
    code = function.__code__.replace(co_name=name)
    if hasattr(code, "co_qualname"):
        code = code.replace(co_qualname=name)
    return types.FunctionType(code, function.__globals__, name)


def _arm_native() -> None:
    """Point the one native timer at the nearest deadline; the caller holds the lock."""
    if not _running:
        faulthandler.cancel_dump_traceback_later()
        return
    nearest = min(_running, key=lambda each: each._expires)
    left = max(0.1, nearest._expires - time.monotonic()) + _NATIVE_AFTER
    fd = _descriptor(nearest.file)
    try:
        faulthandler.dump_traceback_later(left, exit=True, file=fd)
    except OSError:  # no standard error at all; the Python thread still ends the job
        faulthandler.cancel_dump_traceback_later()


def _descriptor(file: int | None) -> int:
    return 2 if file is None else file


def _rank_text() -> str:
    """Return ``rank 1 of 4`` from MPI if it is up, else from the launcher's variables."""
    engine = sys.modules.get("hpcdist._engine")
    if engine is not None and engine.mpi_state() == "up":
        rank, size = engine.world_rank_size()
        return f"rank {rank} of {size}"
    try:
        launch = launchers.detect()
    except ValueError:
        launch = None
    if launch is None or launch.rank is None:
        return f"process {os.getpid()}"
    return f"rank {launch.rank}" + (f" of {launch.size}" if launch.size is not None else "")


def _report(mine: deadline) -> str:
    """Return the stacks of all threads but the calling one, the rank before each line."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    own = threading.get_ident()
    main = threading.main_thread().ident
    what = f" ({mine.what})" if mine.what else ""
    lines = [f"the deadline of {mine.seconds:g} s has passed{what}; stacks of all threads:"]
    frames = sys._current_frames()
    for ident in sorted(frames, key=lambda each: each != main):
        thread = threads.get(ident)
        if ident == own or (thread is not None and thread.name.startswith("deadline_of_")):
            continue
        lines.append(f"thread {thread.name if thread is not None else ident}:")
        lines += _stack(frames[ident])
    prefix = f"[{_rank_text()}] "
    return "\n" + "".join(f"{prefix}{line}\n" for line in lines)


def _stack(frame: types.FrameType) -> list[str]:
    """Return a stack's lines, outermost first, without those of pytest itself."""
    stack = traceback.extract_stack(frame)
    shown = [each for each in stack if not any(part in each.filename for part in _HIDDEN)]
    return "".join(traceback.format_list(shown or stack)).splitlines()


def _write(fd: int, text: str) -> None:
    """Write as much as the descriptor takes, in one piece so that ranks do not mix lines."""
    data = text.encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def _end_job() -> None:
    """End the job through MPI where it is up, for launchers that wait for the others otherwise."""
    engine = sys.modules.get("hpcdist._engine")
    if engine is not None and engine.mpi_state() == "up":
        engine.abort(EXIT_CODE, "")
    os._exit(EXIT_CODE)
