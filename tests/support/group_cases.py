"""What the tests of groups share."""

from __future__ import annotations

import torch

import hpcdist as dist

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


def place() -> tuple[int, int]:
    """Rank and size in the default group."""
    return dist.get_rank(), dist.get_world_size()


def sum_over(group) -> int:
    """The sum of the world ranks of a group's members."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total)


def raised(call) -> str:
    """The text of the error a call raises, or an empty string."""
    try:
        call()
    except (ValueError, TypeError, dist.DistError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
