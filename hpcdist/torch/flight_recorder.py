"""The last operations of torch's groups over hpcdist, in the form that ``torchfrtrace`` reads.

Off unless torch's own variable says how many operations to keep: ``TORCH_FR_BUFFER_SIZE=2000``, or
its older name ``TORCH_NCCL_TRACE_BUFFER_SIZE``. A dump is written by
:func:`hpcdist.torch.dump_flight_recorder`, and when an operation fails, once in a process.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpcdist import log

__all__ = ["Entry", "Recorder", "dump_flight_recorder", "recorder"]

_log = log.get_logger("torch")

#: The version of the form, which torchfrtrace looks at.
VERSION = "2.10"
#: torchfrtrace knows the names of torch's own backends only, and takes no other.
PREFIX = "gloo"
#: Frames that an entry keeps, from the innermost of the program's own.
_FRAMES = 6
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: Where the code lies that is not the program's: torch and hpcdist.
_LIBRARY = tuple(
    os.path.dirname(os.path.dirname(os.path.abspath(file))) + os.sep
    for file in (dist.__file__, __file__)
)


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
        """Take note of the Work that tells when it is done.

        Parameters
        ----------
        native : hpcdist.Work
            The operation under way.
        """
        self.native = native
        self.__enter__()

    def __enter__(self) -> Entry:
        self.record["state"] = "started"
        self.record["time_discovered_started_ns"] = time.time_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.done()
        else:
            self.failed()

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
        self._lock = threading.Lock()
        self._dumped = False

    def add(
        self,
        group: Any,
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        timeout: float,
        p2p: str = "",
    ) -> Entry:
        """Note an operation that begins.

        Parameters
        ----------
        group : BridgeGroup
            Where.
        name : str
            What torchfrtrace calls it.
        inputs, outputs : sequence of torch.Tensor, or of lists of them
            Their sizes and dtypes are kept; a list counts as one tensor, a row for each.
        timeout : float
            Seconds.
        p2p : str
            Between whom, for a message: ``"0->1"`` for a send, ``"1<-0"`` for a receive.

        Returns
        -------
        Entry
            To be told how it goes on.
        """
        pg, desc = group.getGroupName(), group.getGroupDesc()
        with self._lock:
            self._settle()
            if pg not in self._groups:
                ranks = str(list(group.native._ranks))
                self._groups[pg] = {"name": pg, "desc": desc, "ranks": ranks}
                self._counts[pg] = [0, 0]
            counts = self._counts[pg]
            counts[bool(p2p)] += 1
            entry = Entry(
                {
                    "record_id": self._next,
                    "pg_id": list(self._groups).index(pg),
                    "process_group": (pg, desc),
                    "collective_seq_id": counts[0],
                    "p2p_seq_id": counts[1],
                    "op_id": sum(counts),
                    "profiling_name": f"{PREFIX}:{name}" + (f" {p2p}" if p2p else ""),
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
                    "is_p2p": bool(p2p),
                    "frames": _frames(),
                    "thread_id": str(threading.get_native_id()),
                    "thread_name": threading.current_thread().name,
                },
                partial(self._write_once, dist.get_rank() if dist.is_initialized() else 0),
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
        status = {}
        for index, name in enumerate(groups):
            own = [r for r in records if r["process_group"][0] == name and not r["is_p2p"]]
            status[str(index)] = {
                f"last_{word}_collective": max(
                    (r["collective_seq_id"] for r in own if r["state"] in states), default=-1
                )
                for word, states in (
                    ("enqueued", ("scheduled", "started", "completed")),
                    ("started", ("started", "completed")),
                    ("completed", ("completed",)),
                )
            }
        return {
            "version": VERSION,
            "backend": "hpcdist",
            "pg_config": groups,
            "pg_status": status,
            "entries": records,
        }

    def write(self, prefix: str | None, rank: int) -> str:
        """Write a dump to a file.

        Parameters
        ----------
        prefix : str or None
            The file's path up to the rank; None takes torch's variable, or torch's default.
        rank : int
            Of this process.

        Returns
        -------
        str
            The file.
        """
        path = (prefix if prefix is not None else _prefix()) + str(rank)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        part = f"{path}.{os.getpid()}.part"
        with open(part, "wb") as file:
            pickle.dump(self.dump(), file)
        os.replace(part, path)
        return path

    def _write_once(self, rank: int) -> None:
        """Write a dump because an operation failed; only the first time."""
        with self._lock:
            first, self._dumped = not self._dumped, True
        if not first:
            return
        try:
            path = self.write(None, rank)
        except OSError as error:
            _log.warning("the flight recorder's dump could not be written: %s", error)
        else:
            _log.warning(
                "an operation failed; the last ones of this rank are in %s: torchfrtrace -p %s %s",
                path,
                os.path.basename(path)[: -len(str(rank))],
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
    """As torch's own recorders write it."""
    first = tensor[0] if isinstance(tensor, list) else tensor
    text = str(first.dtype).removeprefix("torch.")
    return {"float32": "Float", "float64": "Double", "int64": "Long", "int32": "Int"}.get(
        text, text.capitalize()
    )


def _frames() -> list[dict[str, Any]]:
    """The innermost frames of the program, without those of torch and hpcdist below them."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found


def _prefix(environ: Mapping[str, str] | None = None) -> str:
    """Where dumps go if nobody says."""
    env = os.environ if environ is None else environ
    named = next((env[name] for name in _FILES if env.get(name)), None)
    cache = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return named or os.path.join(cache, "torch", "comm_lib_trace_rank_")


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


def dump_flight_recorder(prefix: str | None = None) -> str:
    """Write what the flight recorder knows, for ``torchfrtrace``.

    Local to this process: call it on all ranks, and give the folder to
    ``torchfrtrace -p PREFIX FOLDER``.

    Parameters
    ----------
    prefix : str, optional
        The file's path, to which the rank is added. By default the variable
        ``TORCH_FR_DUMP_TEMP_FILE``, else ``~/.cache/torch/comm_lib_trace_rank_``.

    Returns
    -------
    str
        The file.

    Raises
    ------
    RuntimeError
        If the recorder is off.
    OSError
        If the file cannot be written.

    Notes
    -----
    Entries are labelled ``gloo:``, because torchfrtrace takes the names of torch's own backends
    only. Source: ``torch._C._distributed_c10d._dump_nccl_trace``.
    """
    made = recorder()
    if made is None:
        raise RuntimeError(
            "the flight recorder is off: set TORCH_FR_BUFFER_SIZE=2000 before the first group is "
            "made"
        )
    return made.write(prefix, dist.get_rank())
