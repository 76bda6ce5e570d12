"""A FileStore's file as the operating system sees it."""

from __future__ import annotations

import os
import stat

from hpcdist.errors import DistStoreError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


def open_private(path: str) -> int:
    """Open or create a file that only this user can read; return its descriptor.

    Raises
    ------
    DistStoreError
        If it cannot be opened, or another user owns it or may read it.
    """
    try:
        fd = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise DistStoreError(f"FileStore {path}: {_why_not_open(path, error)}") from error
    found = os.fstat(fd)
    problem = ""
    if not stat.S_ISREG(found.st_mode):
        problem = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        problem = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = (
            f"its mode is {stat.S_IMODE(found.st_mode):04o}: others may read or change it. "
            f"Delete it, or chmod 600 {path}"
        )
    if problem:
        os.close(fd)
        raise DistStoreError(f"FileStore {path}: {problem}")
    return fd


def _why_not_open(path: str, error: OSError) -> str:
    folder = os.path.dirname(path) or "."
    if isinstance(error, FileNotFoundError):
        return f"its folder {folder} does not exist"
    if os.path.islink(path):
        return "it is a symbolic link, which is not followed"
    return f"it cannot be opened: {error.strerror}"


def file_system(place: str | int) -> str:
    """Return the type of a path's file system, or an open file's, from /proc/self/mountinfo."""
    wanted = os.stat(place).st_dev
    device = f"{os.major(wanted)}:{os.minor(wanted)}"
    try:
        with open("/proc/self/mountinfo", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == device:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return ""


def sync_folder(path: str) -> None:
    """Write the folder's entry of the file to the disk too."""
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass  # some network file systems refuse it, and need no such thing
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


def read_all(fd: int, size: int, offset: int) -> bytes:
    """Read so many bytes; fewer only at the end of the file."""
    parts = []
    while size > 0:
        part = os.pread(fd, min(size, 1 << 30), offset)
        if not part:
            break
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return b"".join(parts)
