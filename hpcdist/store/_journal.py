"""The format of a FileStore's file: a header, then records that are only ever appended.

Each record is one step that happened as a whole or not at all. It carries a checksum over its
contents, its place in the file and the file's random number, so neither half a record nor one that
was left by another file is taken for a step.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdist.errors import DistStoreError

MAGIC = b"hpcdist store 2\n"
#: magic, random number, job, world size, checksum of all before
_HEADER = struct.Struct("<16s16s16sqI")
HEADER_SIZE = _HEADER.size

_RECORD_MAGIC = b"hdR1"
#: magic, bytes of the body, checksum
_HEAD = struct.Struct("<4sQI")
#: kind, bytes of the key, bytes of the value
_ENTRY = struct.Struct("<BIQ")

#: The value of ARRIVE is made by :func:`arrive`, that of LEAVE is the caller.
SET, DELETE, TAIL, PUSH, POP, ARRIVE, LEAVE, OPEN, CLOSE = range(1, 10)

Entry = tuple[int, str, bytes]


@dataclass(frozen=True)
class Header:
    """The first bytes of a file.

    Attributes
    ----------
    nonce : bytes
        16 random bytes: another one means another file, also under the same name.
    job : bytes
        16 bytes that stand for the job, zeros if it is not known.
    world_size : int
        Number of members, -1 if it is not fixed.
    """

    nonce: bytes
    job: bytes
    world_size: int

    @classmethod
    def new(cls, job: bytes, world_size: int) -> Header:
        """Make the header of a new file."""
        return cls(os.urandom(16), job, world_size)

    def pack(self) -> bytes:
        """Return its bytes in the file."""
        bare = _HEADER.pack(MAGIC, self.nonce, self.job, self.world_size, 0)[:-4]
        return bare + struct.pack("<I", zlib.crc32(bare))

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """Return a file's header, or None if its writer was killed before the end.

        Raises
        ------
        DistStoreError
            If it is another kind of file.
        """
        if not MAGIC.startswith(data[: len(MAGIC)]) or len(data) > HEADER_SIZE:
            raise DistStoreError("it is not an hpcdist store file")
        if len(data) < HEADER_SIZE:
            return None
        _, nonce, job, world_size, checksum = _HEADER.unpack(data)
        return cls(nonce, job, world_size) if zlib.crc32(data[:-4]) == checksum else None


def arrive(key: str, size: int, caller: str, until: int) -> Entry:
    """Return the entry of a caller that waits in a barrier, until so many ns since 1970."""
    return ARRIVE, key, f"{size} {until} {caller}".encode()


def arrival(value: bytes) -> tuple[int, int, str]:
    """Return size, time and caller from the value of an entry made by :func:`arrive`."""
    size, until, caller = value.decode().split(" ")
    return int(size), int(until), caller


def _checksum(nonce: bytes, offset: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(nonce + struct.pack("<QQ", offset, len(body))))


def encode(nonce: bytes, offset: int, entries: Sequence[Entry]) -> bytes:
    """Return the bytes of one record, which are to be written at `offset` of the file."""
    parts = []
    for kind, key, value in entries:
        name = key.encode()
        parts += [_ENTRY.pack(kind, len(name), len(value)), name, value]
    body = b"".join(parts)
    return _HEAD.pack(_RECORD_MAGIC, len(body), _checksum(nonce, offset, body)) + body


def _body(nonce: bytes, offset: int, data: bytes, at: int) -> bytes | None:
    """Return the body of the undamaged record at a place, or None."""
    if len(data) - at < _HEAD.size:
        return None
    magic, size, checksum = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size
    if magic != _RECORD_MAGIC or size > len(data) - begin:
        return None
    body = data[begin : begin + size]
    return body if _checksum(nonce, offset + at, body) == checksum else None


def _entries(body: bytes) -> list[Entry]:
    found = []
    at = 0
    while at < len(body):
        kind, key_size, value_size = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        key = body[at : at + key_size].decode()
        at += key_size
        found.append((kind, key, body[at : at + value_size]))
        at += value_size
    return found


def records(nonce: bytes, offset: int, data: bytes) -> tuple[list[Entry], int]:
    """Return the entries of all whole records at the beginning of some bytes of the file.

    Parameters
    ----------
    nonce : bytes
        The file's random number.
    offset : int
        Where in the file the bytes begin.
    data : bytes
        From there on.

    Returns
    -------
    entries : list of (kind, key, value)
        In order.
    used : int
        Bytes of the whole records; what follows is torn, or not written yet.
    """
    found: list[Entry] = []
    at = 0
    while (body := _body(nonce, offset, data, at)) is not None:
        found += _entries(body)
        at += _HEAD.size + len(body)
    return found, at


def scan(nonce: bytes, offset: int, data: bytes) -> int:
    """Find a whole record behind bytes that are none.

    A writer that was killed leaves a torn record at the end, and nothing after it. A whole record
    after damaged bytes means that the file was damaged otherwise, and that cutting it off there
    would lose what was acknowledged.

    Returns
    -------
    int
        The place of such a record in the file, or -1.
    """
    at = data.find(_RECORD_MAGIC, 1)
    while at >= 0:
        if _body(nonce, offset, data, at) is not None:
            return offset + at
        at = data.find(_RECORD_MAGIC, at + 1)
    return -1


def job_digest(job_id: str | None, environ: Mapping[str, str] | None = None) -> bytes:
    """Return 16 bytes that stand for the job a process belongs to; zeros if nothing names it.

    Parameters
    ----------
    job_id : str or None
        The user's name for it. By default the job's store key, torchrun's run id or Slurm's job
        number: what all processes of a job have in common, however they were started.
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    bytes
        16 of them.
    """
    env = os.environ if environ is None else environ
    if job_id is None:
        for name in ("HPCDIST_STORE_KEY", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
            # torchrun's run id is "none" unless the user chose one
            if env.get(name) and env[name] != "none":
                job_id = f"{name}={env[name]}"
                break
    if not job_id:
        return bytes(16)
    return hashlib.blake2b(job_id.encode(), digest_size=16, person=b"hpcdist job").digest()
