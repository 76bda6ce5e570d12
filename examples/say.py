"""Printing that stays readable with many ranks; shared by the examples."""

from __future__ import annotations

import hpcdist as dist


def say(text: object) -> None:
    """Print one line (or more) per rank, in the order of the ranks. All ranks must call it.

    Processes that print for themselves mix their lines at random, so rank 0 collects the texts
    and prints them all.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    texts = [None] * size if rank == 0 else None
    dist.gather_object(str(text), texts, dst=0)
    if texts is not None:
        for sender, lines in enumerate(texts):
            for line in lines.splitlines():
                print(f"[rank {sender}] {line}", flush=True)


def title(text: str) -> None:
    """Print a heading, once."""
    if dist.get_rank() == 0:
        print(f"\n{text}", flush=True)
