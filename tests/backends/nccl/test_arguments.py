"""What groups over NCCL refuse: blocks that do not fit, and, with the entry check, other calls."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("nccl")]


def start(check: bool = False) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "cpu:mpi,cuda:nccl",
        timeout=timedelta(seconds=20),
        pg_options=dist.NCCLOptions(check=check),
    )


@pytest.fixture(scope="module")
def nccl(runtime, _process_group):
    start()


def test_blocks_of_other_sizes():
    rank, size = dist.get_rank(), dist.get_world_size()
    four, outs = gpu(torch.ones(4)), [gpu(torch.ones(3)) for _ in range(size)]
    own = "this rank's own output has 3 elements, and needs 4"
    ins = [four if place == rank else outs[place].clone() for place in range(size)]
    with parallel_raises(ValueError, match=own):
        dist.all_to_all(outs, ins)
    ins_splits = [1 + (place == rank) for place in range(size)]
    out, rows = gpu(torch.ones(size)), gpu(torch.ones(size + 1))
    with parallel_raises(ValueError, match="own output has 1 elements, and needs 2"):
        dist.all_to_all_single(out, rows, [1] * size, ins_splits)
    if rank == 0:  # alone: the others would not hear of it
        with pytest.raises(ValueError, match=own):
            dist.gather(four, outs, 0)
        with pytest.raises(ValueError, match="has 5 elements, and needs 3"):
            dist.scatter(gpu(torch.ones(5)), outs, 0)
        for some in [[*outs, four]] + [outs[1:]] * (size > 1):
            match = rf"list has {len(some)} elements, and needs {size}"
            with pytest.raises(ValueError, match=match):
                dist.gather(four, some, 0)
            with pytest.raises(ValueError, match=match):
                dist.scatter(four, some, 0)
    dist.barrier()


def test_blocks_in_another_order():
    """Bytes that are moved as they lie would be the numbers of other elements."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def plain(n: int = 3) -> torch.Tensor:
        return gpu(torch.arange(2.0 * size * n).reshape(2 * size, n) + rank)

    turned = plain().t().contiguous().t()
    outs, many = [plain() for _ in range(size)], gpu(torch.empty(2 * size * size, 3))
    for call in (
        lambda: dist.all_gather_into_tensor(many, turned),
        lambda: dist.reduce_scatter_tensor(plain()[:2], turned),
        lambda: dist.all_to_all_single(plain(), turned),
        lambda: dist.all_to_all_single(turned, plain()),
        lambda: dist.all_to_all_single(plain(), turned, [2] * size, [2] * size),
    ):
        with parallel_raises(ValueError, match="must be C-contiguous, because its blocks are"):
            call()
    for call in (
        lambda: dist.all_gather(outs, turned),
        lambda: dist.all_gather_coalesced([[each] for each in outs], [turned]),
        lambda: dist.reduce_scatter(turned, outs),
        lambda: dist.all_to_all(outs, [turned] * size),
    ):
        with parallel_raises(ValueError, match="different orders in memory"):
            call()
    tall = plain().reshape(3, 2 * size)
    for call in (lambda: dist.all_gather(outs, tall), lambda: dist.reduce_scatter(tall, outs)):
        with parallel_raises(ValueError, match="different shapes"):
            call()
    if rank == 0:  # alone: the others would not hear of it
        with pytest.raises(ValueError, match="different orders in memory"):
            dist.gather(turned, outs, 0)
        with pytest.raises(ValueError, match="different orders in memory"):
            dist.scatter(turned, outs, 0)
    # one order for both is right
    outs = [plain().t().contiguous().t() for _ in range(size)]
    dist.all_gather(outs, turned)
    good = [bool((cpu(each) - cpu(turned) == r - rank).all()) for r, each in enumerate(outs)]
    parallel_assert(all(good), lambda: str(good))


def test_the_entry_check_over_the_host():
    start(check=True)
    data = gpu(torch.ones(4))
    dist.all_reduce(data)
    if dist.get_world_size() > 1:
        with parallel_raises(dist.DistMismatchError):
            dist.all_reduce(data[: 4 - (dist.get_rank() == 0)])
        outs, root = [data.clone() for _ in range(dist.get_world_size())], dist.get_rank() % 2
        here = dist.get_rank() == root
        with parallel_raises(dist.DistMismatchError):
            dist.gather(data, outs if here else None, root)
        with parallel_raises(dist.DistMismatchError):
            dist.scatter(data.clone(), outs if here else None, root)
    dist.all_reduce(data)  # nothing has moved, and the group is usable
    parallel_assert(bool((cpu(data) == dist.get_world_size() ** 2).all()))
    start()


@pytest.mark.mpi(min_size=2)
def test_the_entry_check_compares_shapes_and_orders():
    start(check=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = torch.arange(6.0).reshape(2, 3)
    for odd in (plain.t().contiguous().t(), plain.reshape(3, 2)):
        data = gpu(odd if rank == 0 else plain)
        several = [gpu(data) for _ in range(size)]
        calls = [
            lambda data=data: dist.all_reduce(data),
            lambda data=data: dist.broadcast(data, 0),
            lambda data=data: dist.reduce(data, 0),
            lambda data=data: dist.all_reduce_coalesced([data]),
            lambda data=data, several=several: dist.all_gather(several, data),
            lambda data=data, several=several: dist.reduce_scatter(data, several),
        ]
        if odd.is_contiguous():
            many = gpu(torch.empty(6 * size))
            calls += [
                lambda data=data, many=many: dist.all_gather_into_tensor(many, data),
                lambda data=data, many=many: dist.reduce_scatter_tensor(data, many),
            ]
        for call in calls:
            with parallel_raises(dist.DistMismatchError):
                call()
    dist.all_reduce(gpu(plain.t()))
    start()
