"""The processes of one spawn: wait for them, end them, raise what they raised."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from hpcdist.errors import DistError

from . import guard

#: Seconds that the others have to end by themselves after one failed; again after SIGTERM.
GRACE = 5.0


class ProcessException(DistError):
    """A process of :func:`hpcdist.spawn` failed.

    Parameters
    ----------
    msg : str
        What happened.
    error_index : int
        Its rank; -1 if only the launcher's status reports it.
    error_pid : int
        Its process id; the launcher's if the rank is not known.
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> Any:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """The function raised: its traceback is in the message, the exception is the cause."""


class ProcessExitedException(ProcessException):
    """A process ended by a signal or with an exit status, without an exception.

    Parameters
    ----------
    msg, error_index, error_pid
        As for :class:`ProcessException`.
    exit_code : int
        Its status; for a signal, minus the signal's number.
    """

    def __init__(self, msg: str, error_index: int, error_pid: int, exit_code: int) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code

    @property
    def signal_name(self) -> str | None:
        """The signal's name, or None."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None

    def __reduce__(self) -> Any:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code)


class ProcessContext:
    """The processes that one :func:`hpcdist.spawn` started.

    Parameters
    ----------
    processes : list of subprocess.Popen
        One for each rank, or the launcher alone.
    folder : pathlib.Path
        Where the processes record how they ended; it is deleted with them.
    nprocs : int
        Number of ranks.
    blind : bool
        The launcher's status may be 0 after any failure: mpirun's of a job that goes on after a
        death.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[Any]],
        folder: Path,
        nprocs: int,
        blind: bool = False,
    ) -> None:
        self.processes = list(processes)
        self.folder = folder
        self.nprocs = nprocs
        self._blind = blind
        self._launched = len(processes) == 1 and nprocs > 1
        self._printers = [
            threading.Thread(target=_print, args=(rank, stream, out), daemon=True)
            for rank, process in enumerate(processes)
            for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            if stream is not None
        ]
        for printer in self._printers:
            printer.start()
        try:
            self._guard = self._guarded()
        except BaseException:
            self.end(0.0)
            raise

    def pids(self) -> list[int]:
        """Process ids: of each rank, or of the launcher.

        Returns
        -------
        list of int
            In the order of the ranks.
        """
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all have ended, or one has failed; then end the others and raise.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None waits for ever.
        grace_period : float, optional
            Seconds that the others have to end by themselves, and then again after SIGTERM. None
            means 5.

        Returns
        -------
        bool
            False if some still run after `timeout`.

        Raises
        ------
        ProcessRaisedException
            If the function raised on a rank. It is the first exception that does not merely report
            another rank's failure.
        ProcessExitedException
            If a process ended with an exit status or by a signal.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.01
        try:
            while True:
                codes = [process.poll() for process in self.processes]
                if any(codes):
                    self.end(GRACE if grace_period is None else grace_period, signal.SIGTERM)
                    self._raise()
                if None not in codes:
                    self._judge()
                    break
                if end is not None and time.monotonic() >= end:
                    return False
                time.sleep(pause)
                pause = min(pause * 1.5, 0.1)
        except KeyboardInterrupt:
            self.end(0.0, signal.SIGINT)
            raise
        finally:
            if all(process.poll() is not None for process in self.processes):
                self._clean()
        return True

    def end(self, grace: float, how: signal.Signals = signal.SIGTERM) -> None:
        """End the processes that still run: after `grace` seconds by a signal, later by SIGKILL.

        Parameters
        ----------
        grace : float
            Seconds to wait before the signal.
        how : signal.Signals
            The first signal.
        """
        for step, number in ((grace, how), (max(grace, GRACE), signal.SIGKILL), (GRACE, None)):
            until = time.monotonic() + step
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
            for process in self.processes:
                if number is not None and process.poll() is None:
                    process.send_signal(number)

    def _guarded(self) -> subprocess.Popen[Any]:
        """Start what ends the processes if this one cannot."""
        command = [sys.executable, "-IS", guard.__file__, str(os.getpid()), str(self.folder)]
        return subprocess.Popen(
            [*command, *map(str, self.pids())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the parent's
        )

    def _clean(self) -> None:
        for printer in self._printers:
            printer.join(1.0)  # longer only if a grandchild keeps the pipe open
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(1.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _judge(self) -> None:
        """Raise if the ranks' words contradict the launcher's status, which is 0.

        Open MPI's mpirun ends with 0 once a death was to be survived, whatever else fails.
        """
        if any(self.folder.glob("error.*")) or any(self.folder.glob("exit.*")):
            self._raise()
        if self._blind and not any(self.folder.glob("well.*")):
            text = "no rank returned from the function or raised: see the launcher's output"
            raise ProcessExitedException(text, -1, self.processes[0].pid, 1)

    def _raise(self) -> None:
        errors = [json.loads(path.read_text()) for path in self.folder.glob("error.*")]
        left = [json.loads(path.read_text()) for path in self.folder.glob("exit.*")]
        # what a rank raises because another failed is not the cause
        own = [error for error in errors if error["type"] != "RankFailedError"]
        if own or (errors and not left):
            first = min(own or errors, key=lambda error: error["time"])
            cause = None
            with contextlib.suppress(Exception):
                path = self.folder / f"exception.{first['rank']}"
                cause = pickle.loads(path.read_bytes())
            raise ProcessRaisedException(
                f"\n\n-- Process {first['rank']} terminated with the following error:\n"
                + first["traceback"],
                first["rank"],
                first["pid"],
            ) from cause
        if left:
            rank, pid, code = (left[0][name] for name in ("rank", "pid", "code"))
            text = f"process {rank} terminated with exit code {code}"
            raise ProcessExitedException(text, rank, pid, code)
        codes = [process.returncode for process in self.processes]
        # a rank that exited because another died (71), or that we ended, is not the cause
        index = min(
            (i for i, code in enumerate(codes) if code),
            key=lambda i: codes[i] in (71, -signal.SIGTERM),
        )
        code, pid = codes[index], self.processes[index].pid
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._launched:
            text = f"the launcher ended with {how}, and no rank raised an exception: see its output"
            raise ProcessExitedException(text, -1, pid, code)
        raise ProcessExitedException(f"process {index} terminated with {how}", index, pid, code)


def _print(rank: int, stream: IO[bytes], out: Any) -> None:
    """Forward a rank's output line by line, with the rank as prefix in hydra's format."""
    with stream:
        for line in stream:
            text = line.decode("utf-8", "replace")
            with contextlib.suppress(OSError, ValueError):
                out.write(f"[{rank}] {text}" + ("" if text.endswith("\n") else os.linesep))
                out.flush()
