"""Reductions with derivatives, beside those without."""

from __future__ import annotations

import pytest
import torch

import hpcdist as dist
from hpcdist.nn import functional as F
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "PRODUCT", "BXOR"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float64])
def test_reduce_scatter_of_any_dtype_is_as_without_derivatives(op, dtype):
    """Integers wrap, keep their dtype, and lie in `output`, as real numbers do."""
    if op == "BXOR" and dtype.is_floating_point:
        return
    size, how = dist.get_world_size(), getattr(dist.ReduceOp, op)
    # Integers wrap. Products of floats are exact, in whatever order MPI takes them between nodes.
    most = 1 if dtype.is_floating_point else 1 << 20
    whole = (torch.arange(2 * size) + most * (1 + dist.get_rank())).to(dtype).view(size, 2)
    wanted = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_tensor(wanted, whole, how)
    for call in (
        lambda out: F.reduce_scatter(out, whole.unbind(0), how),
        lambda out: F.reduce_scatter_single(out, whole, how),
    ):
        out = torch.zeros(2, dtype=dtype)
        found = call(out)
        same = found.dtype == dtype and torch.equal(found, wanted) and torch.equal(out, wanted)
        parallel_assert(same, lambda f=found, o=out: f"{f}, {o} are not {wanted}")
        parallel_assert(found.data_ptr() == out.data_ptr(), "not in the memory of output")


@pytest.mark.mpi(min_size=2)
def test_operations_and_destinations_that_differ_are_refused():
    """What is reduced after an exchange, or set to zero after a reduction, no exchange compares."""
    size, odd = dist.get_world_size(), dist.get_rank() == 0
    op, x = dist.ReduceOp.MIN if odd else dist.ReduceOp.MAX, torch.ones(size)
    with parallel_raises(dist.DistMismatchError, match="MIN"):
        F.reduce_scatter(torch.empty(1), x.split(1), op)
    with parallel_raises(dist.DistMismatchError, match="MIN"):
        F.reduce_scatter_single(torch.empty(1), x, op)
    for how in (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        with parallel_raises(dist.DistMismatchError, match="rank 1"):
            F.reduce(x, int(odd), how)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_extremes_of_complex_numbers_are_refused_with_advice(op):
    size, how = dist.get_world_size(), getattr(dist.ReduceOp, op)
    x = torch.ones(size, dtype=torch.complex64, requires_grad=True)
    for call in (
        lambda: F.reduce_scatter(x.new_empty(1), x.split(1), how),
        lambda: F.reduce_scatter_single(x.new_empty(1), x, how),
        lambda: F.all_reduce(x, how),
        lambda: F.reduce(x, 0, how),
    ):
        with parallel_raises(TypeError, match="view_as_real"):
            call()
