"""The shards of a ZeroRedundancyOptimizer's state, with copies in the memory of neighbours."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch

from hpcdist.collectives.objects import all_gather_object
from hpcdist.errors import DistError
from hpcdist.groups.world import world
from hpcdist.parallel.zero import ZeroRedundancyOptimizer

__all__ = ["Shards", "StateLostError"]


#: Of the messages to neighbours.
TAG = 65_521


class StateLostError(DistError):
    """A rank died together with all ranks that had a copy of its shard of the optimizer's state."""


def _pack(thing: Any) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(thing, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> Any:
    # tensors and plain values only: reading runs no code
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)


class Shards:
    """One optimizer's shards: this rank's, and copies of those of the ranks before it.

    Parameters
    ----------
    zero : ZeroRedundancyOptimizer
        Over the default group.
    copies : int
        How many of the next ranks get a copy of each shard: so many may die at once.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer, copies: int) -> None:
        self._zero = zero
        self._copies = copies

    def take(self) -> dict[str, Any]:
        """Return this rank's shard and its neighbours', by rank; all ranks must call it."""
        rank, size = world.comm.rank, world.comm.size
        mine = copy.deepcopy(self._zero.shard_state())
        held = {rank: mine}
        packed = _pack(mine)
        for distance in range(1, min(self._copies, size - 1) + 1):
            to, source = (rank + distance) % size, (rank - distance) % size
            held[source] = _unpack(_exchange(packed, to, source))
        return {
            "held": held,
            "size": size,
            "groups": copy.deepcopy(self._zero.shard_options()),
        }

    def restore(self, taken: dict[str, Any]) -> None:
        """Put the shards back; after a death the ranks that are left divide all of them anew.

        All ranks must call it.

        Raises
        ------
        StateLostError
            On all ranks, if a shard and all its copies are lost.
        """
        if taken["size"] == world.comm.size:
            own = taken["held"][world.comm.rank]
            self._zero.load_shard(copy.deepcopy(own), copy.deepcopy(taken["groups"]))
            return
        everyone: list[Any] = [None] * world.comm.size
        all_gather_object(everyone, _pack(taken["held"]).numpy())
        found: dict[int, Any] = {}
        for packed in everyone:
            found.update(_unpack(torch.from_numpy(packed)))
        lost = sorted(set(range(taken["size"])) - set(found))
        if lost:
            raise StateLostError(
                f"the optimizer's shards of the former ranks {lost} are lost: all "
                f"{self._copies + 1} ranks that had them died. Load a checkpoint from disk, or "
                "give State more copies"
            )
        whole: dict[int, Any] = {}
        for shard in found.values():
            whole.update(shard)
        self._zero.reshard(whole, copy.deepcopy(taken["groups"]))


def _exchange(packed: torch.Tensor, to: int, source: int) -> torch.Tensor:
    """Send bytes to one rank and receive those of another."""
    size = torch.zeros(1, dtype=torch.int64)
    work = world.comm.irecv(size, source, TAG)
    world.comm.send(torch.tensor([packed.numel()]), to, TAG)
    work.wait()
    received = torch.empty(int(size), dtype=torch.uint8)
    work = world.comm.irecv(received, source, TAG)
    world.comm.send(packed, to, TAG)
    work.wait()
    return received
