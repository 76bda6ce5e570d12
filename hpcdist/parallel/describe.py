"""What parameters and buffers must have in common on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hpcdist.groups.comparison import Entry


def describe(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Entry]:
    """Describe what must agree between ranks.

    Parameters
    ----------
    kind : str
        ``"parameter"`` or ``"buffer"``; appears in messages.
    named : iterable of (str, torch.Tensor)
        Full names and tensors.

    Yields
    ------
    list
        One ``[kind, name, {fact: text}]`` per tensor, plain enough for JSON. Local.
    """
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            facts = {"shape": "not known before the first forward"}
        elif tensor.layout != torch.strided:
            facts = {"shape": str(tuple(tensor.shape)), "layout": str(tensor.layout)}
        else:
            facts = {
                "shape": str(tuple(tensor.shape)),
                # The stride of a dimension of size 1 has no meaning and may differ.
                "stride": str(
                    tuple(
                        0 if n == 1 else st
                        for st, n in zip(tensor.stride(), tensor.shape, strict=True)
                    )
                ),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "device": tensor.device.type,
            }
            if tensor.requires_grad and tensor.is_leaf and tensor.grad_dtype != tensor.dtype:
                facts["dtype"] += f" (grad_dtype {tensor.grad_dtype})"
        facts["requires_grad"] = str(tensor.requires_grad)
        yield [kind, name, facts]
