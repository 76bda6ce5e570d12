"""Names for operations in torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist._engine import name_ranges


@contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Show the operations that this thread begins under the context by one name in the profiler.

    Parameters
    ----------
    name : str
        Takes the place of ``hpcdist::all_reduce (4096 B, ...)`` and of the other operations' names.

    Raises
    ------
    TypeError
        If `name` is no str.

    Examples
    --------
    >>> with hpcdist.record_comm("gradients of layer 1"):
    ...     hpcdist.all_reduce(gradients)

    Notes
    -----
    Local to this process, and to this thread. Source: ``torch.distributed.record_comm``.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    before = name_ranges(name)
    try:
        yield
    finally:
        name_ranges(before)
