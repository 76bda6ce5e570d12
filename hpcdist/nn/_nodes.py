"""Collectives as nodes of autograd's graph, each with the collective that transposes it.

Backward of each is built of these same nodes, so that they can be differentiated any number of
times. All ranks run backward in the same order, because they built the same graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import Function

from hpcdist._ops import ReduceOp
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.resolve import member

Shapes = Sequence[torch.Size]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def collective(function: _Function) -> _Function:
    """Let the other ranks hear what a function refuses before it calls the engine."""
    place = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        group = args[place] if len(args) > place else named.get("group")
        with refusing(
            agreeing(member(group).carrier, args[0] if args else None), function.__name__
        ):
            return function(*args, **named)

    return call  # type: ignore[return-value]


def _api(operation: str) -> str | None:
    """The name of a collective on all ranks: one of backward meets none that a program calls."""
    return f"backward of {operation}" if torch._C._current_graph_task_id() >= 0 else None


def scale_of(op: ReduceOp, size: int) -> float:
    """The factor between a linear reduction and SUM."""
    return {"AVG": 1 / size, "PREMUL_SUM": op.factor}.get(op.name, 1.0)


def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    return gradient if scale == 1 else gradient * scale


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in memory that the engine can read, without a copy where they are."""
    # Contiguous: gradients arrive expanded, and layouts must be the same on all ranks. They also
    # arrive lazily conjugated or negated, which contiguous() keeps.
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return resolved.clone(memory_format=torch.contiguous_format)


def _filled(into: Any, like: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """The caller's own memory if there is any, else new memory of the given shapes."""
    if into is None:
        return [like.new_empty(shape) for shape in shapes]
    return [tensor.detach() for tensor in into]


def _changed(into: Any) -> None:
    """Tell autograd that the engine wrote into tensors, which goes past its counters."""
    if into is not None:
        for tensor in into:
            torch.autograd.graph.increment_version(tensor)


def one_per_rank(group: ProcessGroup, tensors: Any, what: str) -> list[torch.Tensor]:
    """One tensor per rank of the group, or an error."""
    tensors = list(tensors) if tensors is not None else []
    if len(tensors) != group.size():
        raise ValueError(
            f"{what} must have one tensor for each of the {group.size()} ranks of group "
            f"{group.name!r}, not {len(tensors)}"
        )
    return tensors


class AllReduce(Function):
    """SUM, AVG or PREMUL_SUM: the transpose is the same operation.

    With a name ranks compare it, also in backward, instead of that of the collective.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: ReduceOp, group: ProcessGroup, name: str | None
    ) -> torch.Tensor:
        ctx.op, ctx.group, ctx.name = op, group, name
        out = _copy(tensor)
        group.carrier.all_reduce(out, op, api=name or _api("all_reduce"))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return AllReduce.apply(gradient, ctx.op, ctx.group, ctx.name), None, None, None


class AllReduceExtreme(Function):
    """MIN or MAX: the gradient goes to the ranks that hold the extreme value, in equal parts."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: ReduceOp, group: ProcessGroup, name: str | None
    ) -> torch.Tensor:
        ctx.group = group
        out = _copy(tensor)
        group.carrier.all_reduce(out, op, api=_api("all_reduce") or name)
        ctx.save_for_backward(tensor, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, out = (saved.detach() for saved in ctx.saved_tensors)
        chosen = (tensor == out) | (tensor.isnan() & out.isnan())
        # bfloat16 counts to 256 only.
        holders = chosen.to(torch.int32, memory_format=torch.contiguous_format)
        ctx.group.carrier.all_reduce(holders, ReduceOp.SUM, api=_api("all_reduce"))
        summed = AllReduce.apply(gradient, ReduceOp.SUM, ctx.group, None)
        share = (chosen.to(torch.float64) / holders).to(gradient.dtype)
        return summed * share, None, None, None


class AllReduceProduct(Function):
    """PRODUCT: the gradient is scaled by the product of the other ranks' values."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: ProcessGroup, name: str | None
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(tensor)
        out = _copy(tensor)
        group.carrier.all_reduce(out, ReduceOp.PRODUCT, api=_api("all_reduce") or name)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tensor,) = ctx.saved_tensors
        group = ctx.group
        parts = AllGather.apply(tensor, None, [tensor.shape] * group.size(), group)
        # Not product / tensor: a single zero would lose its gradient.
        others = [part for rank, part in enumerate(parts) if rank != group.rank()]
        factor = torch.stack([*others, torch.ones_like(tensor)]).prod(0)
        return AllReduce.apply(gradient, ReduceOp.SUM, group, None) * factor, None, None


class Broadcast(Function):
    """One rank's tensor on all; the transpose is the sum on that rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, group: ProcessGroup) -> torch.Tensor:
        ctx.root, ctx.group = root, group
        out = _copy(tensor)
        group.carrier.broadcast(out, root, api=_api("broadcast"))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Reduce.apply(gradient, ctx.root, ReduceOp.SUM, ctx.group), None, None


class Reduce(Function):
    """SUM, AVG or PREMUL_SUM on one rank, zeros elsewhere; the transpose is a broadcast."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, op: ReduceOp, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.root, ctx.group, ctx.scale = root, group, scale_of(op, group.size())
        out = _copy(tensor)
        group.carrier.reduce(out, root, op, api=_api("reduce"))
        return out if group.rank() == root else out.zero_()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        everywhere = Broadcast.apply(gradient, ctx.root, ctx.group)
        return _scaled(everywhere, ctx.scale), None, None, None


class Gather(Function):
    """All ranks' tensors on one, zeros elsewhere; the transpose is a scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, group: ProcessGroup) -> Any:
        ctx.root, ctx.group = root, group
        here = group.rank() == root
        make = tensor.new_empty if here else tensor.new_zeros
        parts = [make(tensor.shape) for _ in range(group.size())]
        group.carrier.gather(plain(tensor), parts if here else None, root, api=_api("gather"))
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return Scatter.apply(ctx.root, ctx.group, *gradients), None, None


class Scatter(Function):
    """One rank's list, an element to each rank; the transpose is a gather."""

    @staticmethod
    def forward(ctx: Any, root: int, group: ProcessGroup, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.root, ctx.group = root, group
        here = group.rank() == root
        out = tensors[0].new_empty(tensors[0].shape)
        parts = [plain(tensor) for tensor in tensors] if here else None
        group.carrier.scatter(out, parts, root, api=_api("scatter"))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None, None, *Gather.apply(gradient, ctx.root, ctx.group))


class AllGather(Function):
    """All ranks' tensors on all; the transpose sums the parts on the ranks that gave them."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, into: Any, shapes: Shapes, group: ProcessGroup
    ) -> Any:
        ctx.group = group
        ctx.single = into is not None
        tensor = plain(tensor)
        if into is not None:
            ctx.shape = tensor.shape
            (out,) = _filled(into, tensor, ())
            group.carrier.all_gather_into_tensor(out, tensor, api=_api("all_gather_into_tensor"))
            _changed(into)
            return out
        parts = _filled(None, tensor, shapes)
        group.carrier.all_gather(parts, tensor, api=_api("all_gather"))
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.single:
            summed = ReduceScatterSingle.apply(
                gradients[0], None, ctx.shape, ReduceOp.SUM, ctx.group
            )
        else:
            summed = ReduceScatter.apply(None, ReduceOp.SUM, ctx.group, *gradients)
        return summed, None, None, None


class ReduceScatter(Function):
    """SUM, AVG or PREMUL_SUM of lists, an element to each rank; the transpose is an all-gather."""

    @staticmethod
    def forward(
        ctx: Any, into: Any, op: ReduceOp, group: ProcessGroup, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.scale = group, scale_of(op, group.size())
        ctx.shapes = [tensor.shape for tensor in tensors]
        (out,) = _filled(into, tensors[0], [ctx.shapes[group.rank()]])
        group.carrier.reduce_scatter(
            out, [plain(t) for t in tensors], op, api=_api("reduce_scatter")
        )
        _changed(into)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = _scaled(gradient, ctx.scale)
        return (None, None, None, *AllGather.apply(gradient, None, ctx.shapes, ctx.group))


class ReduceScatterSingle(Function):
    """ReduceScatter of one tensor that is cut into equal parts."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        into: Any,
        shape: torch.Size,
        op: ReduceOp,
        group: ProcessGroup,
    ) -> torch.Tensor:
        ctx.group, ctx.scale = group, scale_of(op, group.size())
        ctx.shape = tensor.shape
        (out,) = _filled(into, tensor, [shape])
        group.carrier.reduce_scatter_tensor(
            out, plain(tensor), op, api=_api("reduce_scatter_tensor")
        )
        _changed(into)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        into = [gradient.new_empty(ctx.shape)]
        gathered = AllGather.apply(_scaled(gradient, ctx.scale), into, None, ctx.group)
        return gathered, None, None, None, None


class AllToAll(Function):
    """A list from every rank to every rank; the transpose is the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        into: Any,
        shapes: Shapes,
        group: ProcessGroup,
        name: str | None,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.group = group
        ctx.shapes = [tensor.shape for tensor in tensors]
        out = _filled(into, tensors[0], shapes)
        name = _api("all_to_all") or name
        group.carrier.all_to_all(out, [plain(tensor) for tensor in tensors], api=name)
        _changed(into)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back = AllToAll.apply(None, ctx.shapes, ctx.group, None, *gradients)
        return (None, None, None, None, *back)


class Into(Function):
    """A copy in memory of the caller's, with the gradient of what was copied. Local."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, into: Any) -> torch.Tensor:
        (out,) = _filled(into, tensor, ())
        return out.copy_(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class AllToAllSingle(Function):
    """AllToAll of one tensor that is cut along its first dimension."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        into: Any,
        shape: torch.Size,
        splits: tuple[Any, Any],
        group: ProcessGroup,
    ) -> torch.Tensor:
        ctx.shape, ctx.splits, ctx.group = tensor.shape, splits, group
        (out,) = _filled(into, tensor, [shape])
        group.carrier.all_to_all_single(out, plain(tensor), *splits, api=_api("all_to_all_single"))
        _changed(into)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = (ctx.splits[1], ctx.splits[0])
        returned = AllToAllSingle.apply(gradient, None, ctx.shape, back, ctx.group)
        return returned, None, None, None, None
