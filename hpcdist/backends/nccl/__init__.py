"""The NCCL backend: collectives among GPUs, on torch's streams.

``group`` is the backend, made of parts: ``channel`` exchanges what ranks need before NCCL is up,
``communicators`` makes and ends the communicators, ``hpcdist._nccl.StreamQueue`` starts operations
and keeps those in flight, ``recording`` tells the flight recorder. ``reductions``, ``movements``,
``messages`` and ``host_arrays`` are the operations; ``derive`` makes communicators from other
groups'. Nothing here loads NCCL or torch before a group is made.
"""

from __future__ import annotations

from typing import Any

from hpcdist import _nccl_loader
from hpcdist.backends.base import BackendOptions
from hpcdist.backends.registry import Backend
from hpcdist.errors import DistBackendError

from .options import NCCLOptions

__all__ = ["NCCLOptions", "create"]


def create(options: BackendOptions, pg_options: Any = None) -> Any:
    """Make the NCCL backend of a group.

    Parameters
    ----------
    options : BackendOptions
        The group.
    pg_options : NCCLOptions, optional
        Options of the group.

    Returns
    -------
    hpcdist.backends.nccl.group.NcclGroup
        Its communicators are made now if the device is known, or if they can be derived from the
        parent's; else by the first operation on each device.

    Raises
    ------
    TypeError
        If `pg_options` is not NCCLOptions.
    DistBackendError
        If there is no NCCL to use, or the processes met without MPI and without a store.

    Notes
    -----
    All members must call it.
    """
    from . import channel, derive, group

    try:
        _nccl_loader.load()
    except DistBackendError as error:
        raise DistBackendError(f"the backend 'nccl' is not available: {error}") from None
    if pg_options is None:
        pg_options = NCCLOptions()
    elif not isinstance(pg_options, NCCLOptions):
        raise TypeError(
            f"pg_options of the nccl backend must be hpcdist.NCCLOptions, not "
            f"{type(pg_options).__name__}"
        )
    made = group.NcclGroup(channel.create(options), options, pg_options)
    try:
        if isinstance(options.parent, group.NcclGroup):
            derive.derive(made, options.parent, options)
        if options.device is not None:
            made.communicators.connect(options.device)
    except BaseException:
        made.free()
        raise
    return made


Backend.register_backend(Backend.NCCL, create, extended_api=True, devices=["cuda"])
