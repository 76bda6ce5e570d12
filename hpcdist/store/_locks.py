"""Locks on a file that other processes and other computers respect, with a deadline.

They belong to the open file, not to the process (``F_OFD_SETLK``): two stores of one process do not
share them, and closing another descriptor of the same file does not drop them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading

from hpcdist.errors import DistStoreError, StoreTimeoutError

from ._common import Deadline

#: Locked while a process writes, or reads before it writes: one byte, far behind any contents.
MAIN = 1 << 62
#: Each live member has a shared lock on this byte.
ALIVE = MAIN + 1

_FLOCK = struct.Struct("hhqqi4x")
_BUSY = (errno.EAGAIN, errno.EACCES)


class ThreadLock:
    """A lock between a store's threads; in a signal handler of the thread that has it, an error.

    There the file's contents are half read or half written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.RLock()
        #: Gives it back. Not a function of Python's, at whose beginning a signal handler may raise.
        self.release = self._lock.release

    def acquire(self, timeout: float = -1) -> bool:
        """Take it within that many seconds, and return whether that was possible."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise DistStoreError(
                f"FileStore {self._path}: a signal handler used it while this thread was in "
                "another operation of it. Set a flag in the handler and look at it later, or open "
                "the store once more for the handler"
            )
        try:
            return self._lock.acquire(timeout=timeout)
        except BaseException:  # of a signal handler, maybe when it has just been taken
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()
            raise

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _flock(kind: int, place: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0)


def try_lock(fd: int, place: int, shared: bool = False) -> bool:
    """Take a lock if it is free.

    Parameters
    ----------
    fd : int
        The open file.
    place : int
        ``MAIN`` or ``ALIVE``.
    shared : bool
        Whether other processes may have it at the same time.

    Returns
    -------
    bool
        Whether it was taken.

    Raises
    ------
    OSError
        If the file system has no locks.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind, place))
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def unlock(fd: int, place: int) -> None:
    """Release a lock.

    Parameters
    ----------
    fd : int
        The open file.
    place : int
        ``MAIN`` or ``ALIVE``.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, place))


def lock(fd: int, path: str, deadline: Deadline, shared: bool = False) -> bool:
    """Take ``MAIN`` if it is free, and return whether it was.

    Parameters
    ----------
    fd, shared
        As for :func:`try_lock`.
    path : str
        The file's, for errors.
    deadline : Deadline
        Until when the caller tries.

    Raises
    ------
    StoreTimeoutError
        If it is not free at the end of that time.
    DistStoreError
        If the file system has no locks.
    """
    try:
        if try_lock(fd, MAIN, shared):
            return True
    except OSError as error:
        if error.errno is None:  # a signal handler's
            raise
        raise DistStoreError(
            f"FileStore {path}: its file system has no locks ({error.strerror}). Put the file "
            "on one that does: a local disk, /dev/shm, NFS 4, or Lustre mounted with -o flock"
        ) from error
    if deadline.expired():
        raise StoreTimeoutError(
            f"FileStore {path}: its lock was not free within {round(deadline.seconds * 1000)}ms. "
            "A process that is stopped or hangs in a write has the lock; end that process"
        )
    return False
