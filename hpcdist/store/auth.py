"""The key that a job's processes share, so that no other process can use its TCPStore."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from hpcdist import config
from hpcdist.errors import DistStoreError

#: Bytes of a key.
KEY_SIZE = 32


def new_key() -> bytes:
    """Make a key for a job.

    Pass it to all processes, and to no other: through MPI, in a file of mode 0600, or in the
    environment variable ``HPCDIST_STORE_KEY`` as ``new_key().hex()``; never on a command line,
    which everybody on the computer can read.

    Returns
    -------
    bytes
        32 random bytes.
    """
    return secrets.token_bytes(KEY_SIZE)


def _from_text(text: str, source: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE:
        # not the text itself: it may be a key with a typing error
        raise ValueError(f"{source} must hold {2 * KEY_SIZE} hexadecimal digits")
    return key


def default_key_file(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the user's own key file, for processes that got no key.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    Path
        ``HPCDIST_STORE_KEY_FILE``, or ``hpcdist/store.key`` in the user's configuration folder. On
        most clusters that is in a home that all nodes see, so processes on several nodes find the
        same key.
    """
    env = os.environ if environ is None else environ
    chosen = config.get("store_key_file", env)
    if chosen:
        return Path(chosen).expanduser()
    folder = env.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder) / "hpcdist" / "store.key"


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """Read a key from a file, if no other user can read it.

    Parameters
    ----------
    path : path-like
        The file: 64 hexadecimal digits.

    Returns
    -------
    bytes
        The key.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    DistStoreError
        If it belongs to another user, others may read or write it, or it is a link.
    ValueError
        If it contains no key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DistStoreError(f"the key file {path} cannot be read: {error.strerror}") from error
    with os.fdopen(fd, errors="replace") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise DistStoreError(f"the key file {path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise DistStoreError(f"the key file {path} belongs to user {found.st_uid}, not to you")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise DistStoreError(
                f"the key file {path} has mode {stat.S_IMODE(found.st_mode):04o}: others may have "
                "read it. Delete it, and hpcdist creates a new one"
            )
        return _from_text(file.read(4 * KEY_SIZE), f"the key file {path}")


def _make_key_file(path: Path) -> bytes:
    """Create the file, or read the one that another process created first."""
    key = new_key()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(key.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        # Only one process can create a link, even over NFS, and it is never half written.
        os.link(draft, path)
    except FileExistsError:
        return read_key_file(path)
    finally:
        draft.unlink(missing_ok=True)
    return key


def find_key(
    auth_key: bytes | str | None = None, environ: Mapping[str, str] | None = None
) -> bytes:
    """Find the key of this job.

    Parameters
    ----------
    auth_key : bytes or str, optional
        The key itself, 32 bytes or 64 hexadecimal digits.
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    bytes
        `auth_key`; else ``HPCDIST_STORE_KEY``; else what is in the user's own key file, which is
        made if there is none.

    Raises
    ------
    ValueError
        If `auth_key` or the setting is not a key.
    TypeError
        If it is neither bytes nor str.
    DistStoreError
        If the key file is not safe, or cannot be made.
    """
    if isinstance(auth_key, str):
        return _from_text(auth_key, "auth_key")
    if auth_key is not None:
        if not isinstance(auth_key, (bytes, bytearray)):
            raise TypeError(f"auth_key must be bytes or str, not {type(auth_key).__name__}")
        if len(auth_key) != KEY_SIZE:
            raise ValueError(f"auth_key must have {KEY_SIZE} bytes, not {len(auth_key)}")
        return bytes(auth_key)
    text = config.get("store_key", environ)
    if text:
        return _from_text(text, "HPCDIST_STORE_KEY")
    path = default_key_file(environ)
    try:
        try:
            return read_key_file(path)
        except FileNotFoundError:
            return _make_key_file(path)
    except OSError as error:
        raise DistStoreError(
            f"the key file {path} cannot be created: {error.strerror}. Give the job a key in "
            "HPCDIST_STORE_KEY (64 hexadecimal digits), or name a file in HPCDIST_STORE_KEY_FILE"
        ) from error
