"""MIN and MAX among more ranks than a small floating-point type can count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcdist import ReduceOp
from hpcdist.nn import _nodes as nodes

pytestmark = pytest.mark.local

RANKS = 600


class Crowd:
    """A group whose other ranks hold the same extreme as this one, and have no gradient."""

    def __init__(self) -> None:
        self.carrier = self

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, *_: Any, **__: Any) -> None:
        if op.name == "SUM" and tensor.max() == 1:  # the holders
            for _other in range(RANKS - 1):
                tensor += 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equal_parts_among_many_holders(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype, requires_grad=True)
    out = nodes.AllReduceExtreme.apply(tensor, ReduceOp.MAX, Crowd(), None)
    out.backward(torch.full((3,), float(RANKS), dtype=dtype))
    assert tensor.grad is not None
    torch.testing.assert_close(tensor.grad, torch.ones(3, dtype=dtype))
