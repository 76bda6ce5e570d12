"""Shared by the object operations: one rank's contribution, and how errors reach all ranks."""

from __future__ import annotations

import functools
import signal
import traceback
from pickle import PickleError
from typing import Any, NoReturn

import numpy as np

from hpcdist import codec
from hpcdist.backends.carrier import Carrier
from hpcdist.codec._reader import ORDINARY, call_user
from hpcdist.errors import DistError
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.resolve import resolve
from hpcdist.groups.world import NonMember, warn_outside

_RAISED_ALIKE: dict[bytes, type[Exception]] = {b"T": TypeError, b"V": ValueError, b"D": DistError}

#: The number of ranks whose reasons one error quotes.
_SHOWN = 4


def group_of(api: str, group: Any) -> ProcessGroup | None:
    """Return the group in which an operation is called; None outside it, after a warning."""
    pg = resolve(group)
    if isinstance(pg, NonMember):
        warn_outside(api, 4)  # the line that calls the public function
        return None
    return pg


class Part:
    """What this rank sends: a payload, or the reason why it cannot."""

    def __init__(self, api: str, rank: int) -> None:
        self.api = api
        self.rank = rank
        self.error: Exception | None = None
        self.data = np.empty(0, np.uint8)

    def encode(self, obj: Any, pickle: bool | None) -> None:
        """Encode the object, unless an error was found before."""
        if self.error is None:
            try:
                self.data = buffer(codec.encode(obj, pickle=pickle))
            except Exception as exc:
                self.refuse(exc)

    def refuse(self, error: Exception) -> None:
        """Send an error in place of the object."""
        self.error = error
        kind = b"D"
        for code, cls in _RAISED_ALIKE.items():
            if isinstance(error, cls):
                kind = code
                break
        text = _text_of(error)
        if kind == b"D":
            text = f"{type(error).__name__}: {text}"
        message = f"{self.api}, rank {self.rank}: {text}"
        self.data = buffer(bytearray(kind + message.encode("utf-8", "replace")))

    @property
    def size(self) -> int:
        """Size of the payload in bytes; negative for an error."""
        return -self.data.nbytes if self.error else self.data.nbytes

    def fail(self, texts: list[Any]) -> NoReturn:
        """Raise one error that quotes the ranks' texts; its type is that of the first."""
        raw = bytes(texts[0])
        cls = _RAISED_ALIKE.get(raw[:1], DistError)
        said = [bytes(text)[1:].decode("utf-8", "replace") for text in texts[:_SHOWN]]
        if len(texts) > _SHOWN:
            said.append(f"... and {len(texts) - _SHOWN} ranks more")
        message = "\n".join(said)
        if self.error and not isinstance(self.error, (*ORDINARY, DistError, PickleError)):
            raise self.error  # raised by a signal handler during encoding
        raise cls(message) from self.error


def _text_of(error: Exception) -> str:
    """Return what an error of a user's code says, if that code lets it."""
    try:
        return str(error)
    except Exception as other:
        return f"(its text cannot be had: {type(other).__name__})"


def buffer(data: bytearray) -> Any:
    """View bytes as the uint8 array that the native layer moves; no copy."""
    return np.frombuffer(data, np.uint8)


def decode(api: str, sender: int, data: Any, pickle: bool | None) -> Any:
    """Return the object of a payload; an error names the operation and the sender."""
    try:
        return codec.decode(data, pickle=pickle)
    except codec.CodecError as exc:
        raise codec.CodecError(f"{api}: from rank {sender}: {exc}") from exc.__cause__


def of_message(error: BaseException) -> bool:
    """Whether an exception comes from what a message holds, not from a signal handler meanwhile."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if handlers.intersection(frames):
        return False
    # Of Ctrl-C while a user's function decodes nobody can tell which of the two it is.
    return isinstance(error, (DistError, TypeError, ValueError)) or call_user.__code__ in frames


def _code(handler: Any) -> Any:
    """Return the code of a function, a method, a partial or an object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = vars(type(handler)).get("__call__")
    return getattr(handler, "__code__", None)


def check_list(value: Any, name: str) -> int:
    """Return a list's length; raise TypeError if it is not a list."""
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, not {type(value).__name__}")
    return len(value)


def root_of(pg: ProcessGroup, rank: int | None, group_rank: int | None, what: str) -> int:
    """Return the group rank that `src` or `dst` names; by default that of world rank 0."""
    return int(
        pg.members.place(0 if rank is None and group_rank is None else rank, group_rank, what)
    )


def gather_sizes(comm: Carrier, part: Part, extra: int) -> list[int]:
    """Exchange the sizes of all ranks' payloads; raise on all ranks if one cannot send.

    This is one part of an operation, or two where it raises that error.
    """
    sizes = np.empty(comm.size, np.int64)
    own = np.array([part.size], np.int64)
    comm.all_gather_into_tensor(sizes, own, api=part.api, extra=extra)
    found: list[int] = sizes.tolist()
    if min(found) < 0:
        texts = [np.empty(max(0, -size), np.uint8) for size in found]
        comm.all_gather(texts, part.data if part.error else part.data[:0], api=part.api)
        part.fail([text for text in texts if text.nbytes])
    return found
