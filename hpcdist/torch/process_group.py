"""hpcdist's groups as process groups of stock torch.distributed.

torch calls a Python process group from two sides: from its Python functions, which find methods as
attributes, and from C++ (DDP's reducer, functional collectives), which finds them by the names of
its trampolines. Names changed between versions of torch; the older ones stand as aliases below.
"""

# torch's stubs describe the overloads of its C++ class; its trampolines pass lists and options.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed import ReduceOp as TorchOp

from hpcdist._engine import EITHER
from hpcdist.ops.monitored import monitored_barrier
from hpcdist.torch.work import AllOf, BridgeWork, FinishedWork, limit_of
from hpcdist.work import ReduceOp

__all__ = ["NAME", "BridgeGroup"]

#: Name of the backend.
NAME = "hpcdist"

_OPS = {
    kind: getattr(ReduceOp, name)
    for name, kind in TorchOp.RedOpType.__members__.items()
    if name != "PREMUL_SUM"
}


def _op(opts: Any) -> Any:
    """Translate a reduce operation of torch's: an enum value, or an object with a factor."""
    op: Any = getattr(opts, "reduceOp", TorchOp.SUM if opts is None else opts)
    try:
        return _OPS[op]
    except (KeyError, TypeError):
        kind, factor = op.__getstate__()
        return _OPS[kind] if factor is None else ReduceOp.PREMUL_SUM(factor)


def _plain(tensor: Any) -> Any:
    """Give a tensor's memory apart from autograd, which torch's own backends do not ask either."""
    return tensor.detach() if tensor.requires_grad else tensor


def _one(tensors: Any) -> Any:
    """Give the tensor of a list of one; torch passes lists where gloo once took several."""
    if isinstance(tensors, torch.Tensor):
        return _plain(tensors)
    if len(tensors) != 1:
        raise ValueError(f"one tensor is expected, not {len(tensors)}")
    return _plain(tensors[0])


def _all(items: Sequence[Any]) -> list[Any]:
    """Give the list of tensors in a list of one list, or in a list that is it already."""
    tensors = items[0] if items and not isinstance(items[0], torch.Tensor) else items
    return [_plain(tensor) for tensor in tensors]


class BridgeGroup(ProcessGroup):
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

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: Any, release: Callable[[], None] | None = None) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.native = group
        self._comm = group._comm
        self._release = release
        self._name = group.name
        self._description = group.group_desc
        self._coalesced: list[Work] | None = None

    # --- who it is -------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def getRank(self) -> int:
        return int(self._comm.rank)

    def getSize(self) -> int:
        return int(self._comm.size)

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def __repr__(self) -> str:
        return f"<hpcdist.torch.BridgeGroup {self._name!r} of {self.native!r}>"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> BridgeGroup:
        return self

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return int(self._comm.seq)

    def set_timeout(self, timeout: timedelta) -> None:
        self._comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # --- its end ---------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free what was made for torch; hpcdist's own groups stay."""
        release, self._release = self._release, None
        if release is not None:
            release()

    abort = shutdown

    # --- how a call runs -------------------------------------------------------------------------

    def _call(self, opts: Any, outputs: list[Any], method: Callable[..., Any], *args: Any) -> Work:
        """Run a method of the native group as torch's options say."""
        limit = limit_of(getattr(opts, "timeout", None))
        # asyncOp came with torch 2.9; C++ callers leave it at True
        if getattr(opts, "asyncOp", True) or limit is not None:
            # torch lets one rank wait and another not
            work = BridgeWork(method(*args, EITHER), outputs, limit)
            if getattr(opts, "asyncOp", True):
                return self._collect(work)
            work.wait()
        else:
            method(*args)
        return self._collect(FinishedWork(outputs))

    def _collect(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return AllOf(works)

    # --- collectives -----------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensor = _one(tensors)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        return self._call(opts, [tensor], self._comm.broadcast, tensor, root)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensor = _one(tensors)
        return self._call(opts, [tensor], self._comm.all_reduce, tensor, _op(opts))

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        outputs = _all(tensors)
        return self._call(opts, outputs, self._comm.all_reduce_coalesced, outputs, _op(opts))

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        tensor = _one(tensors)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        kind = _op(op) if isinstance(opts, int) else _op(opts)
        return self._call(opts, [tensor], self._comm.reduce, tensor, root, kind)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        gathered = _all(outputs)
        return self._call(opts, gathered, self._comm.all_gather, gathered, _one(inputs))

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        lists = [_all(outputs) for outputs in output_lists]
        flat = [tensor for outputs in lists for tensor in outputs]
        return self._call(opts, flat, self._comm.all_gather_coalesced, lists, _all(inputs))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        output, input = _plain(output), _plain(input)
        return self._call(opts, [output], self._comm.all_gather_into_tensor, output, input)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.all_gather_single, outputs, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        gathered = _all(outputs) if self._comm.rank == root else None
        return self._call(opts, gathered or [], self._comm.gather, _one(inputs), gathered, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        output = _one(outputs)
        parts = _all(inputs) if self._comm.rank == root else None
        return self._call(opts, [output], self._comm.scatter, output, parts, root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output = _one(outputs)
        return self._call(
            opts,
            [output],
            self._comm.reduce_scatter,
            output,
            _all(inputs),
            _op(opts),
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        output, input = _plain(output), _plain(input)
        return self._call(
            opts, [output], self._comm.reduce_scatter_tensor, output, input, _op(opts)
        )

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._each(self.reduce_scatter_single, outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        received = _all(outputs)
        return self._call(opts, received, self._comm.all_to_all, received, _all(inputs))

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        output, input = _plain(output), _plain(input)
        return self._call(
            opts,
            [output],
            self._comm.all_to_all_single,
            output,
            input,
            list(output_splits) if output_splits else None,
            list(input_splits) if input_splits else None,
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        return self._call(opts, [], self._comm.barrier)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        monitored_barrier(self.native, limit_of(timeout), wait_all_ranks)

    # --- point to point --------------------------------------------------------------------------

    # torch makes isend and irecv from these, and waits itself where the call is a blocking one: a
    # send that blocked here would deadlock its batches.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensor = _one(tensors)
        return self._collect(BridgeWork(self._comm.isend(tensor, dst, tag), [tensor]))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        tensor = _one(tensors)
        return self._collect(BridgeWork(self._comm.irecv(tensor, src, tag), [tensor]))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    # --- names of other versions -----------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _each(self, method: Callable[..., Work], outputs: Any, inputs: Any, opts: Any) -> Work:
        """Run an operation for each pair of tensors, in order; its Work is that of all."""
        works = [method(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return AllOf(works)
