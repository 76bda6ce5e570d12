"""``mpi://``: the MPI library and its launcher supply rank, size and addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcdist import launchers

from .urls import stated


def handler(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the launcher's values for what the URL omits; the backend starts MPI itself."""
    rank, world_size = stated(url)
    launch = launchers.detect()
    if launch is not None:
        if rank == -1 and launch.rank is not None:
            rank = launch.rank
        if world_size == -1 and launch.size is not None:
            world_size = launch.size
    yield None, rank, world_size
