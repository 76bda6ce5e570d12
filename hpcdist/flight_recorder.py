"""The last operations of torch's groups and of groups over NCCL, as ``torchfrtrace`` reads them.

Off unless torch's own variable says how many operations to keep: ``TORCH_FR_BUFFER_SIZE=2000``, or
its older name ``TORCH_NCCL_TRACE_BUFFER_SIZE``. A dump is written by
:func:`hpcdist.torch.dump_flight_recorder`, and when an operation fails, once in a process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcdist import log
from hpcdist._dump_files import dtype_name, dump_of, write_dump

_log = log.get_logger("recorder")

#: torchfrtrace knows the names of torch's own backends only, and takes no other.
NCCL = "nccl"
#: Frames that an entry keeps, from the innermost of the program's own.
_FRAMES = 6
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
#: Where the code lies that is not the program's.
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Where(NamedTuple):
    """A group: its name and description, the world ranks in it, and this process's."""

    name: str
    about: str
    ranks: Sequence[int]
    rank: int


class Entry:
    """One operation.

    Parameters
    ----------
    record : dict
        What torchfrtrace reads, but for how it went on.
    when_failed : callable
        Called if the operation fails.

    Notes
    -----
    As a context it stands around a synchronous operation.
    """

    __slots__ = ("failed", "native", "record")

    def __init__(self, record: dict[str, Any], when_failed: Callable[[], None]) -> None:
        self.record = record
        self.failed = when_failed
        self.native: Any = None

    def follow(self, native: Any) -> None:
        """Take note of the Work that tells when it is done; the first one counts.

        Parameters
        ----------
        native : hpcdist.Work
            The operation under way.
        """
        if self.native is None and not self.record["retired"]:
            self.native = native
            self.__enter__()

    def __enter__(self) -> Entry:
        self.record["state"] = "started"
        self.record["time_discovered_started_ns"] = time.time_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.failed()
        elif self.native is None:  # else it has only been enqueued
            self.done()

    def settle(self) -> bool:
        """Look whether the operation is done.

        Returns
        -------
        bool
            Whether there is nothing more to learn of it. One that failed stays as it was.
        """
        if self.native is None:
            return bool(self.record["retired"])
        if not self.native.is_completed():
            return False
        if self.native.is_success():
            self.done()
        self.native = None
        return True

    def done(self) -> None:
        """Note that the operation went well."""
        now = time.time_ns()
        self.record["time_discovered_started_ns"] = self.record["time_discovered_started_ns"] or now
        self.record["time_discovered_completed_ns"] = now
        self.record["state"], self.record["retired"] = "completed", True


class Recorder:
    """The last operations of this process.

    Parameters
    ----------
    size : int
        How many to keep.
    """

    def __init__(self, size: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=size)
        self._open: deque[Entry] = deque(maxlen=size)
        self._groups: dict[str, dict[str, str]] = {}
        self._counts: dict[str, list[int]] = {}
        self._next = 0
        self._lock = threading.RLock()  # a signal handler may write a dump
        self._here = threading.local()
        self._dumped = False
        self._rank = 0

    def inside(self, entry: Entry, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that is noted already: what a backend begins in it is the same operation.

        Parameters
        ----------
        entry : Entry
            What it is noted as.
        call : callable
            The call.

        Returns
        -------
        callable
            To be used in its place.
        """

        def inside(*args: Any, **about: Any) -> Any:
            self._here.entry = entry
            try:
                return call(*args, **about)
            finally:
                self._here.entry = None

        return inside

    def add(
        self,
        group: Where,
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        timeout: float,
        p2p: str | None = None,
        joined: bool = False,
        *,
        backend: str,
    ) -> Entry:
        """Note an operation that begins.

        Parameters
        ----------
        group : Where
            The group.
        name : str
            What torchfrtrace calls it.
        inputs, outputs : sequence of torch.Tensor, or of lists of them
            Their sizes and dtypes are kept; a list counts as one tensor, a row for each.
        timeout : float
            Seconds.
        p2p : str
            Between whom, for a message: ``"0->1"`` for a send, ``"1<-0"`` for a receive; empty for
            the end of a batch, which torchfrtrace wants to see.
        joined : bool
            Whether it starts together with the one noted before.
        backend : str
            The backend of torch's that it is labelled with.

        Returns
        -------
        Entry
            To be told how it goes on. Inside of a call that is noted already (:meth:`inside`) it
            is that one, relabelled.
        """
        noted: Entry | None = getattr(self._here, "entry", None)
        if noted is not None:
            _, _, known = noted.record["profiling_name"].partition(":")
            noted.record["profiling_name"] = f"{backend}:{known}"
            return noted
        pg, desc = group.name, group.about
        with self._lock:
            self._settle()
            self._rank = group.rank
            if pg not in self._groups:
                self._groups[pg] = {"name": pg, "desc": desc, "ranks": str(list(group.ranks))}
                self._counts[pg] = [0, 0]
            counts = self._counts[pg]
            counts[p2p is not None] += not joined
            entry = Entry(
                {
                    "record_id": self._next,
                    "pg_id": list(self._groups).index(pg),
                    "process_group": (pg, desc),
                    "collective_seq_id": counts[0],
                    "p2p_seq_id": counts[1],
                    "op_id": sum(counts),
                    "profiling_name": f"{backend}:{name}" + (f" {p2p}" if p2p else ""),
                    "input_sizes": [_size_of(t) for t in inputs],
                    "input_dtypes": [_dtype(t) for t in inputs],
                    "output_sizes": [_size_of(t) for t in outputs],
                    "output_dtypes": [_dtype(t) for t in outputs],
                    "time_created_ns": time.time_ns(),
                    "time_discovered_started_ns": None,
                    "time_discovered_completed_ns": None,
                    "duration_ms": None,
                    "state": "scheduled",
                    "retired": False,
                    "timeout_ms": int(timeout * 1000),
                    "is_p2p": p2p is not None,
                    "frames": _frames(),
                    "thread_id": str(threading.get_native_id()),
                    "thread_name": threading.current_thread().name,
                },
                self.failed,
            )
            self._next += 1
            self._entries.append(entry)
            self._open.append(entry)
        return entry

    def _settle(self) -> None:
        """Look which operations are done."""
        going_on = [entry for entry in self._open if not entry.settle()]
        self._open.clear()
        self._open.extend(going_on)

    def dump(self) -> dict[str, Any]:
        """Everything that is known now.

        Returns
        -------
        dict
            What torchfrtrace reads.
        """
        with self._lock:
            self._settle()
            records = [dict(entry.record) for entry in self._entries]
            groups = {name: dict(about) for name, about in self._groups.items()}
        return dump_of(groups, records)

    def write(self, prefix: str | None) -> str:
        """Write a dump to a file.

        Parameters
        ----------
        prefix : str or None
            The file's path up to the rank; None takes torch's variable, or torch's default.

        Returns
        -------
        str
            The file.
        """
        return write_dump(self.dump(), prefix, self._rank)

    def failed(self) -> None:
        """Write a dump because an operation failed; only the first time."""
        with self._lock:
            first, self._dumped = not self._dumped, True
        if not first:
            return
        try:
            path = self.write(None)
        except OSError as error:
            _log.warning("the flight recorder's dump could not be written: %s", error)
        else:
            _log.warning(
                "an operation failed; the last ones of this rank are in %s: torchfrtrace -p %s %s",
                path,
                os.path.basename(path)[: -len(str(self._rank))],
                os.path.dirname(path) or ".",
            )


def _size_of(tensor: Any) -> list[int]:
    """The shape; of a list, that of its tensors in a row, or their elements if those differ."""
    if not isinstance(tensor, list):
        return list(tensor.shape)
    if len({each.shape for each in tensor}) == 1:
        return [len(tensor), *tensor[0].shape]
    return [sum(each.numel() for each in tensor)]


def _dtype(tensor: Any) -> str:
    """Return a tensor's dtype as torch's own recorders write it; of an empty list ""."""
    if isinstance(tensor, list) and not tensor:
        return ""
    first = tensor[0] if isinstance(tensor, list) else tensor
    return dtype_name(str(first.dtype).removeprefix("torch."))


def _frames() -> list[dict[str, Any]]:
    """The innermost frames of the program, without those of torch and hpcdist below them."""
    frame: Any = sys._getframe(2)
    torch = sys.modules.get("torch")
    library = (_OURS,) if torch is None else (_OURS, os.path.dirname(str(torch.__file__)) + os.sep)
    while frame is not None and frame.f_code.co_filename.startswith(library):
        frame = frame.f_back
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found


def _kept(environ: Mapping[str, str] | None = None) -> int:
    """How many operations to keep."""
    env = os.environ if environ is None else environ
    for name in _SIZES:
        text = env.get(name, "").strip()
        if text:
            if not text.isdigit():
                raise ValueError(f"{name}={text!r} is not valid: it must be a whole number")
            return int(text)
    return 0


_made: Recorder | None = None


def recorder() -> Recorder | None:
    """The recorder of this process, made at the first question.

    Local to this process.

    Returns
    -------
    Recorder or None
        None if it is off.

    Raises
    ------
    ValueError
        If the variable is no number.
    """
    global _made
    if _made is None and (size := _kept()):
        _made = Recorder(size)
    return _made
