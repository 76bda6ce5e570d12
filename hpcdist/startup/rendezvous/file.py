"""``file:///path?rank=&world_size=``: a file that all processes can reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from hpcdist.store import FileStore
from hpcdist.store._common import DEFAULT_TIMEOUT

from .. import apart
from . import urls


class _Place(FileStore):
    """A file in which ranks meet.

    In one that failed because some did not come, those that did have left a verdict. It is not for
    the ranks of the next start.
    """

    _since = apart.began()


# Kept for the life of the process: a FileStore for N ranks accepts N, and after
# destroy_process_group one rank may return before another has left.
_open: dict[tuple[int, str, int], _Place] = {}


def handler(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield a FileStore; the folder must exist, and all ranks must see the same file system."""
    parts = urlsplit(url)
    if parts.netloc:
        raise urls.error(
            url,
            f"{parts.netloc!r} stands where a host would: an absolute path has three slashes, "
            f"file:///{parts.netloc}{parts.path}",
        )
    if not parts.path.strip("/"):
        raise urls.error(url, "path missing")
    rank, world_size = urls.complete(url)
    place = (os.getpid(), parts.path, world_size)
    if place not in _open:
        _open[place] = _Place(parts.path, world_size, timeout)
    store = _open[place].clone()  # with a timeout of its own
    store.set_timeout(timeout)
    yield store, rank, world_size
