"""Lists and tensors that only the root of a collective has."""

from __future__ import annotations

from typing import Any

from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing
from hpcdist.groups.tensors import stacked
from hpcdist.typing import TensorLike


def has_list(
    comm: Carrier, group: str, api: str, tensor: TensorLike, given: Any, root: int, role: str
) -> bool:
    """Whether this rank is the root, the only rank that has a list; else the others hear of it."""
    here = comm.rank == root
    if comm.rank < 0:
        return here
    try:  # a tensor or an array has no truth value, an iterator no length
        has = given is not None and (not hasattr(given, "__len__") or len(given) > 0)
    except Exception as raised:
        agreeing(comm, tensor).refuse(raised, api=api)
        raise
    if here is has:
        return here
    if here:
        where = f"rank (rank {root} of the group {group!r}, which this process is)"
    else:
        where = f"rank only (rank {root} of the group {group!r}; this process is rank {comm.rank})"
    error = ValueError(f"{api}_list must be given on the {role} {where}")
    agreeing(comm, tensor).refuse(error, api=api)
    raise error


def parts_of_root(
    comm: Carrier, group: str, tensor: TensorLike, whole: Any, root: int
) -> list[Any] | None:
    """Return the ranks' parts of the one tensor of `gather_single`, which only the root has."""
    try:
        if (whole is not None) is not (comm.rank == root):
            where = "must be given" if whole is None else "must be None"
            raise ValueError(
                f"gather_tensor {where} on rank {comm.rank} of the group {group!r}, whose "
                f"destination is rank {root}"
            )
        return None if whole is None else stacked(tensor, whole, comm.size)
    except Exception as error:
        agreeing(comm, tensor).refuse(error, api="gather_single")
        raise
