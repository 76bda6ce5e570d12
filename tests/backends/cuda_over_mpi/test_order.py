"""CUDA tensors over MPI whose elements are not in C order: the right numbers, or a refusal."""

from __future__ import annotations

import pytest
import torch
from over_mpi import empty, near
from standin import cpu, gpu

import hpcdist as dist
from hpcdist import ReduceOp
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi")]


def test_order_in_memory(rng):
    data = torch.from_numpy(rng.random((30, 40)).astype("float32"))
    turned = gpu(data).t()
    dist.all_reduce(turned)
    parallel_assert(near(turned.t().contiguous(), data * dist.get_world_size()))
    with parallel_raises(ValueError, match="not dense"):
        dist.all_reduce(gpu(data)[:, ::2])
    with parallel_raises(ValueError, match="must be C-contiguous"):
        dist.all_gather_into_tensor(empty(1200 * dist.get_world_size(), torch.float32), turned)
    with parallel_raises(TypeError, match="MIN"):
        dist.all_reduce(gpu(torch.zeros(3, dtype=torch.complex64)), ReduceOp.MIN)
    with parallel_raises(ValueError, match=r"tensor is on cpu|on cuda only"):
        dist.all_gather([torch.ones(3)] * dist.get_world_size(), gpu(torch.ones(3)))
    leaf = gpu(torch.ones(3)).requires_grad_()
    dist.all_reduce(leaf)
    parallel_assert(near(leaf.detach(), torch.full((3,), float(dist.get_world_size()))))


def blocks(layout: str) -> list[torch.Tensor]:
    """One for each rank."""
    made = [gpu(torch.arange(6.0).reshape(2, 3) + r) for r in range(dist.get_world_size())]
    return [each.t().contiguous().t() for each in made] if layout == "turned" else made


@pytest.mark.parametrize("elsewhere", [False, True], ids=["all", "one rank"])
def test_blocks_in_another_order(elsewhere):
    """Bytes that are moved as they lie would be the numbers of other elements."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if elsewhere and size == 1:
        return
    # rank 1 sends, or takes, another order than all others have
    odd = "turned" if not elsewhere or rank == 1 else "plain"
    mismatch = dist.DistMismatchError
    match = "does not fit there" if elsewhere else "different orders in memory"
    one, root = blocks(odd)[rank], 0
    kind = mismatch if elsewhere or rank != root else ValueError
    with parallel_raises(kind, match=match):
        dist.gather(one, blocks("plain") if rank == root else None, root)
    with parallel_raises(kind, match=match):
        dist.scatter(one, blocks("plain") if rank == root else None, root)
    ins, outs = blocks(odd), blocks("plain")
    if elsewhere:  # what a rank gives itself is right
        ins[rank] = outs[rank].clone()
    with parallel_raises(mismatch if elsewhere else ValueError, match=match):
        dist.all_to_all(outs, ins)
    if not elsewhere:
        tall = outs[rank].reshape(3, 2)
        with parallel_raises(ValueError, match="different shapes"):
            dist.all_gather(outs, tall)
        with parallel_raises(ValueError, match="different shapes"):
            dist.reduce_scatter(tall, outs)
    # one order for both is right
    turned = blocks("turned")
    dist.all_to_all(outs := blocks("turned"), [turned[rank] + r for r in range(size)])
    wanted = [torch.arange(6.0).reshape(2, 3) + r + rank for r in range(size)]
    parallel_assert(all(bool((cpu(a) == b).all()) for a, b in zip(outs, wanted, strict=True)))
