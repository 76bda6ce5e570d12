"""Makes communicators from another group's, which costs less than a new one.

NCCL divides a communicator by an operation of all its ranks (``ncclCommSplit``), and leaves ranks
out of it by one of those that stay (``ncclCommShrink``, 2.27 and newer). Where one of the ranks has
no communicator to start from, the group makes its own at its first operation, like any other.
"""

from __future__ import annotations

from hpcdist import _nccl_loader, config
from hpcdist.backends.base import BackendOptions

from .group import NcclGroup


def derive(child: NcclGroup, parent: NcclGroup, options: BackendOptions) -> None:
    """Make a new group's communicator from its parent's, if all ranks have that one.

    Parameters
    ----------
    child, parent : NcclGroup
        The groups; `child` has no communicator yet.
    options : BackendOptions
        What `child` was made of.

    Raises
    ------
    DistBackendError, RankFailedError, DistTimeoutError
        If NCCL began it and failed.
    """
    if options.shrinks is not None:
        _shrink(child, parent, options)
    elif options.divides and config.get("nccl_split"):
        _split(child, parent, options)


def _split(child: NcclGroup, parent: NcclGroup, options: BackendOptions) -> None:
    index = parent.queue.index()
    with parent.queue.lock:
        parent.derived += 1
        comm = parent.communicators.usable(index)
        # NCCL splits a communicator only while nothing is in flight on it
        ready = comm is not None and parent.queue.drain(parent.timeout) is None
        if not parent.channel.all_ready(f"split/{parent.derived}", ready, parent.timeout):
            return
        assert comm is not None
        # the parts have no rank in common: the first one's number names each of them
        color = options.parent_ranks[0]
        child.communicators.adopt(
            index, lambda: comm.split(color, child.rank, child.timeout), "ncclCommSplit"
        )


def _shrink(child: NcclGroup, parent: NcclGroup, options: BackendOptions) -> None:
    index = parent.queue.index()
    aborts = bool(options.shrinks)
    with parent.queue.lock:
        comm = parent.communicators.usable(index)
        ready = comm is not None and "shrink" in _nccl_loader.load().optional
        ready = ready and (aborts or parent.queue.drain(parent.timeout) is None)
        if child.channel.all_ready("shrink", ready, child.timeout):
            assert comm is not None
            gone = set(range(parent.size)) - set(options.parent_ranks)
            child.communicators.adopt(
                index, lambda: comm.shrink(gone, aborts, child.timeout), "ncclCommShrink"
            )
        if aborts:
            parent.abort()
