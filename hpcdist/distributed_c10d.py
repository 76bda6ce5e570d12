"""The names of ``torch.distributed.distributed_c10d``: those of hpcdist, and some of its own."""

from __future__ import annotations

from typing import Any

import hpcdist
from hpcdist import *  # noqa: F403
from hpcdist.collectives.coalescing import _coalescing_manager
from hpcdist.collectives.deprecated import _make_nccl_premul_sum
from hpcdist.groups.resolve import default_group as _get_default_group
from hpcdist.groups.state import world
from hpcdist.groups.timeouts import default_pg_timeout

__all__ = [  # noqa: PLE0604
    *hpcdist.__all__,
    "_coalescing_manager",
    "_get_default_group",
    "_get_default_store",
    "_make_nccl_premul_sum",
    "_rank_not_in_group",
    "default_pg_timeout",
]


def _get_default_store() -> Any:
    """Return the key-value store that the processes met through, or raise ValueError.

    Local. Source: ``torch.distributed.distributed_c10d._get_default_store``.
    """
    _get_default_group()
    if world.store is None:
        raise ValueError("the processes met without a store: MPI alone started them (mpi://)")
    return world.store


def _rank_not_in_group(group: Any) -> bool:
    """Return whether this process is outside a group; None means the default group.

    Local. Source: ``torch.distributed.distributed_c10d._rank_not_in_group``.
    """
    return group is not None and group is hpcdist.GroupMember.NON_GROUP_MEMBER
