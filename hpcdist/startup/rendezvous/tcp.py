"""``tcp://host:port?rank=&world_size=``: rank 0 serves a store, the others connect to it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from hpcdist.store import TCPStore
from hpcdist.store._common import DEFAULT_TIMEOUT

from . import urls

# Rank 0's servers, kept for the life of the process: after destroy_process_group another rank may
# return to the same address before rank 0 does.
_served: dict[tuple[str, int], TCPStore] = {}


def handler(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield a TCPStore, which rank 0 serves at the URL's address."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise urls.error(url, "port must have value from 0 to 65535") from None
    if port is None:
        raise urls.error(url, "port number missing")
    if not parts.hostname:
        raise urls.error(url, "host missing")
    rank, world_size = urls.complete(url)
    if port == 0 and world_size > 1:
        raise urls.error(url, "port 0 means any free one, which the other ranks could not know")
    yield connect(parts.hostname, port, rank, world_size, timeout), rank, world_size


def connect(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Serve a store on rank 0; connect to it on the others.

    Parameters
    ----------
    host : str
        Name or address of rank 0's machine. The server binds this address and no other.
    port : int
        Port of the server.
    rank : int
        This process's rank.
    world_size : int
        Number of ranks.
    timeout : datetime.timedelta
        How long the others try to connect.

    Returns
    -------
    hpcdist.TCPStore
        The store. It does not wait for the others: the roll call does.
    """
    if rank == 0 and (host, port) in _served:
        again = _served[host, port].clone()
        again.set_timeout(timeout)
        return again
    store = TCPStore(
        host,
        port,
        world_size if world_size > 0 else None,
        rank == 0,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    if rank == 0 and port:
        _served[host, port] = store
    return store
