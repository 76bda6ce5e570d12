"""Lists and tensors that only the root of a collective has."""

from __future__ import annotations

from typing import Any

from hpcdist.backends.dispatch import agreeing
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.tensors import stacked
from hpcdist.groups.world import NonMember

__all__ = ["has_list", "parts_of_root"]


def has_list(
    pg: ProcessGroup | NonMember, api: str, tensor: Any, given: Any, root: int, role: str
) -> bool:
    """Whether this rank is the root, the only rank that has a list; else the others hear of it."""
    comm = pg.carrier
    here = comm.rank == root
    if here is bool(given) or isinstance(pg, NonMember):
        return here
    if here:
        where = f"rank (rank {root} of the group {pg.members.name!r}, which this process is)"
    else:
        where = (
            f"rank only (rank {root} of the group {pg.members.name!r}; this process is rank "
            f"{comm.rank})"
        )
    error = ValueError(f"{api}_list must be given on the {role} {where}")
    agreeing(comm, tensor).refuse(error, api=api)
    raise error


def parts_of_root(pg: ProcessGroup, tensor: Any, whole: Any, root: int) -> list[Any] | None:
    """Return the ranks' parts of the one tensor of `gather_single`, which only the root has."""
    comm = pg.carrier
    try:
        if (whole is not None) is not (comm.rank == root):
            where = "must be given" if whole is None else "must be None"
            raise ValueError(
                f"gather_tensor {where} on rank {comm.rank} of the group {pg.members.name!r}, "
                f"whose destination is rank {root}"
            )
        return None if whole is None else stacked(tensor, whole, comm.size)
    except Exception as error:
        agreeing(comm, tensor).refuse(error, api="gather_single")
        raise
