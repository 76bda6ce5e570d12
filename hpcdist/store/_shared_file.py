"""The file behind a FileStore: membership, reading what others wrote, writing a record."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hpcdist.errors import DistStoreError, StoreTimeoutError
from hpcdist.log import get_logger

from . import _files as files
from . import _journal as journal
from . import _locks as locks
from ._common import Deadline
from ._contents import Contents, this_process
from ._table import Table

_NFS_TYPES = ("nfs", "nfs4")
#: Seconds that a reader waits, beyond its deadline, for a thread that is just writing.
_PATIENCE = 0.5
#: Seconds that leaving may wait for the file's lock, and then for a thread that is just writing.
_LEAVING = 2.0
#: Seconds between two attempts to take the file's lock.
_LONGEST_NAP = 0.005
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
    since : float
        Whoever opens it since this time, of ``time.time``, uses it together; what members have left
        before is stale. 0: that is kept for later ones.
    """

    _always_lock = False

    def __init__(
        self, path: str, world_size: int, job: bytes, deadline: Deadline, limit: int, since: float
    ) -> None:
        self.path = path
        self._contents = Contents()
        self.mutex = locks.ThreadLock(path)
        self._world_size = world_size
        self._job = job
        self._limit = limit
        self._since = since
        self._fd = -1
        self._pid = os.getpid()
        self.id = os.urandom(8).hex()
        #: Written by the next call that changes anything: what an exception kept from being so.
        self.owed: list[journal.Entry] = []
        self._offset = journal.HEADER_SIZE
        self._join(deadline)
        self._always_lock = files.file_system(self._fd) in _NFS_TYPES
        _open_files.add(self)

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
            if deadline.expired() and not self._contents.opened:
                raise StoreTimeoutError(
                    f"FileStore {self.path}: the file was deleted while it was opened, again and "
                    f"again for {round(deadline.seconds * 1000)}ms"
                )
            if deadline.expired():
                raise StoreTimeoutError(
                    f"FileStore {self.path}: {self._contents.opened} members have joined a store "
                    f"of {self._header.world_size} and some are still there after "
                    f"{round(deadline.seconds * 1000)}ms: {self._contents.names()}. If they "
                    "belong to another job, give this one a file of its own"
                )
            time.sleep(min(nap, deadline.left()))
            nap = min(2 * nap, 0.05)

    def _try_join(self, deadline: Deadline) -> bool:
        """Become a member, unless the file is going away or is still full of others."""
        with self._locked(deadline):
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
            self.write([(journal.OPEN, self.id, this_process().encode())])
            if not locks.try_lock(self._fd, locks.ALIVE, shared=True):
                raise DistStoreError(f"FileStore {self.path}: a lock was taken away")
            return True

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
        self._contents = Contents()
        self._offset = journal.HEADER_SIZE

    def _judge(self) -> None:
        """Keep the contents of a file that no other process has open, unless they are stale."""
        reason = ""
        if self._contents.members:
            reason = f"its members are gone without leaving it: {self._contents.names()}"
        elif self._header.job != self._job:
            reason = "it is of another job"
        elif self._header.world_size != self._world_size:
            reason = f"it was made for world_size={self._header.world_size}"
        elif 0 < self._world_size <= self._contents.opened:
            reason = "all its members have left it"
        elif self._contents.opened and os.fstat(self._fd).st_mtime < self._since:
            reason = "others have left it before this process began"
        if reason:
            _log.warning("FileStore %s is left over, so it starts empty: %s", self.path, reason)
            self._start()

    def _may_join(self) -> bool:
        """Return whether to join the members, or (False) to wait until they have left; or raise."""
        if self._header.job != self._job:
            raise DistStoreError(
                f"FileStore {self.path}: another job uses it ({self._contents.names()}); give this "
                "job a file of its own"
            )
        if 0 < self._header.world_size <= self._contents.opened:
            # opened again, as torch allows
            return this_process() in self._contents.members.values()
        if self._header.world_size != self._world_size:
            raise DistStoreError(
                f"FileStore {self.path}: this process says world_size={self._world_size}, those "
                f"that have joined said {self._header.world_size} ({self._contents.names()})"
            )
        return True

    def close(self) -> None:
        """Leave the store; the last member of a fixed number deletes the file."""
        with self.mutex:  # not in a signal handler that interrupted an operation
            pass
        self.leave()

    def leave(self) -> None:
        """Leave the store, unless that takes long: the process may be at its end."""
        if self._pid != os.getpid() or self._fd < 0:
            return
        try:
            with self.exclusive(Deadline(_LEAVING)):
                self._say_goodbye()
        except (DistStoreError, OSError) as error:
            # Not worth an exception at exit: the next job finds no live member, and starts over.
            _log.info("FileStore %s was not left in order: %s", self.path, error)
        finally:  # an open file would count as a live member
            with suppress(DistStoreError):  # in a signal handler, or a daemon's thread still writes
                self._hold(Deadline(_LEAVING), 0.0)
                if self._fd >= 0:
                    self._close_fd()
                self.mutex.release()

    def _say_goodbye(self) -> None:
        """Note that this member leaves, once, and delete the file if it is the last one."""
        if self.id not in self._contents.members:
            return
        self._limit = 1 << 62
        self.write([(journal.CLOSE, self.id, b"")])
        if 0 < self._world_size <= self._contents.opened and not self._contents.members:
            named = os.stat(self.path, follow_symlinks=False)
            if named.st_ino == os.fstat(self._fd).st_ino:
                os.unlink(self.path)

    def _close_fd(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def _drop_in_child(self) -> None:
        # The locks belong to the open file, which parent and child would share.
        if self._fd >= 0:
            self._close_fd()
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
        with self._locked(deadline):
            self._same_file()
            self._read_all()
            self._pay()
            yield self._contents.table

    @contextmanager
    def reading(self, deadline: Deadline) -> Iterator[Table]:
        """Yield the up-to-date contents, which no other thread can change meanwhile.

        Whole records are valid even without a lock. Over NFS it takes a lock to see what other
        computers wrote.
        """
        if self._always_lock:
            with self._locked(deadline, shared=True):
                self._read()
                yield self._contents.table
            return
        self._hold(deadline, _PATIENCE)
        try:
            self.use()
            self._read()
            yield self._contents.table
        finally:
            self.mutex.release()

    @contextmanager
    def _locked(self, deadline: Deadline, shared: bool = False) -> Iterator[None]:
        """Take the mutex and the file's lock. Other threads can read until the lock is free."""
        nap = 0.0001
        while True:
            self._hold(deadline, 0.001)
            try:
                self.use()
                try:
                    if locks.lock(self._fd, self.path, deadline, shared):
                        yield
                        return
                finally:  # a signal handler's exception may come when it has just been taken
                    with suppress(OSError):
                        locks.unlock(self._fd, locks.MAIN)
            finally:
                self.mutex.release()
            time.sleep(min(nap, deadline.left()))
            nap = min(2 * nap, _LONGEST_NAP)

    def _hold(self, deadline: Deadline, patience: float) -> None:
        """Take the mutex, some seconds after the deadline at the latest."""
        if not self.mutex.acquire(timeout=deadline.left() + patience):
            raise StoreTimeoutError(
                f"FileStore {self.path}: another thread of this process kept it for "
                f"{round(deadline.seconds * 1000)}ms"
            )

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
            "FileStore %s: %d bytes of a torn record are cut off; its call had not returned when "
            "its process was killed or met an error", self.path, len(rest),
        )  # fmt: skip
        os.ftruncate(self._fd, self._offset)

    def write(self, entries: Sequence[journal.Entry]) -> None:
        """Write one record, with the file's lock. When it returns, it is on the disk."""
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
            with suppress(OSError, DistStoreError):  # else the next writer settles it
                self._settle()
            if isinstance(error, OSError) and error.errno is not None:  # not a signal handler's
                raise self._failed(f"{len(data)} bytes cannot be written", error) from error
            raise
        self._take(entries, len(data))

    def _settle(self) -> None:
        """Decide about a record whose writing was cut short; the caller has the lock.

        A whole one stays: others may have read it and go by it. Half a record is cut off.
        """
        if self._always_lock:  # nobody has read it
            os.ftruncate(self._fd, self._offset)
        else:
            self._read_all()

    def _pay(self) -> None:
        """Write what is owed, if it can be written and still matters."""
        owed = self.owed[:]
        table = self._contents.table
        due = [entry for entry in owed if table.inside(entry[1], entry[2].decode())]
        with suppress(DistStoreError):
            if due:
                self.write(due)
            del self.owed[: len(owed)]

    def _failed(self, what: str, error: OSError) -> DistStoreError:
        return DistStoreError(f"FileStore {self.path}: {what}: {error.strerror}")

    def _take(self, entries: Iterable[journal.Entry], length: int) -> None:
        """Apply entries that fill `length` bytes; after an exception the next read starts over."""
        try:
            for entry in entries:
                self._contents.apply(entry)
            self._offset += length
        except BaseException:  # of a signal handler
            self._forget()
            raise
