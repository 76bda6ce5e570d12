"""hpcdist's groups as process groups of stock torch.distributed.

torch calls a Python process group from two sides: from its Python functions, which find methods as
attributes, and from C++ (DDP's reducer, functional collectives), which finds them by the names of
its trampolines. Names changed between versions of torch: see `compat`.
"""

# torch's stubs describe the overloads of its C++ class; its trampolines pass lists and options.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Work

from hpcdist.backends.dispatch import barrier_device
from hpcdist.collectives.monitored_barrier import monitored_barrier
from hpcdist.groups import sparse
from hpcdist.groups.c10d import device_of
from hpcdist.groups.numbers import split_sizes
from hpcdist.torch.arguments import blocks, bounded, every, one, op_of, plain, root_of
from hpcdist.torch.base import NAME, BridgeBase
from hpcdist.torch.compat import NAMES
from hpcdist.torch.elsewhere import by_device
from hpcdist.torch.ranges import shown
from hpcdist.torch.work import BridgeWork, flat

__all__ = ["NAME", "BridgeGroup"]


class BridgeGroup(BridgeBase):
    """A group of hpcdist's, as torch.distributed sees it.

    It has no communicator of its own: what both sides call runs in one order, through one entry
    check.

    Parameters
    ----------
    group : hpcdist.ProcessGroup
        The group; this process is a member.
    release : callable, optional
        Called once when torch destroys the group: frees what was made for it.

    Notes
    -----
    Made by ``torch.distributed.init_process_group("hpcdist")`` and ``new_group``, and by
    :func:`hpcdist.torch.to_torch`. Its methods are called by torch, on all members.
    """

    # --- collectives -----------------------------------------------------------------------------

    @by_device
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        root, opts = root_of(opts), bounded(opts, timeout)
        tensor = one(tensors)
        if self.noted is not None:
            self.noted.append(tensor)
        both = [tensor]
        return self._call("broadcast", opts, both, both, tensor, root)

    @by_device
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        op, opts = op_of(opts), bounded(opts, timeout)
        tensor = one(tensors)
        if tensor.is_sparse:  # of DDP with a sparse embedding, for example
            return self._now(
                "sparse_all_reduce", opts, [tensor], sparse.all_reduce, self._carrier, tensor, op
            )
        both = [tensor]
        return self._call("all_reduce", opts, both, both, tensor, op)

    @by_device
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        both = every(tensors)
        return self._call("all_reduce_coalesced", opts, both, both, both, op_of(opts))

    @by_device
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        tensor = one(tensors)
        both = [tensor]
        root, kind = root_of(opts), op_of(opts if hasattr(opts, "reduceOp") else op)
        opts = bounded(opts, timeout)
        return self._call("reduce", opts, both, both, tensor, root, kind)

    @by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        opts = bounded(opts, timeout)
        gathered, own = every(outputs), one(inputs)
        return self._call("all_gather", opts, [own], [gathered], gathered, own)

    @by_device
    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        lists, own = [every(outputs) for outputs in output_lists], every(inputs)
        # gloo's future, the only one of torch's: of a group of one rank its list alone
        held = lists if len(lists) > 1 else flat(lists)
        work = self._call("all_gather_coalesced", opts, own, held, lists, own)
        if isinstance(work, BridgeWork):
            work.stacks = False
        return work

    @by_device
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        output, input = plain(output), plain(input)
        return self._call("all_gather_into_tensor", opts, [input], [output], output, input)

    @by_device
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.all_gather_single, outputs, inputs, opts)

    @by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        root, own = root_of(opts), one(inputs)
        opts = bounded(opts, timeout)
        gathered = every(outputs) if self._carrier.rank == root else None
        return self._call("gather", opts, [own], gathered or [], own, gathered, root)

    @by_device
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        root, own = root_of(opts), plain(input)
        if self._carrier.rank != root:  # torch passes an empty output
            return self._call("gather", opts, [own], [], own, None, root)
        gathered = plain(output)
        parts = blocks(gathered, own, self._carrier.size)
        return self._call("gather", opts, [own], [gathered], own, parts, root)

    @by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        root, output = root_of(opts), one(outputs)
        opts = bounded(opts, timeout)
        parts = every(inputs) if self._carrier.rank == root else None
        return self._call("scatter", opts, parts or [], [output], output, parts, root)

    @by_device
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        op, opts = op_of(opts), bounded(opts, timeout)
        output, parts = one(outputs), every(inputs)
        return self._call("reduce_scatter", opts, [parts], [output], output, parts, op)

    @by_device
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        output, input = plain(output), plain(input)
        return self._call(
            "reduce_scatter_tensor", opts, [input], [output], output, input, op_of(opts)
        )

    @by_device
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.reduce_scatter_single, outputs, inputs, opts)

    @by_device
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        received, sent = every(outputs), every(inputs)
        return self._call("all_to_all", opts, sent, received, received, sent)

    @by_device
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        opts = bounded(opts, timeout)
        output, input = plain(output), plain(input)
        outs, ins = split_sizes(self._carrier, input, output_splits, input_splits)
        return self._call("all_to_all_single", opts, [input], [output], output, input, outs, ins)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        opts = bounded(opts, timeout)
        return self._call("barrier", opts, [], [], **barrier_device(self._carrier, device_of(opts)))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        # here zero is a limit: torch's "not set" is None or negative
        limit = timeout if timeout is not None and timeout >= timedelta(0) else None
        monitored_barrier(self.ours, limit, wait_all_ranks)

    # --- point to point --------------------------------------------------------------------------

    # torch makes isend and irecv from these, and waits itself where the call is a blocking one: a
    # send that blocked here would deadlock its batches.

    @by_device
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensor = one(tensors)
        entry = None
        if self._recorder is not None:
            entry = self._note("send", [tensor], [], f"{self._carrier.rank}->{dst}")
        start = shown("send", [tensor], self._serving(tensor).isend, NAME)
        return self._collect(BridgeWork(start(tensor, dst, tag), [tensor], entry))

    @by_device
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        tensor = one(tensors)
        entry = None
        if self._recorder is not None:
            entry = self._note("recv", [], [tensor], f"{self._carrier.rank}<-{src}")
        title = "recv" if src >= 0 else "recvAnySource"
        start = shown(title, [tensor], self._serving(tensor).irecv, NAME)
        return self._collect(BridgeWork(start(tensor, src, tag), [tensor], entry))

    @by_device
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)


for _renamed in NAMES:
    setattr(BridgeGroup, _renamed.other, getattr(BridgeGroup, _renamed.ours))
