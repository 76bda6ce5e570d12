"""The operations of a group, and what is true of each in more than one layer.

Places are those of arguments in :class:`hpcdist.backends.base.GroupBackend`; None: there is none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation.

    Attributes
    ----------
    name : str
        Of the backends' method.
    inputs, outputs : int or None
        Places of what it reads and writes.
    serves : int or None
        Place of the argument whose device says which backend serves it.
    op, root, asynchronous : int or None
        Places of the reduce operation, of the root or the peer, and of async_op.
    title : str
        What torch's profiler calls it.
    c10d, c10d_before : str
        The method of torch's process groups, and, if it had another name up to torch 2.12, that.
    traced : str
        What torchfrtrace calls it, if not by its title.
    """

    name: str
    inputs: int | None
    outputs: int | None
    serves: int | None
    op: int | None
    root: int | None
    asynchronous: int | None
    title: str
    c10d: str
    c10d_before: str = ""
    traced: str = ""


# fmt: off
OPERATIONS = {
    each.name: each
    for each in (
        # name, then places: inputs, outputs, serves, op, root, asynchronous; title, c10d
        Operation("all_reduce", 0, 0, 0, 1, None, 2, "all_reduce", "allreduce"),
        Operation("all_reduce_coalesced", 0, 0, 0, 1, None, 2, "all_reduce", "allreduce_coalesced",
                  traced="allreduce_coalesced"),
        Operation("broadcast", 0, 0, 0, None, 1, 2, "broadcast", "broadcast"),
        Operation("reduce", 0, 0, 0, 2, 1, 3, "reduce", "reduce"),
        Operation("all_gather", 1, 0, 1, None, None, 2, "all_gather", "allgather"),
        Operation("all_gather_into_tensor", 1, 0, 1, None, None, 2, "all_gather",
                  "all_gather_single", "_allgather_base", traced="_all_gather_base"),
        Operation("all_gather_coalesced", 1, 0, 1, None, None, 2, "all_gather",
                  "allgather_coalesced", traced="ALLGATHER_coalesced"),
        Operation("gather", 0, 1, 0, None, 2, 3, "gather", "gather"),
        Operation("scatter", 1, 0, 0, None, 2, 3, "scatter", "scatter"),
        Operation("reduce_scatter", 1, 0, 0, 2, None, 3, "reduce_scatter", "reduce_scatter"),
        Operation("reduce_scatter_tensor", 1, 0, 0, 2, None, 3, "reduce_scatter",
                  "reduce_scatter_single", "_reduce_scatter_base", traced="_reduce_scatter_base"),
        Operation("all_to_all", 1, 0, 1, None, None, 2, "all_to_all", "alltoall"),
        Operation("all_to_all_single", 1, 0, 0, None, None, 4, "all_to_all", "all_to_all_single",
                  "alltoall_base"),
        Operation("barrier", None, None, None, None, None, 0, "barrier", "barrier",
                  traced="all_reduce_barrier"),
        Operation("isend", 0, None, 0, None, 1, None, "send", "send"),
        Operation("irecv", None, 0, 0, None, 1, None, "recv", "recv"),
        Operation("send", 0, None, 0, None, 1, None, "send", "send"),
        Operation("recv", None, 0, 0, None, 1, None, "recv", "recv"),
    )
}
# fmt: on

#: What torchfrtrace calls operations, where it has another name for them.
TRACED_AS = {
    name: about.traced or about.title
    for name, about in OPERATIONS.items()
    if (about.traced or about.title) != name
}
