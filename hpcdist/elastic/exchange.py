"""What the ranks of an elastic job tell each other, and send to their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcdist.backends.carrier import Carrier
from hpcdist.collectives.objects import all_gather_object
from hpcdist.groups.world import world

#: Of the messages to neighbours.
TAG = 65_521


def gathered(thing: Any) -> list[Any]:
    """Return what each rank gave, by rank; all must call it."""
    everyone: list[Any] = [None] * world.comm.size
    all_gather_object(everyone, thing)
    return everyone


def spread(
    packed: torch.Tensor, copies: int, carrier: Carrier | None = None
) -> dict[int, torch.Tensor]:
    """Send bytes to the next ranks, and return what those before have sent; all must call it.

    Parameters
    ----------
    packed : torch.Tensor
        This rank's bytes.
    copies : int
        To how many ranks.
    carrier : Carrier, optional
        Of the group whose ranks these are; None means the default group.

    Returns
    -------
    dict
        Of bytes, by the rank that sent them.
    """
    carrier = carrier or world.comm
    rank, size = carrier.rank, carrier.size
    received = {}
    for distance in range(1, min(copies, size - 1) + 1):
        to, source = (rank + distance) % size, (rank - distance) % size
        received[source] = swap(packed, to, [source], carrier)[source]
    return received


def swap(
    packed: torch.Tensor | None,
    to: int | None,
    sources: Sequence[int],
    carrier: Carrier | None = None,
) -> dict[int, torch.Tensor]:
    """Send bytes to one rank, or none, and receive those of others.

    Parameters
    ----------
    packed : torch.Tensor or None
        Bytes, for `to`.
    to : int or None
        Rank of the group.
    sources : sequence of int
        Ranks that send to this one.
    carrier : Carrier, optional
        Of the group; None means the default group.

    Returns
    -------
    dict
        What each of them sent.
    """
    carrier = carrier or world.comm
    sizes = {source: torch.zeros(1, dtype=torch.int64, device="cpu") for source in sources}
    works = [carrier.irecv(size, source, TAG) for source, size in sizes.items()]
    if packed is not None and to is not None:
        carrier.send(torch.tensor([packed.numel()], device="cpu"), to, TAG)
    for work in works:
        work.wait()
    received = {
        s: torch.empty(int(size), dtype=torch.uint8, device="cpu") for s, size in sizes.items()
    }
    works = [carrier.irecv(data, source, TAG) for source, data in received.items()]
    if packed is not None and to is not None:
        carrier.send(packed, to, TAG)
    for work in works:
        work.wait()
    return received
