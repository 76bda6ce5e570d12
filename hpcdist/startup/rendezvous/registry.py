"""The known URL schemes and their handlers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from hpcdist.errors import DistNetworkError

Meeting = tuple[Any, int, int]
Handler = Callable[..., Iterator[Meeting]]

_handlers: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a URL scheme for :func:`rendezvous`.

    Local to this process; every rank that uses the scheme must register it.

    Parameters
    ----------
    scheme : str
        The part of the URL before ``://``, for example ``"etcd"``.
    handler : callable
        Generator function called as ``handler(url, **kwargs)``; it yields
        ``(store, rank, world_size)``. A rank and world size given to :func:`rendezvous` are in the
        URL's query.

    Raises
    ------
    RuntimeError
        If the scheme has a handler already.

    Notes
    -----
    Source: ``torch.distributed.register_rendezvous_handler``.
    """
    if scheme in _handlers:
        raise RuntimeError(f"the scheme {scheme}:// has a rendezvous handler already")
    _handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Meeting]:
    """Meet the other processes as a URL specifies.

    Parameters
    ----------
    url : str
        ``"mpi://"``, ``"env://"``, ``"tcp://host:port"``, ``"file:///path"``, or of a registered
        scheme. Rank and world size may be in its query: ``scheme://...?rank=0&world_size=4``.
    rank : int
        This process's rank, if the URL does not contain it; -1 for not given.
    world_size : int
        Number of processes, if the URL does not contain it; -1 for not given.
    **kwargs
        Passed on to the scheme's handler (``timeout``, a :class:`datetime.timedelta`).

    Returns
    -------
    iterator
        Its first item is ``(store, rank, world_size)``; ``mpi://`` yields no store, and -1 for what
        its launcher leaves to MPI. Further items depend on the handler.

    Raises
    ------
    TypeError
        If an argument is of the wrong type.
    ValueError
        If rank or world size are given twice, or are not whole numbers; if a part of the URL is
        missing.
    DistNetworkError
        If no handler is known for the scheme.

    Notes
    -----
    All ranks must call it, with the same URL. Source: ``torch.distributed.rendezvous``.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be a str such as 'mpi://', not {type(url).__name__}")
    rank = _whole(rank, "rank")
    world_size = _whole(world_size, "world_size")
    parts = urlsplit(url)
    handler = _handlers.get(parts.scheme)
    if handler is None:
        raise DistNetworkError(_unknown(url, parts.scheme if "://" in url else ""))
    if rank != -1 or world_size != -1:
        query = dict(parse_qsl(parts.query))
        for name, value in (("rank", rank), ("world_size", world_size)):
            if value == -1:
                continue
            if name in query:
                raise ValueError(f"{name} is given twice: in the URL {url} and as an argument")
            query[name] = str(value)
        # urlunsplit would drop the "//" of a URL without a host
        rest = urlunsplit(("", parts.netloc, parts.path, urlencode(query), parts.fragment))
        url = f"{parts.scheme}:{rest}" if rest.startswith("//") else f"{parts.scheme}://{rest}"
    return handler(url, **kwargs)


def _whole(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None


def _unknown(url: str, scheme: str) -> str:
    known = ", ".join(f"{name}://" for name in sorted(_handlers))
    if not scheme:
        return f"No rendezvous handler: the init method {url!r} has no scheme; there are: {known}"
    return (
        f"No rendezvous handler for {scheme}://; there are: {known}. Under mpirun or srun omit "
        "init_method: rank, size and addresses come from MPI. Other schemes can be added with "
        "register_rendezvous_handler."
    )
