"""Commits in the memory of a node: files below ``/dev/shm`` that outlive the processes of a job.

A job has a folder per node, ``/dev/shm/hpcdist.UID/commits-JOB``, and in it a file per rank for
each of the last two commits of each State. A file appears whole, by a rename, and has checksums.
Its payload is the codec's, so reading runs no code. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import struct
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcdist.startup.commits import folder_of_job

_MAGIC = b"hpcdcmt1"
#: Magic, bytes of the head, checksum of the head.
_START = struct.Struct("<8sII")
#: More than any head has.
_LONGEST = 1 << 16
#: Seconds that the folder of a job is kept of which no process is left on this node.
KEPT = 3600.0
#: Share of /dev/shm that stays free: MPI needs it, too.
SPARE = 1 / 16


class DamagedError(Exception):
    """A file is not what was written."""


@dataclass(frozen=True)
class Head:
    """What a file says of its content.

    Attributes
    ----------
    serial : int
        Number of the commit; it goes on counting after a restart.
    nonce : str
        Drawn by one start of the job: two starts may write a commit of the same number.
    step : int
        Steps committed.
    size, rank : int
        Ranks that committed; whose state it is.
    state : int
        Which State of the program it is, in the order in which they resumed.
    blobs : list of (int, int)
        Bytes and checksum of each part of the payload.
    """

    serial: int
    nonce: str
    step: int
    size: int
    rank: int
    state: int = 0
    blobs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The file: each commit takes the place of the last but one of its State."""
        return f"{self.state}.{self.serial % 2}.{self.rank}"


def shape(head: Head, blobs: Sequence[bytes | bytearray]) -> bytes:
    """Return the bytes that begin a file, up to the blobs."""
    whole = asdict(head) | {"blobs": [(len(blob), zlib.crc32(blob)) for blob in blobs]}
    text = json.dumps(whole).encode()
    return _START.pack(_MAGIC, len(text), zlib.crc32(text)) + text


class Memory:
    """A job's folder on this node.

    Parameters
    ----------
    job : str
        Its name.

    Raises
    ------
    OSError
        If the folder cannot be made, or somebody else can write to it.
    """

    def __init__(self, job: str) -> None:
        self.folder = folder_of_job(job)
        self._lock = -1
        for last in (False, False, True):
            try:
                self._open()
                break
            except FileNotFoundError:  # another process removed the folder, empty, in between
                if last:
                    raise

    def _open(self) -> None:
        _own_folder(self.folder.parent)
        _remove_leftovers(self.folder.parent, self.folder)
        _own_folder(self.folder)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._release = weakref.finalize(self, os.close, self._lock)
        self._release.atexit = False
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Say that this process needs the folder no more."""
        if self._lock >= 0:
            self._release()
            self._lock = -1

    def remove(self) -> None:
        """Remove the folder with all commits."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()  # only if it is empty

    def write(self, name: str, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Put a file in the place of the one with its name.

        Parameters
        ----------
        name : str
            Of :attr:`Head.name`.
        pieces : sequence of bytes
            What :func:`shape` returns, and the blobs.

        Raises
        ------
        OSError
            If there is no room; there is no such file then.
        """
        path, part = self.folder / name, self.folder / f"{name}.{os.getpid()}.part"
        path.unlink(missing_ok=True)  # first: there is no room for three
        _check_room(self.folder, sum(len(piece) for piece in pieces))
        try:
            with open(part, "xb", buffering=0, opener=_private) as file:
                for piece in pieces:
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[file.write(rest) or 0 :]
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        os.utime(self._lock)

    def heads(self) -> list[Head]:
        """Return what the files say of themselves; damaged ones are left out."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError, DamagedError), open(path, "rb") as file:
                if re.fullmatch(r"\d+\.[01]\.\d+", path.name):
                    found.append(_read_head(file.fileno()))
        return found

    def read(self, wanted: Head) -> list[bytearray]:
        """Read the payload of a file.

        Raises
        ------
        DamagedError
            If it is not what was written, or another commit's.
        OSError
            If it cannot be read.
        """
        with open(self.folder / wanted.name, "rb") as file:
            head = _read_head(file.fileno())
            if (head.serial, head.nonce, head.rank) != (wanted.serial, wanted.nonce, wanted.rank):
                raise DamagedError("it is of another commit")
            blobs = []
            for length, checksum in head.blobs:
                if length > os.fstat(file.fileno()).st_size:
                    raise DamagedError("it is truncated")
                blob = bytearray(length)
                if file.readinto(blob) != length:
                    raise DamagedError("it is truncated")
                if zlib.crc32(blob) != checksum:
                    raise DamagedError("its checksum is wrong")
                blobs.append(blob)
        return blobs

    def clean(self, prefix: str = "", keep: Sequence[str] = ()) -> None:
        """Remove what earlier starts of the job have left.

        Parameters
        ----------
        prefix : str
            Remove the files whose names begin so; by default those that were not written to the
            end.
        keep : sequence of str
            Files that are to stay.
        """
        try:
            paths = list(self.folder.iterdir())
        except FileNotFoundError:  # the last rank that ends well removes the folder
            return
        for path in paths:
            old = path.name.endswith(".part") or path.name.startswith("ended.")
            if prefix:
                old = path.name.startswith(prefix)
            if old and path.name not in keep:
                path.unlink(missing_ok=True)


def _read_head(fd: int) -> Head:
    """Read the head, and leave the descriptor behind it."""
    start = os.read(fd, _START.size)
    if len(start) < _START.size:
        raise DamagedError("it is truncated")
    magic, length, checksum = _START.unpack(start)
    if magic != _MAGIC or length > _LONGEST:
        raise DamagedError("it is no commit")
    text = os.read(fd, length)
    if zlib.crc32(text) != checksum:
        raise DamagedError("the checksum of its head is wrong")
    found = json.loads(text)
    return Head(**(found | {"blobs": [(int(a), int(b)) for a, b in found["blobs"]]}))


def _own_folder(path: Path) -> None:
    """Make a folder that belongs to this user alone; anyone may have made one of that name."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    there = os.lstat(path)
    if (
        not path.is_dir()
        or path.is_symlink()
        or there.st_uid != os.geteuid()
        or there.st_mode & 0o77
    ):
        raise PermissionError(f"{path} is not a folder of this user alone")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _check_room(folder: Path, nbytes: int) -> None:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize - int(room.f_blocks * room.f_frsize * SPARE)
    if nbytes > free:
        raise OSError(
            f"{nbytes / 2**20:.1f} MiB do not fit into {folder.parent.parent}, of which "
            f"{max(free, 0) / 2**20:.1f} MiB may be used"
        )


def _remove_leftovers(root: Path, own: Path) -> None:
    """Remove the folders of jobs that have ended without removing them."""
    for folder in root.glob("commits-*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a process has it
                if folder != own and time.time() - os.fstat(lock).st_mtime > KEPT:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
