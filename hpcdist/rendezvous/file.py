"""``file:///path?rank=&world_size=``: a file that all processes can reach."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from hpcdist.store import FileStore

from . import urls
from .tcp import DEFAULT_TIMEOUT

__all__ = ["handler"]


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
    yield FileStore(parts.path, world_size, timeout), rank, world_size
