"""A debugger on one rank while all others wait."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import types
from typing import Any

from hpcdist._buffer import limited
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_parts
from hpcdist.groups.resolve import default_group

from . import standard_input

#: Seconds, three years: a person who reads and thinks has no timeout.
_FOREVER = 1e8
#: Bytes of the path in which the folder of a socket is made: Linux takes 107 for the whole.
_LONGEST = 64

# How often each line has called breakpoint, for `skip`.
_calls: dict[tuple[str, int], int] = {}


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = None) -> None:
    """Stop one rank in the debugger, at the line that calls this; the others wait for it.

    All ranks of the default group must call it. ``continue`` lets all of them go on.

    Parameters
    ----------
    rank : int
        Rank of the world that gets the debugger.
    skip : int
        Do nothing at the first so many calls from the same line.
    timeout_s : float, optional
        Seconds after which the others give up waiting. None: they wait for ever.

    Raises
    ------
    ValueError
        If there is no such rank, or the timeout is not positive.
    DistTimeoutError
        If a rank does not arrive within the group's timeout, or the debugger takes longer than
        `timeout_s`.
    bdb.BdbQuit
        On the rank in the debugger, by ``quit``.
    DistError
        On the others, if that rank left by ``quit`` or another exception.

    Notes
    -----
    The debugger reads commands from the rank's standard input where it has one: a terminal, or what
    a launcher passes on. Open MPI's mpirun gives its own to rank 0, with ``--stdin N`` to rank N;
    MPICH's gives it to rank 0 only; srun to all. A rank without one opens a socket that only its
    user can access, and prints the command that attaches to it. The end of input counts as
    ``continue``, except in a batch job of Slurm, PBS, LSF or Flux: there the user can attach. So
    does the end of the process that attached.
    Source: ``torch.distributed.breakpoint``.
    """
    pg = default_group()
    if not 0 <= rank < pg.size():
        raise ValueError(f"rank={rank} is not in the world, which has {pg.size()} ranks")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, not {timeout_s!r}")
    frame = sys._getframe(1)
    line = (frame.f_code.co_filename, frame.f_lineno)
    _calls[line] = _calls.get(line, 0) + 1
    if _calls[line] <= skip:
        return
    debugger = None
    with refusing_parts(agreeing(pg.carrier), "breakpoint", 2):
        # all are here before one of them stops: from now on the others may wait without a limit
        pg.carrier.barrier(api="breakpoint")
        if pg.rank() == rank:
            debugger = _debug(frame, rank)
        _wait(_FOREVER if timeout_s is None else timeout_s)
    if debugger is not None and debugger.steps:
        # last, so that the next line it stops at is the caller's
        sys.settrace(debugger.trace_dispatch)


def _wait(seconds: float) -> None:
    with limited(seconds):
        default_group().carrier.barrier(api="breakpoint")


def _debug(frame: types.FrameType, rank: int) -> Any:
    """Let the user look around in a frame; the debugger, or None at the end of input."""
    state = standard_input.look(rank)
    if state == standard_input.ENDED:
        _say(rank, "standard input is at its end: going on")
        return None
    connection = _connect(rank) if state == standard_input.ABSENT else None
    if connection is None:
        lines: Any = sys.stdin
        if standard_input.is_pipe_of_openmpi():
            lines = standard_input.Lines(sys.stdin.fileno())
        debugger = _make(rank, lines, sys.stdout)
    else:
        file = connection.makefile("rw", encoding="utf-8", errors="replace")
        debugger = _make(rank, file, file)
    debugger.show(frame)
    if connection is not None and not debugger.steps:
        with contextlib.suppress(OSError):  # it is closed nevertheless
            file.close()
        connection.close()
    if debugger.quitting:
        import bdb

        raise bdb.BdbQuit
    return debugger


def _say(rank: int, text: str) -> None:
    print(f"[hpcdist rank {rank}] breakpoint: {text}", file=sys.stderr, flush=True)


def _make(rank: int, stdin: Any, stdout: Any) -> Any:
    """A pdb of this rank. The module is imported here, where a program stops to debug."""
    import pdb

    class Debugger(pdb.Pdb):
        """pdb that begins in a given frame, before it steps anywhere."""

        steps = False

        def show(self, frame: types.FrameType) -> None:
            self.reset()
            self.steps = True
            above: types.FrameType | None = frame
            while above:
                above.f_trace = self.trace_dispatch
                self.botframe = above
                above = above.f_back
            self.interaction(frame, None)

        def interaction(self, *args: Any) -> None:
            try:
                super().interaction(*args)
            except (BrokenPipeError, ConnectionResetError):
                self.forget()
                self.clear_all_breaks()
                self.set_continue()
                self.steps = False
                _say(rank, "the other end of the debugger is gone: going on")

        def do_continue(self, arg: str) -> Any:
            self.steps = bool(self.breaks)
            return super().do_continue(arg)

        do_c = do_cont = do_continue

        def do_EOF(self, arg: str) -> Any:
            """Continue at the end of input: a job must not end because its input is closed."""
            self.message("end of input: going on")
            return self.do_continue(arg)

    plain = stdin is sys.stdin and stdin.isatty()
    forwarded = stdout is sys.stdout and not plain
    debugger = Debugger(
        stdin=None if plain else stdin,
        stdout=None if plain else stdout,
        skip=["hpcdist", "hpcdist.*"],
        nosigint=True,
    )
    debugger.use_rawinput = plain
    # Open MPI's mpirun passes whole lines on: without its end the prompt would not be seen
    debugger.prompt = f"(Pdb, rank {rank}) " + ("\n" if forwarded else "")
    return debugger


def _connect(rank: int) -> socket.socket:
    """Wait until the user attaches."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _LONGEST:
        base = "/tmp"
    folder = tempfile.mkdtemp(prefix="hpcdist-breakpoint-", dir=base)  # for its owner alone
    path = os.path.join(folder, f"rank{rank}")
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(1)
            _say(
                rank,
                f"this rank has no input of its own. Attach on {socket.gethostname()} with: "
                f"python -m hpcdist attach {path}",
            )
            return server.accept()[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
