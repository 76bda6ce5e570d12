"""Operations in torch's profiler as torch's own backends show theirs.

They show an operation as an asynchronous event, ``gloo:all_reduce``, with the shapes of its input
tensors. Tools look for such names. An event counts as asynchronous if it ends in another thread
than it began in. A thread without a profiler cannot set an event's end, and torch then takes the
end of the range around it; so each event needs a range of its own around it. That other thread is
waited for: torch writes into freed memory where an event ends after its profiler.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Under what name hpcdist's own operations over MPI are shown, as ``get_backend()`` calls it.
OWN = "mpi"


class _Ender:
    """The thread in which events end."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._given: queue.SimpleQueue[tuple[Any, threading.Event]] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name="hpcdist profiler", daemon=True)
        thread.calls_no_operation = True  # type: ignore[attr-defined]
        thread.start()

    def _run(self) -> None:
        finish = sys.modules["torch"].autograd._record_function_with_args_exit
        while True:
            event, done = self._given.get()
            finish(event)
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
_lock = threading.RLock()  # a signal handler may make an operation too
_here = threading.local()  # .silent: whether an operation of this thread is already shown


def _ending() -> _Ender:
    global _ender, _lock
    if _ender is not None and not _ender.mine:
        _lock = threading.RLock()  # the parent's may have been held when it forked
        _ender = None
    with _lock:
        if _ender is None:
            _ender = _Ender()
        return _ender


def begin(backend: str, title: str, inputs: Any) -> Any:
    """Begin an operation's event, inside a range of its own.

    Parameters
    ----------
    backend, title : str
        The event is ``backend:title``.
    inputs : object
        A tensor, or a sequence of tensors and lists of them. The shapes of torch's dense tensors
        are shown if the profiler records shapes; a complex one counts as pairs of real numbers, as
        torch's own functions pass it to a backend.

    Returns
    -------
    object
        The event, for :func:`end`.
    """
    torch = sys.modules["torch"]
    shown = [
        torch.view_as_real(t.detach().conj() if t.is_conj() else t.detach())
        if t.is_complex()
        else t
        for t in _flat(inputs)
        if isinstance(t, torch.Tensor) and not t.is_sparse
    ]
    return torch.autograd._record_function_with_args_enter(f"{backend}:{title}", *shown)


def begin_own(title: str, inputs: Any) -> Any:
    """Begin the event of an operation over MPI, as the engine does.

    Parameters
    ----------
    title : str
        As for :func:`begin`.
    inputs : object
        As for :func:`begin`.

    Returns
    -------
    object
        The event; None if the operation is part of one that is already shown.
    """
    return None if getattr(_here, "silent", False) else begin(OWN, title, inputs)


def end(event: Any) -> None:
    """End an event; returns when it has ended. None is no event."""
    if event is not None:
        _ending().end(event)


@contextmanager
def silent() -> Iterator[None]:
    """Show no events of the operations that this thread makes inside: the caller shows its own."""
    before = getattr(_here, "silent", False)
    _here.silent = True
    try:
        yield
    finally:
        _here.silent = before


def _flat(inputs: Any) -> list[Any]:
    if not isinstance(inputs, Sequence):  # a tensor is none, nor is None
        return [inputs]
    return [t for each in inputs for t in (each if isinstance(each, list) else (each,))]
