"""Read the flight recorder's file: ``pyx/hpcdist/engine/recorder/hd_recorder.h`` has its layout.

Its process may be writing to it, or have died at any moment. A record is written between two
changes of its number, so one that changes while it is read is left out.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from .model import Group, Operation, Recording, Site, Survival

_MAGIC = b"hpcdrec\n"
_VERSION = 3
_PAGE = 4096
#: magic, version and sizes, pid and uid, rank and size, job, three clocks of three numbers each
_HEAD = struct.Struct("<8s 8I 2i Q 9q")
#: turn, log_used, left, ask, answered, native, stack_used; then stack_real and the texts
_MORE = struct.Struct("<7I 4x q 64s 64s 192s")
#: The most ranks of a job: a damaged file that says more would fill the memory.
_MOST = 1 << 22
_SURVIVAL = struct.Struct("<4I 2q")
_RECORD = struct.Struct("<Qqqq II HH ii 4b 4B 4x qqqq 4q")
#: Where a record has its state, and which of them are of an operation that goes on.
_STATE, _GOES_ON = 56, (1, 2)


def folder_of_user(uid: int | None = None) -> Path:
    """Return the folder of a user's processes on this node.

    Parameters
    ----------
    uid : int, optional
        By default this process's.
    """
    return Path(f"/dev/shm/hpcdist.{os.geteuid() if uid is None else uid}")


def find(place: str | os.PathLike[str]) -> list[Path]:
    """Find the recorder's files.

    Parameters
    ----------
    place : path-like
        A folder, or one file.

    Returns
    -------
    list of Path
        Files that begin as such a file does.

    Raises
    ------
    OSError
        If the folder cannot be read.
    """
    at = Path(place)
    found = []
    for path in [at] if at.is_file() else sorted(at.iterdir()):
        if not path.is_file():
            continue  # opening a FIFO waits for its writer
        try:
            with open(path, "rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    found.append(path)
        except OSError:
            continue  # another user's
    return found


def read(path: str | os.PathLike[str], newest: int | None = None) -> Recording:
    """Read a file.

    Parameters
    ----------
    path : path-like
        Of a process that lives or has died, or a copy.
    newest : int, optional
        Read this many operations and those that have not ended; by default all.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is no such file, or of another version of hpcdist.
    """
    with open(path, "rb") as file:
        data = file.read(_PAGE)
        alive = _is_held(file)
        if len(data) < _HEAD.size + _MORE.size + _SURVIVAL.size or not data.startswith(_MAGIC):
            raise ValueError(f"{path} is not a file of hpcdist's flight recorder")
        head = _HEAD.unpack_from(data)
        if head[1] != _VERSION or head[3] != _RECORD.size:
            raise ValueError(
                f"{path} was written by another version of hpcdist (version {head[1]} of the form, "
                f"records of {head[3]} bytes): read it with that one"
            )
        _, _, head_bytes, _, records, log_bytes, stack_bytes, pid, _, rank, size, job = head[:12]
        if size > _MOST:
            raise ValueError(f"{path} is damaged: it is of a job of {size} ranks")
        ring = head_bytes + log_bytes + stack_bytes
        end = ring + records * _RECORD.size
        if os.fstat(file.fileno()).st_size < end:
            raise ValueError(f"{path} is cut: it has less than {end} bytes")
        raw = list(_records(file.fileno(), ring, records, newest))
        # after the records, so that what they refer to is there
        file.seek(0)
        data = file.read(ring)
    turn, log_used, left, _, _, _, stack_used, stacks_at, host, launch, program = _MORE.unpack_from(
        data, _HEAD.size
    )
    clock = _Clock(head[12:15], _HEAD.unpack_from(data)[15 + 3 * (turn & 1) : 18 + 3 * (turn & 1)])
    stacks = head_bytes + log_bytes
    made = Recording(
        *(str(path), rank, size, pid, _text(host), f"{job >> 32:08x}", _text(launch)),
        *(" ".join(_text(program).split()), clock.real, bool(left), alive),
    )
    names = _names(data[head_bytes : head_bytes + min(log_used, log_bytes)])
    made.groups = list(names.groups.values())
    made.stacks = data[stacks : stacks + min(stack_used, stack_bytes)].decode(errors="replace")
    made.stacks_at = stacks_at if stack_used else 0
    made.survival = Survival(*_SURVIVAL.unpack_from(data, _HEAD.size + _MORE.size))
    made.operations += (_operation(_RECORD.unpack(one), names, clock) for one in raw)
    made.operations.sort(key=lambda operation: operation.number)
    return made


def _records(fd: int, ring: int, records: int, newest: int | None) -> Iterator[bytes]:
    """The records that are asked for; one that is being written to is left out."""
    data = os.pread(fd, records * _RECORD.size, ring)
    numbers = memoryview(data).cast("Q")[:: _RECORD.size // 8].tolist()
    states = data[_STATE :: _RECORD.size]
    least = max(numbers, default=0) - newest if newest is not None else 0
    for place, (number, state) in enumerate(zip(numbers, states, strict=True)):
        if number > least or (number and state in _GOES_ON):
            # Its process may go once around meanwhile: each is read at once and looked at again.
            one = os.pread(fd, _RECORD.size, ring + place * _RECORD.size)
            if os.pread(fd, 8, ring + place * _RECORD.size) == one[:8] != bytes(8):
                yield one


def _is_held(file: BinaryIO) -> bool:
    """Whether its process lives: it has a lock on its file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


class _Clock:
    """From the recorder's ticks to nanoseconds since 1970."""

    def __init__(self, first: Iterable[int], last: Iterable[int]) -> None:
        ticks, mono, _ = first
        self._ticks, end, self.real = last
        passed = self._ticks - ticks
        # Before the watchdog's first look there is one moment only; most processors tick in ns / 3.
        self._rate = (end - mono) / passed if passed > 0 else 1 / 3

    def __call__(self, ticks: int) -> int:
        return self.real + round((ticks - self._ticks) * self._rate)

    def maybe(self, ticks: int) -> int | None:
        return self(ticks) if ticks else None


@lru_cache(maxsize=256)
def _names(log: bytes) -> _Names:
    """What a log has; it changes seldom, and a server reads it every second."""
    return _Names(log.decode(errors="replace"))


class _Names:
    """What records refer to by number."""

    def __init__(self, log: str) -> None:
        #: The texts by the letter of their table: names, kinds, states, codes, operations.
        self.texts: dict[str, dict[int, str]] = {letter: {} for letter in "nktco"}
        self.dtypes: dict[int, tuple[int, str]] = {}
        self.groups: dict[int, Group] = {}
        self.sites: dict[int, Site] = {}
        for line in log.splitlines():
            kind, _, rest = line.partition(" ")
            number, _, rest = rest.partition(" ")
            try:
                self._add(kind, int(number), rest)
            except ValueError:
                continue  # the process died while it wrote this

    def _add(self, kind: str, number: int, rest: str) -> None:
        if kind in self.texts:
            self.texts[kind][number] = rest
        elif kind == "d":
            size, _, name = rest.partition(" ")
            self.dtypes[number] = (int(size), name)
        elif kind == "g":
            words, _, ranks = rest.partition("\t")
            rank, size, uid, name = words.split(" ", 3)
            members = tuple(islice(_ranks(ranks), _MOST))
            self.groups[number] = Group(name, int(rank), int(size), int(uid), members)
        elif kind == "s":
            words, _, file = rest.partition("\t")
            line, _, function = words.partition(" ")
            self.sites[number] = Site(file, int(line), function)


def _ranks(text: str) -> Iterable[int]:
    """ "0-7 16-64:8" as numbers."""
    for word in text.split():
        row, _, step = word.partition(":")
        first, dash, last = row.partition("-")
        by = int(step or 1)
        yield from range(int(first), int(last) + by if dash else int(first) + 1, by)


def _operation(raw: tuple[int, ...], names: _Names, clock: _Clock) -> Operation:
    number, call, end, count, seq, site, name, group, peer, tag, kind, dtype, redop, ndim = raw[:14]
    state, code, wide, queued, start, agreed, inputs, outputs, *dims = raw[14:]
    itemsize, dtype_name = names.dtypes.get(dtype, (0, ""))
    texts = names.texts
    if not wide:
        start = agreed = inputs = 0
        outputs, dims = count, [count]
    return Operation(
        number=number,
        name=texts["n"].get(name, "?"),
        kind=texts["k"].get(kind, "?"),
        group=names.groups.get(group),
        seq=seq,
        dtype=dtype_name,
        elements=count if dtype_name else 0,
        inputs=inputs,
        outputs=outputs,
        itemsize=itemsize,
        shape=tuple(dims[:ndim]) if ndim <= len(dims) else None,
        peer=peer,
        tag=tag,
        op=texts["o"].get(redop, ""),
        state=texts["t"].get(state, "?"),
        failure=texts["c"].get(code, "error"),
        queued=bool(queued),
        called=clock(call),
        started=clock.maybe(start),
        agreed=clock.maybe(agreed),
        ended=clock.maybe(end),
        site=names.sites.get(site),
    )
