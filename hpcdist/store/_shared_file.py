"""The file behind a FileStore: membership, reading what others wrote, writing a record."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hpcdist.errors import DistStoreError, StoreTimeoutError
from hpcdist.log import get_logger

from . import _files as files
from . import _journal as journal
from . import _locks as locks
from ._common import Deadline
from ._table import Table

__all__ = ["SharedFile"]

_NFS_TYPES = ("nfs", "nfs4")
_log = get_logger("store")

#: Open files of this process: a child of fork has to close them, or their locks outlive us.
_open_files: weakref.WeakSet[SharedFile] = weakref.WeakSet()


def _in_child() -> None:
    for each in list(_open_files):
        each._drop_in_child()


os.register_at_fork(after_in_child=_in_child)


class SharedFile:
    """One member's view of a store's file.

    Parameters
    ----------
    path : str
        The file; its folder has to exist.
    world_size : int
        Number of members, -1 if it is not fixed.
    job : bytes
        From :func:`hpcdist.store._journal.job_digest`.
    deadline : Deadline
        Until when this process must have joined.
    limit : int
        Bytes the file may grow to.
    """

    def __init__(
        self, path: str, world_size: int, job: bytes, deadline: Deadline, limit: int
    ) -> None:
        self.path = path
        self.table = Table()
        self.mutex = locks.ThreadLock(path)
        self._world_size = world_size
        self._job = job
        self._limit = limit
        self._fd = -1
        self._pid = os.getpid()
        self._members: dict[str, str] = {}
        self._opened = 0
        self._closed = 0
        self._id = os.urandom(8).hex()
        self._offset = journal.HEADER_SIZE
        self._join(deadline)
        self._always_lock = files.file_system(path) in _NFS_TYPES
        _open_files.add(self)
        self._finalizer = weakref.finalize(self, _leave, self._state())

    # --- joining and leaving ---------------------------------------------------------------------

    def _join(self, deadline: Deadline) -> None:
        nap = 0.001
        while True:
            self._fd = files.open_private(self.path)
            try:
                if self._try_join(deadline):
                    return
            except BaseException:
                self._close_fd()
                raise
            self._close_fd()
            if deadline.expired():
                raise StoreTimeoutError(
                    f"FileStore {self.path}: {self._opened} members have joined a store of "
                    f"{self._header.world_size} and some are still there after "
                    f"{round(deadline.seconds * 1000)}ms: {self._member_text()}. If they belong to "
                    "another job, give this one a file of its own"
                )
            time.sleep(min(nap, deadline.left()))
            nap = min(2 * nap, 0.05)

    def _try_join(self, deadline: Deadline) -> bool:
        """Become a member, unless the file is going away or is still full of others."""
        locks.lock(self._fd, locks.MAIN, deadline, self.path)
        try:
            own = os.fstat(self._fd)
            try:
                named = os.stat(self.path, follow_symlinks=False)
            except FileNotFoundError:
                return False
            if (own.st_dev, own.st_ino) != (named.st_dev, named.st_ino):
                return False
            try:
                header = journal.Header.unpack(os.pread(self._fd, journal.HEADER_SIZE, 0))
            except DistStoreError as error:
                raise DistStoreError(
                    f"FileStore {self.path}: {error}; give the store a name of its own"
                ) from None
            # Every live member has this one shared; the kernel releases it for a process that dies.
            alone = locks.try_lock(self._fd, locks.ALIVE)
            if header is None:
                if not alone:
                    raise DistStoreError(f"FileStore {self.path}: its header is damaged")
                self._start()
            else:
                self._header = header
                self._forget()
                self._read_all()
                if alone:
                    self._judge()
                elif not self._may_join():
                    return False
            self._append([(journal.OPEN, self._id, self._host().encode())])
            if not locks.try_lock(self._fd, locks.ALIVE, shared=True):
                raise DistStoreError(f"FileStore {self.path}: a lock was taken away")
            return True
        finally:
            locks.unlock(self._fd, locks.MAIN)

    def _start(self) -> None:
        """Start the file over, empty."""
        header = journal.Header.new(self._job, self._world_size)
        try:
            os.ftruncate(self._fd, 0)
            files.write_all(self._fd, header.pack(), 0)
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed("it cannot be begun", error) from error
        files.sync_folder(self.path)
        self._header = header
        self._forget()

    def _forget(self) -> None:
        self.table = Table()
        self._members.clear()
        self._opened = self._closed = 0
        self._offset = journal.HEADER_SIZE

    def _judge(self) -> None:
        """Keep the contents of a file that no other process has open, unless they are stale."""
        reason = ""
        if self._members:
            reason = f"its members are gone without leaving it: {self._member_text()}"
        elif self._header.job != self._job:
            reason = "it is of another job"
        elif self._header.world_size != self._world_size:
            reason = f"it was made for world_size={self._header.world_size}"
        elif 0 < self._world_size <= self._opened:
            reason = "all its members have left it"
        if reason:
            _log.warning("FileStore %s is left over, so it starts empty: %s", self.path, reason)
            self._start()

    def _may_join(self) -> bool:
        """Return whether to join the members, or (False) to wait until they have left; or raise."""
        if self._header.job != self._job:
            raise DistStoreError(
                f"FileStore {self.path}: another job uses it ({self._member_text()}); give this "
                "job a file of its own"
            )
        if 0 < self._header.world_size <= self._opened:
            return self._host() in self._members.values()  # opened again, as torch allows
        if self._header.world_size != self._world_size:
            raise DistStoreError(
                f"FileStore {self.path}: this process says world_size={self._world_size}, those "
                f"that have joined said {self._header.world_size} ({self._member_text()})"
            )
        return True

    @staticmethod
    def _host() -> str:
        """Return the name of this process in the list of members."""
        return f"{socket.gethostname()}:{os.getpid()}"

    def _member_text(self) -> str:
        names = sorted(self._members.values())
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def _state(self) -> Callable[[], None]:
        """Return a function that leaves the store; it must not keep this object alive."""
        fd, path, me, pid = self._fd, self.path, self._id, self._pid
        header, job, size = self._header, self._job, self._world_size

        def leave() -> None:
            if os.getpid() != pid:
                return
            last = SharedFile.__new__(SharedFile)
            last.path, last._fd, last._header, last._id = path, fd, header, me
            last._job, last._world_size, last._limit = job, size, 1 << 62
            last._members, last.mutex = {}, locks.ThreadLock(path)
            last._forget()
            last._leave()

        return leave

    def close(self) -> None:
        """Leave the store; the last member of a fixed number deletes the file."""
        with self.mutex:
            self._finalizer()
            self._fd = -1

    def _leave(self) -> None:
        try:
            locks.lock(self._fd, locks.MAIN, Deadline(2.0), self.path)
            self._read_all()
            self._append([(journal.CLOSE, self._id, b"")])
            if 0 < self._world_size <= self._opened and not self._members:
                named = os.stat(self.path, follow_symlinks=False)
                if named.st_ino == os.fstat(self._fd).st_ino:
                    os.unlink(self.path)
        except (DistStoreError, OSError) as error:
            # Not worth an exception at exit: the next job finds no live member, and starts over.
            _log.info("FileStore %s was not left in order: %s", self.path, error)
        finally:
            self._close_fd()

    def _close_fd(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def _drop_in_child(self) -> None:
        # The locks belong to the open file, which parent and child would share.
        if self._fd >= 0:
            self._close_fd()
        self._finalizer.detach()
        self.mutex = locks.ThreadLock(self.path)

    # --- reading and writing ---------------------------------------------------------------------

    def use(self) -> None:
        """Raise in a closed store and in a forked child."""
        if self._pid != os.getpid():
            raise DistStoreError(
                f"this FileStore was opened by process {self._pid}, and this is a child of it: "
                f"open FileStore({self.path!r}) again here"
            )
        if self._fd < 0:
            raise DistStoreError(f"FileStore {self.path}: it is closed")

    @contextmanager
    def exclusive(self, deadline: Deadline) -> Iterator[Table]:
        """Lock the file and yield its up-to-date contents, which no other process can change."""
        if not self.mutex.acquire(timeout=deadline.left() + 0.001):
            raise StoreTimeoutError(
                f"FileStore {self.path}: another thread of this process kept it for "
                f"{round(deadline.seconds * 1000)}ms"
            )
        try:
            self.use()
            try:
                locks.lock(self._fd, locks.MAIN, deadline, self.path)
            except BaseException:  # a signal handler's may come when it has just been taken
                with suppress(OSError):
                    locks.unlock(self._fd, locks.MAIN)
                raise
            try:
                self._same_file()
                self._read_all()
                yield self.table
            finally:
                locks.unlock(self._fd, locks.MAIN)
        finally:
            self.mutex.release()

    def refresh(self, deadline: Deadline) -> Table:
        """Read what is new. The caller has the mutex.

        Whole records are valid even without a lock. Over NFS it takes a lock to see what other
        computers wrote.
        """
        self.use()
        if self._always_lock:
            locks.lock(self._fd, locks.MAIN, deadline, self.path, shared=True)
            try:
                self._read()
            finally:
                locks.unlock(self._fd, locks.MAIN)
        else:
            self._read()
        return self.table

    def _same_file(self) -> None:
        """Check that no other job restarted the file: over NFS a machine can lose its locks."""
        if os.pread(self._fd, journal.HEADER_SIZE, 0) != self._header.pack():
            raise DistStoreError(
                f"FileStore {self.path}: another job emptied the file while this "
                "process was in it (its locks were lost, or somebody wrote into the file)"
            )

    def _read(self) -> bytes:
        """Apply all whole records; returns the bytes behind them."""
        size = os.fstat(self._fd).st_size
        if size <= self._offset:
            return b""
        data = files.read_all(self._fd, size - self._offset, self._offset)
        entries, used = journal.records(self._header.nonce, self._offset, data)
        self._take(entries, used)
        return data[used:]

    def _read_all(self) -> None:
        """Apply all records with the lock held; a torn one at the end is cut off."""
        rest = self._read()
        if not rest:
            return
        beyond = journal.scan(self._header.nonce, self._offset, rest)
        if beyond >= 0:
            raise DistStoreError(
                f"FileStore {self.path}: the file is damaged: bytes {self._offset} to {beyond} "
                "are no record, but records follow. Its contents cannot be trusted; delete it"
            )
        _log.warning(
            "FileStore %s: %d bytes of a torn record are cut off; its writer was killed before "
            "the call returned", self.path, len(rest),
        )  # fmt: skip
        os.ftruncate(self._fd, self._offset)

    def write(self, entries: Sequence[journal.Entry]) -> None:
        """Write one record; inside :meth:`exclusive` only. When it returns, it is on the disk."""
        self._append(entries)

    def _append(self, entries: Sequence[journal.Entry]) -> None:
        data = journal.encode(self._header.nonce, self._offset, entries)
        if self._offset + len(data) > self._limit:
            raise DistStoreError(
                f"FileStore {self.path}: with {len(data)} bytes more it would pass the limit of "
                f"{self._limit} bytes; HPCDIST_STORE_LIMIT raises it"
            )
        try:
            files.write_all(self._fd, data, self._offset)
            os.fdatasync(self._fd)
        except BaseException as error:
            with suppress(OSError):  # else torn, and cut off by the next writer
                os.ftruncate(self._fd, self._offset)
            if isinstance(error, OSError):
                raise self._failed(f"{len(data)} bytes cannot be written", error) from error
            raise
        self._take(entries, len(data))

    def _failed(self, what: str, error: OSError) -> DistStoreError:
        return DistStoreError(f"FileStore {self.path}: {what}: {error.strerror}")

    def _take(self, entries: Iterable[journal.Entry], length: int) -> None:
        """Apply entries that fill `length` bytes; after an exception the next read starts over."""
        try:
            for entry in entries:
                self._apply(entry)
            self._offset += length
        except BaseException:  # of a signal handler
            self._forget()
            raise

    def _apply(self, entry: journal.Entry) -> None:
        kind, key, value = entry
        table = self.table
        if kind == journal.SET:
            table.values[key] = value
        elif kind == journal.DELETE:
            table.values.pop(key, None)
        elif kind == journal.TAIL:
            table.values[key] = table.values.get(key, b"") + value
        elif kind == journal.PUSH:
            table.push(key, value)
        elif kind == journal.POP:
            table.pop(key)
        elif kind == journal.ARRIVE:
            table.arrive(key, int(value))
        elif kind == journal.LEAVE:
            table.leave(key)
        elif kind == journal.OPEN:
            self._members[key] = value.decode("utf-8", "replace")
            self._opened += 1
        elif kind == journal.CLOSE:
            self._members.pop(key, None)
            self._closed += 1
        else:
            raise DistStoreError(
                f"FileStore {self.path}: a record of unknown kind {kind}: the file was written by "
                "a newer hpcdist"
            )


def _leave(state: Callable[[], None]) -> None:
    state()
