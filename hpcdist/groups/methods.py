"""The collectives as methods of a group: ``pg.all_reduce(t)``."""

from __future__ import annotations

from typing import Any, Literal, overload

from hpcdist._engine import Work
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing
from hpcdist.groups.c10d import BarrierOptions
from hpcdist.groups.members import Members
from hpcdist.groups.numbers import split_sizes
from hpcdist.groups.reductions import Reductions
from hpcdist.groups.tensors import stacked

__all__ = ["Collectives"]


class Collectives(Reductions):
    """The part of :class:`hpcdist.ProcessGroup` that moves data among all its ranks.

    Ranks are group ranks. Each method makes one native call, which checks the arguments.
    """

    __slots__ = ()

    # of ProcessGroup
    carrier: Carrier
    members: Members
    _root: Any
    _with: Any

    def _listed(self, api: str, tensor: Any, given: Any, root: int, role: str) -> bool:
        """Whether this rank is the root, the only rank that has a list."""
        comm = self.carrier
        here = bool(comm.rank == root)
        if here is bool(given):
            return here
        if here:
            where = f"rank (rank {root} of the group {self.members.name!r}, which this process is)"
        else:
            where = (
                f"rank only (rank {root} of the group {self.members.name!r}; this process is rank "
                f"{comm.rank})"
            )
        error = ValueError(f"{api}_list must be given on the {role} {where}")
        agreeing(comm, tensor).refuse(error, api=api)
        raise error

    def _gather(self, tensor: Any, gather_list: Any, root: int, async_op: bool) -> Work | None:
        """Gather; only the root may have a list."""
        here = self._listed("gather", tensor, gather_list, root, "destination")
        return self.carrier.gather(tensor, gather_list if here else None, root, async_op)

    def _gather_single(self, tensor: Any, whole: Any, root: int, async_op: bool) -> Work | None:
        """Gather into one tensor; only the root may have one."""
        comm = self.carrier
        try:
            if (whole is not None) is not (comm.rank == root):
                where = "must be given" if whole is None else "must be None"
                raise ValueError(
                    f"gather_tensor {where} on rank {comm.rank} of the group "
                    f"{self.members.name!r}, whose destination is rank {root}"
                )
            parts = None if whole is None else stacked(tensor, whole, comm.size)
        except Exception as error:
            agreeing(comm, tensor).refuse(error, api="gather_single")
            raise
        return comm.gather(tensor, parts, root, async_op, api="gather_single")

    def _scatter(self, tensor: Any, scatter_list: Any, root: int, async_op: bool) -> Work | None:
        """Scatter; only the root may have a list."""
        here = self._listed("scatter", tensor, scatter_list, root, "source")
        return self.carrier.scatter(tensor, scatter_list if here else None, root, async_op)

    @overload
    def broadcast(self, tensor: Any, group_src: int, async_op: Literal[False] = ...) -> None: ...

    @overload
    def broadcast(self, tensor: Any, group_src: int, *, async_op: Literal[True]) -> Work: ...

    @overload
    def broadcast(self, tensor: Any, group_src: int, async_op: bool = ...) -> Work | None: ...

    def broadcast(self, tensor: Any, group_src: int, async_op: bool = False) -> Work | None:
        """Copy the tensor of one rank to all.

        All ranks of the group must call it. See :func:`hpcdist.broadcast`.
        """
        root = self._root("broadcast", tensor, None, group_src, "src")
        return self.carrier.broadcast(tensor, root, async_op)

    @overload
    def all_gather(self, tensor_list: Any, tensor: Any, async_op: Literal[False] = ...) -> None: ...

    @overload
    def all_gather(self, tensor_list: Any, tensor: Any, *, async_op: Literal[True]) -> Work: ...

    @overload
    def all_gather(self, tensor_list: Any, tensor: Any, async_op: bool = ...) -> Work | None: ...

    def all_gather(self, tensor_list: Any, tensor: Any, async_op: bool = False) -> Work | None:
        """Collect a tensor of each rank in a list on all ranks; sizes may differ between ranks.

        All ranks of the group must call it. See :func:`hpcdist.all_gather`.
        """
        return self.carrier.all_gather(tensor_list, tensor, async_op)

    @overload
    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, async_op: Literal[False] = ...
    ) -> None: ...

    @overload
    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, async_op: bool = ...
    ) -> Work | None: ...

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, async_op: bool = False
    ) -> Work | None:
        """Collect equal tensors of all ranks into one tensor on all ranks.

        All ranks of the group must call it. See :func:`hpcdist.all_gather_single`.
        """
        return self.carrier.all_gather_into_tensor(output_tensor, input_tensor, async_op)

    @overload
    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, async_op: Literal[False] = ...
    ) -> None: ...

    @overload
    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, async_op: bool = ...
    ) -> Work | None: ...

    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, async_op: bool = False
    ) -> Work | None:
        """Collect several tensors of each rank on all ranks in one operation.

        All ranks of the group must call it. See :func:`hpcdist.all_gather_coalesced`.
        """
        return self.carrier.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op)

    @overload
    def gather(
        self,
        tensor: Any,
        gather_list: Any = ...,
        group_dst: int = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...

    @overload
    def gather(
        self, tensor: Any, gather_list: Any = ..., group_dst: int = ..., *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def gather(
        self, tensor: Any, gather_list: Any = ..., group_dst: int = ..., async_op: bool = ...
    ) -> Work | None: ...

    def gather(
        self, tensor: Any, gather_list: Any = None, group_dst: int = 0, async_op: bool = False
    ) -> Work | None:
        """Collect a tensor of each rank in a list on one rank.

        All ranks of the group must call it. See :func:`hpcdist.gather`.
        """
        root = self._root("gather", tensor, None, group_dst, "dst")
        return self._gather(tensor, gather_list, root, async_op)

    @overload
    def gather_single(
        self,
        tensor: Any,
        gather_tensor: Any = ...,
        group_dst: int = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...

    @overload
    def gather_single(
        self,
        tensor: Any,
        gather_tensor: Any = ...,
        group_dst: int = ...,
        *,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def gather_single(
        self, tensor: Any, gather_tensor: Any = ..., group_dst: int = ..., async_op: bool = ...
    ) -> Work | None: ...

    def gather_single(
        self, tensor: Any, gather_tensor: Any = None, group_dst: int = 0, async_op: bool = False
    ) -> Work | None:
        """Collect equal tensors of all ranks in one tensor on one rank.

        All ranks of the group must call it. See :func:`hpcdist.gather_single`.
        """
        root = self._root("gather_single", tensor, None, group_dst, "dst")
        return self._gather_single(tensor, gather_tensor, root, async_op)

    @overload
    def scatter(
        self,
        tensor: Any,
        scatter_list: Any = ...,
        group_src: int = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...

    @overload
    def scatter(
        self, tensor: Any, scatter_list: Any = ..., group_src: int = ..., *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def scatter(
        self, tensor: Any, scatter_list: Any = ..., group_src: int = ..., async_op: bool = ...
    ) -> Work | None: ...

    def scatter(
        self, tensor: Any, scatter_list: Any = None, group_src: int = 0, async_op: bool = False
    ) -> Work | None:
        """Give each rank its tensor of one rank's list.

        All ranks of the group must call it. See :func:`hpcdist.scatter`.
        """
        root = self._root("scatter", tensor, None, group_src, "src")
        return self._scatter(tensor, scatter_list, root, async_op)

    @overload
    def all_to_all(
        self, output_tensor_list: Any, input_tensor_list: Any, async_op: Literal[False] = ...
    ) -> None: ...

    @overload
    def all_to_all(
        self, output_tensor_list: Any, input_tensor_list: Any, *, async_op: Literal[True]
    ) -> Work: ...

    @overload
    def all_to_all(
        self, output_tensor_list: Any, input_tensor_list: Any, async_op: bool = ...
    ) -> Work | None: ...

    def all_to_all(
        self, output_tensor_list: Any, input_tensor_list: Any, async_op: bool = False
    ) -> Work | None:
        """Send the i-th input to rank i and receive the i-th output from it.

        All ranks of the group must call it. See :func:`hpcdist.all_to_all`.
        """
        return self.carrier.all_to_all(output_tensor_list, input_tensor_list, async_op)

    @overload
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = ...,
        input_split_sizes: Any = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...

    @overload
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = ...,
        input_split_sizes: Any = ...,
        *,
        async_op: Literal[True],
    ) -> Work: ...

    @overload
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = ...,
        input_split_sizes: Any = ...,
        async_op: bool = ...,
    ) -> Work | None: ...

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send the i-th part of a tensor to rank i and receive the i-th part of another from it.

        All ranks of the group must call it. See :func:`hpcdist.all_to_all_single`.
        """
        splits = split_sizes(self.carrier, input, output_split_sizes, input_split_sizes)
        return self.carrier.all_to_all_single(output, input, *splits, async_op)

    @overload
    def barrier(self, async_op: Literal[False] = ...) -> None: ...

    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work: ...

    @overload
    def barrier(self, async_op: BarrierOptions) -> Work: ...

    @overload
    def barrier(self, *, opts: BarrierOptions) -> Work: ...

    @overload
    def barrier(self, async_op: bool = ...) -> Work | None: ...

    def barrier(
        self, async_op: bool | BarrierOptions = False, *, opts: BarrierOptions | None = None
    ) -> Work | None:
        """Wait until all ranks of the group have called.

        All ranks of the group must call it. See :func:`hpcdist.barrier`.

        Parameters
        ----------
        async_op : bool or BarrierOptions
            Return a handle at once; options may stand here, as in torch's C++ layer.
        opts : BarrierOptions, optional
            Options, of which the `timeout` counts; with them the call always returns a handle.

        Returns
        -------
        Work or None
            The handle, if one was asked for.
        """
        if opts is None and not hasattr(async_op, "asyncOp"):  # torch's class has it too
            return self.carrier.barrier(async_op)
        options = async_op if opts is None else opts
        return self._with(options, None, lambda: self.carrier.barrier(True))

    all_gather_single = all_gather_into_tensor
    gather_into_tensor = gather_single
