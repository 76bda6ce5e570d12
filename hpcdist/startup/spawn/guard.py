"""Ends the processes of a spawn whose parent has gone: killed, or ended without ``join()``.

    python -IS guard.py PARENT FOLDER PID...

A process of its own, because the launcher lies between the parent and the ranks. The kernel's
signal at a parent's death (PR_SET_PDEATHSIG) comes already when the thread ends that started a
process.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

#: Seconds between looks at the parent; that the processes have to end after SIGTERM.
TICK, GRACE = 0.25, 5.0


class Processes:
    """Processes that this one has not started.

    Parameters
    ----------
    pids : list of int
        Of processes that run, or have just ended.
    """

    def __init__(self, pids: list[int]) -> None:
        self._ends = select.poll()
        self._pids: dict[int, int] = {}  # by a descriptor that tells of its end
        self._unseen: list[int] = []  # where there are none, as in some containers
        for pid in pids:
            try:
                self._pids[end := os.pidfd_open(pid)] = pid
                self._ends.register(end, select.POLLIN)
            except ProcessLookupError:
                continue
            except OSError:
                self._unseen.append(pid)

    def wait(self, seconds: float) -> bool:
        """Wait until one ends, for so long at most; return whether any is left."""
        for end, _ in self._ends.poll(1000 * seconds):
            self._ends.unregister(end)
            del self._pids[end]
            os.close(end)
        self._unseen = [pid for pid in self._unseen if os.path.exists(f"/proc/{pid}")]
        return bool(self._pids or self._unseen)

    def send(self, number: signal.Signals) -> None:
        """Send all that are left a signal."""
        for end in self._pids:
            try:
                signal.pidfd_send_signal(end, number)
            except ProcessLookupError:
                continue
        for pid in self._unseen:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def main() -> None:
    """Entry point."""
    parent, folder, *pids = sys.argv[1:]
    processes = Processes(list(map(int, pids)))
    while os.getppid() == int(parent):
        if not processes.wait(TICK):
            return
    for number in (signal.SIGTERM, signal.SIGKILL):
        processes.send(number)
        end = time.monotonic() + GRACE
        while processes.wait(TICK) and time.monotonic() < end:
            pass
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
