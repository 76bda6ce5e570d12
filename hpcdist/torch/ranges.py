"""The bridge's operations in torch's profiler, under the names of torch's own backends.

An operation is an event, ``hpcdist:all_reduce`` with the shapes of its tensors, inside
``c10d::all_reduce``, as ``gloo:all_reduce`` would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import profiler

from hpcdist import profiler_events

__all__ = ["shown"]

#: What torch's backends call an operation, by the flight recorder's name for it, where they differ.
_TITLES = {
    "allreduce_coalesced": "all_reduce",
    "ALLGATHER_coalesced": "all_gather",
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_reduce_barrier": "barrier",
}


def shown(
    name: str, tensors: Sequence[Any], method: Callable[..., Any], backend: str
) -> Callable[..., Any]:
    """Let an operation appear in the profiler, if one is on in any thread.

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
        Does what `method` does, inside a range; `method` itself if no profiler is on.
    """
    if not profiler._is_profiler_enabled:
        return method
    title = _TITLES.get(name, name)

    def run(*args: Any) -> Any:
        with profiler.record_function(f"c10d::{title}"):
            event = profiler_events.begin(backend, title, tensors)
            try:
                with profiler_events.silent():
                    return method(*args)
            finally:
                profiler_events.end(event)

    return run
