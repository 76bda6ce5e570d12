"""Translates torch's arguments of a process group into hpcdist's."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp as TorchOp

from hpcdist._ops import ReduceOp
from hpcdist.groups.numbers import whole

_OPS = {
    kind: getattr(ReduceOp, name)
    for name, kind in TorchOp.RedOpType.__members__.items()
    if name != "PREMUL_SUM"
}

#: torch's names of parameters, which differ from method to method -> ours, one of which it is.
_RENAMED = {
    "tensor": ("tensors",),
    "root": ("opts",),
    "op": ("opts",),
    "input_tensor": ("inputs", "input"),
    "input_tensors": ("inputs",),
    "inputTensor": ("input",),
    "inputTensors": ("inputs",),
    "input": ("inputs",),
    "output_tensor": ("outputs", "output"),
    "output_tensors": ("outputs",),
    "outputTensor": ("output",),
    "outputTensors": ("outputs",),
    "output": ("outputs",),
    "output_lists": ("outputs",),
    "input_list": ("inputs",),
    "input_split_sizes": ("input_splits",),
    "output_split_sizes": ("output_splits",),
    "dstRank": ("dst",),
    "srcRank": ("src",),
}


def renamed(named: Mapping[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """Return arguments given by torch's names under those that the parameters of a method have."""
    ours = {}
    for name, value in named.items():
        if name not in parameters:
            name = next((each for each in _RENAMED.get(name, ()) if each in parameters), name)
        if name in ours:
            raise TypeError(f"the argument {name!r} is given twice")
        ours[name] = value
    return ours


class _Changed:
    """Options of torch's, or what a short form passes in their place, with some set otherwise."""

    def __init__(self, opts: Any, **options: Any) -> None:
        self.opts = opts
        self.__dict__.update(options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opts, name)


def begun(opts: Any) -> Any:
    """Return the options of a call that does not wait, whatever these say."""
    return _Changed(opts, asyncOp=True)


def bounded(opts: Any, timeout: Any) -> Any:
    """Return options with the timeout of a call in short form.

    The timeout may stand in the options' place, as in ``barrier(timeout)``. It may be a number of
    seconds, as torch's C++ layer allows.
    """
    if timeout is None and isinstance(opts, (timedelta, float)):
        opts, timeout = None, opts
    if timeout is None:
        return opts
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        timeout = timedelta(seconds=timeout)
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    return _Changed(opts, timeout=timeout)


def op_of(opts: Any) -> Any:
    """Translate a torch reduce operation: an enum value, or an object with a factor."""
    if isinstance(opts, _Changed):
        return op_of(opts.opts)
    op: Any = getattr(opts, "reduceOp", TorchOp.SUM if opts is None else opts)
    if isinstance(op, TorchOp.RedOpType):  # which equal numbers, too
        return _OPS[op]
    if type(op) is not TorchOp:
        raise TypeError(f"op must be a torch.distributed.ReduceOp, not {type(op).__name__}: {op!r}")
    kind, factor = op.__getstate__()  # type: ignore[attr-defined]
    return _OPS[kind] if factor is None else ReduceOp.PREMUL_SUM(factor)


def root_of(opts: Any) -> int:
    """Return the root of torch's options, or of its short forms, which pass the rank itself."""
    if opts is None:
        return 0
    return int(opts.rootRank if hasattr(opts, "rootRank") else whole(opts, "root"))


def plain(tensor: Any) -> Any:
    """Return a tensor's memory without autograd, which torch's backends ignore too.

    For the result of a functional collective, which may be in flight, it waits, as torch's own
    backends do.
    """
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    # what detach() makes of a sparse tensor would keep the result to itself
    return tensor.detach() if tensor.requires_grad and not tensor.is_sparse else tensor


def one(tensors: Any) -> Any:
    """Return the tensor of a list of one; torch passes lists where gloo once took several."""
    if isinstance(tensors, torch.Tensor):
        return plain(tensors)
    if len(tensors) != 1:
        raise ValueError(f"one tensor is expected, not {len(tensors)}")
    return plain(tensors[0])


def every(items: Sequence[Any]) -> list[Any]:
    """Return the list of tensors in a list of one list, or a flat list itself."""
    tensors = items
    if items and not isinstance(items[0], torch.Tensor):
        if len(items) != 1:
            raise ValueError(f"one list of tensors is expected, not {len(items)}")
        tensors = items[0]
    return [plain(tensor) for tensor in tensors]


def blocks(output: Any, input: Any, size: int) -> list[Any]:
    """Return the parts of one tensor that receive the ranks' inputs, in the input's shape."""
    if output.numel() != size * input.numel():
        raise ValueError(
            f"the output has {output.numel()} elements; it must have {size} (the group's size) "
            f"times the input's {input.numel()}"
        )
    if not output.is_contiguous():
        raise ValueError("the output is not contiguous: pass one that is, and copy from it")
    return list(output.view(size, *input.shape).unbind(0))
