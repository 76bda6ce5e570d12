"""Sparse tensors in all_reduce."""

import pytest
import torch
from cases import (
    here,
)

import hpcdist as dist
from hpcdist.parallel.reducer.sparse import all_reduce_sparse
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_denormals_count_whatever_the_thread_has_set(dtype):
    rank, size = here()
    tiny = torch.finfo(dtype).tiny / 8
    for average, total in ((False, 2 * size * tiny), (True, 2 * tiny)):
        twice = torch.sparse_coo_tensor([[1, 1]], torch.tensor([tiny, tiny], dtype=dtype), (3,))
        torch.set_flush_denormal(rank == 0)
        try:
            found = all_reduce_sparse(twice, dist.group.WORLD, average)
            dist.all_reduce(twice, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        finally:
            torch.set_flush_denormal(False)
        want = torch.tensor([0, total, 0], dtype=dtype)
        parallel_assert(torch.equal(found.to_dense(), want), "of a gradient")
        parallel_assert(torch.equal(twice.to_dense(), want), "all_reduce")


@pytest.mark.parametrize("dims", [1, 2])
def test_sparse_tensors_add_up(rng, dims):
    rank, size = here()
    parts = [torch.zeros(7, 5, 2, dtype=torch.float64) for _ in range(size)]
    for part in parts:  # each rank has other entries, some have none
        for row in rng.choice(7, rng.integers(0, 4), replace=False):
            part[row, rng.integers(5)] = torch.from_numpy(rng.standard_normal(2))
    total = sum(parts)
    for op, expected in [(dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size)]:
        tensor = parts[rank].to_sparse(dims)
        dist.all_reduce(tensor, op)
        parallel_assert(torch.allclose(tensor.to_dense(), expected, rtol=1e-12))
    with parallel_raises(ValueError):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    with parallel_raises(ValueError):
        dist.all_reduce(tensor, async_op=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_means_of_sparse_tensors(dtype):
    """Of numbers whose sum float16 cannot hold, and of whole numbers, which are rounded to zero."""
    rank, size = here()
    wanted = torch.tensor([40000, -5], dtype=dtype)
    mine = wanted if dtype != torch.int64 else wanted + torch.tensor([0, -(rank == 0)])
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), mine, (4,))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    found = tensor.coalesce().values()
    if size == 1 and dtype == torch.int64:
        wanted = mine
    parallel_assert(found.dtype == dtype and torch.equal(found, wanted), f"{found}")


@pytest.mark.mpi(min_size=2)
def test_sparse_tensors_of_other_shapes_are_refused():
    rank, _ = here()
    with parallel_raises(dist.DistMismatchError):
        dist.all_reduce(torch.zeros(3 + (rank == 0)).to_sparse())
    tensor = torch.ones(3).to_sparse()
    dist.all_reduce(tensor)
    parallel_assert(tensor.to_dense()[0].item() == here()[1])


@pytest.mark.mpi(min_size=2)
def test_operations_that_differ_are_refused():
    """Each rank adds up and divides by itself: one had the sum, another the mean."""
    rank, size = here()
    tensor, odd = torch.ones(3).to_sparse(), rank == size - 1
    with parallel_raises(dist.DistMismatchError, match=r"tensor \(SUM\)"):
        dist.all_reduce(tensor, dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM)
    with parallel_raises(dist.DistMismatchError):
        all_reduce_sparse(tensor, dist.group.WORLD, average=odd)
    with parallel_raises(dist.DistMismatchError, match="digest is that of shape"):
        all_reduce_sparse(torch.ones(3, 2 + odd), dist.group.WORLD)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    parallel_assert(tensor.to_dense().tolist() == [1.0] * 3)


def test_operations_in_torchs_words_and_as_names():
    """Of sparse tensors, and of lists of complex and real ones, as of all others."""
    size, theirs = here()[1], torch.distributed.ReduceOp
    for name, result in (("SUM", float(size)), ("AVG", 1.0)):
        for op in (getattr(theirs, name), name, name.lower()):
            tensor, pair = torch.ones(3).to_sparse(), [torch.ones(2), torch.ones(2).cfloat()]
            dist.all_reduce(tensor, op)
            dist.all_reduce_coalesced(pair, op)
            found = [tensor.to_dense(), *pair]
            parallel_assert(all((each == result).all() for each in found), f"{op!r}: {found}")
    with parallel_raises(ValueError, match="SUM and AVG, not ReduceOp.MAX"):
        dist.all_reduce(tensor, theirs.MAX)
    with parallel_raises(TypeError, match="not a reduce operation"):
        dist.all_reduce(tensor, "MEDIAN")
    with parallel_raises(TypeError, match="complex64"):
        dist.all_reduce_coalesced(pair, "MEDIAN")
    dist.barrier()
