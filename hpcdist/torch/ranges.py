"""The bridge's operations in torch's profiler, under the names of torch's own backends.

An operation is an event, ``hpcdist:all_reduce`` with the shapes of its tensors, inside
``c10d::all_reduce``, as ``gloo:all_reduce`` would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import profiler

from hpcdist import profiler_events
from hpcdist.operations import OPERATIONS


def shown(
    name: str, tensors: Sequence[Any], method: Callable[..., Any], backend: str
) -> Callable[..., Any]:
    """Let an operation appear in the profiler, if one is on in any thread.

    Parameters
    ----------
    name : str
        Its name in `OPERATIONS`, or, if it has none there, its title.
    tensors : sequence of torch.Tensor, or of lists of them
        Its inputs, whose shapes are shown if the profiler records shapes.
    method : callable
        Starts or runs it.
    backend : str
        Name of the backend.

    Returns
    -------
    callable
        Does what `method` does, inside a range; `method` itself if no profiler is on.
    """
    if not profiler._is_profiler_enabled:
        return method
    title = OPERATIONS[name].title if name in OPERATIONS else name

    def run(*args: Any, **about: Any) -> Any:
        with profiler.record_function(f"c10d::{title}"):
            event = profiler_events.begin(backend, title, tensors)
            try:
                with profiler_events.silent():
                    return method(*args, **about)
            finally:
                profiler_events.end(event)

    return run
