"""Who computes which share of a batch, and how what a share alone has gets there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.elastic.commit import packed, unpacked
from hpcdist.elastic.exchange import gathered, swap
from hpcdist.elastic.shards import StateLostError
from hpcdist.groups.world import world


def deal(count: int, homes: Sequence[int | None]) -> list[list[int]]:
    """Deal the shares of a batch to the ranks, as evenly as possible.

    Parameters
    ----------
    count : int
        Shares.
    homes : sequence of (int or None)
        By rank, the share that it keeps; None if it has none.

    Returns
    -------
    list of list of int
        By rank, its shares, in order. A share that no rank keeps goes to the rank with the fewest;
        among these to the one behind the share, which has a copy of what the share alone has. So
        rank 0 has share 0, unless another rank has none. The same on all ranks; local.
    """
    dealt = [[] if home is None else [home] for home in homes]
    for share in sorted(set(range(count)) - set(homes)):

        def place(rank: int, share: int = share) -> tuple[int, int, int]:
            home = homes[rank]
            away = count if home is None else (home - share) % count
            return len(dealt[rank]), away, rank

        dealt[min(range(len(homes)), key=place)].append(share)
    return [sorted(shares) for shares in dealt]


def exchange(
    have: Mapping[int, Any], dealt: Sequence[Sequence[int]], copies: int
) -> dict[int, Any]:
    """Give each rank what its shares alone have; all ranks must call it.

    Parameters
    ----------
    have : mapping
        By share, what this rank has a copy of.
    dealt : sequence of sequence of int
        By rank, its shares.
    copies : int
        How many ranks got a copy, for the error.

    Returns
    -------
    dict
        By share, those of this rank.

    Raises
    ------
    StateLostError
        On all ranks, if no rank has a copy of one.
    """
    rank, held = world.comm.rank, gathered(sorted(have))
    holders = {share: other for other in reversed(range(len(held))) for share in held[other]}
    lost = sorted({share for shares in dealt for share in shares} - set(holders))
    if lost:
        raise StateLostError(
            f"what the shares {lost} of the batch alone had, random numbers, buffers and values, "
            f"is lost: all {copies + 1} ranks that had it died. Load a checkpoint from disk, or "
            "give State more copies"
        )
    got = {share: have[share] for share in dealt[rank] if share in have}
    for other, shares in enumerate(dealt):
        for share in shares:
            source = holders[share]
            if share in held[other] or rank not in (source, other):
                continue
            if rank == source:
                swap(packed(have[share]), other, [])
            else:
                got[share] = unpacked(swap(None, None, [source])[source])
    return got
