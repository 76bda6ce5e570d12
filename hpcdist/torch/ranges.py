"""Operations in torch's profiler under the names that torch's own backends give theirs.

torch's backends show an operation as an asynchronous event, ``gloo:all_reduce`` with the shapes of
its tensors, inside ``c10d::allreduce_``. Tools look for such names. An event counts as asynchronous
if it ends in another thread than it began in. A thread without a profiler cannot set an event's
end, and torch then takes the end of the range around it; so each event gets a range of its own
around it. That other thread is waited for: torch writes into freed memory where an event ends after
its profiler.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["profiled", "shown"]

#: What torch's backends call an operation, by the flight recorder's name for it, where they differ.
_TITLES = {
    "allreduce_coalesced": "all_reduce",
    "ALLGATHER_coalesced": "all_gather",
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_reduce_barrier": "barrier",
}

_begin = torch.autograd._record_function_with_args_enter
_end = torch.autograd._record_function_with_args_exit


def profiled() -> bool:
    """Whether a profiler of torch is on, in any thread."""
    return bool(profiler._is_profiler_enabled)


class _Ender:
    """The thread in which events end."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._given: queue.SimpleQueue[tuple[Any, threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="hpcdist profiler", daemon=True).start()

    def _run(self) -> None:
        while True:
            event, done = self._given.get()
            _end(event)
            done.set()

    def end(self, event: Any) -> None:
        """End an event; returns when it has ended."""
        done = threading.Event()
        self._given.put((event, done))
        done.wait()

    @property
    def mine(self) -> bool:
        """Whether the thread is this process's: a child of fork has none."""
        return self._process == os.getpid()


_ender: _Ender | None = None
_lock = threading.Lock()


def _ending() -> _Ender:
    global _ender, _lock
    if _ender is not None and not _ender.mine:
        _lock = threading.Lock()  # the parent's may have been held when it forked
        _ender = None
    with _lock:
        if _ender is None:
            _ender = _Ender()
        return _ender


def shown(
    name: str, tensors: Sequence[Any], method: Callable[..., Any], backend: str
) -> Callable[..., Any]:
    """Let an operation appear in the profiler.

    Parameters
    ----------
    name : str
        Its name in the flight recorder.
    tensors : sequence of torch.Tensor, or of lists of them
        Its inputs, whose shapes are shown if the profiler records shapes.
    method : callable
        Starts or runs it.
    backend : str
        Name of the backend.

    Returns
    -------
    callable
        Does what `method` does, inside a range.
    """
    title = _TITLES.get(name, name)

    def run(*args: Any) -> Any:
        ender = _ending()
        with profiler.record_function(f"c10d::{title}"):
            event = _begin(f"{backend}:{title}", *_flat(tensors))
            try:
                return method(*args)
            finally:
                ender.end(event)

    return run


def _flat(tensors: Sequence[Any]) -> list[Any]:
    found = [t for each in tensors for t in (each if isinstance(each, list) else (each,))]
    return [t for t in found if not t.is_sparse]
