"""The methods of torch's C++ layer: options in, a Work out."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_methods_of_torchs_cpp_layer():
    pg, size = dist.group.WORLD, dist.get_world_size()
    rank = pg.rank()
    mean = dist.AllreduceOptions()
    mean.reduceOp = dist.ReduceOp.AVG
    mean.timeout = timedelta(seconds=50)
    total = sum(range(size))
    a, b, c, d = (torch.full((3,), float(rank)) for _ in range(4))
    pg.allreduce([a]).wait()
    pg.allreduce(b, dist.ReduceOp.MAX).wait()
    pg.allreduce([c], mean).wait()
    pg.allreduce_coalesced([d]).wait()
    found = [t[0].item() for t in (a, b, c, d)]
    parallel_assert(found == [total, size - 1, total / size, total], f"{found}")

    own = torch.full((1,), float(rank))
    for outputs, given in (([torch.zeros(1) for _ in range(size)], own),
                           ([[torch.zeros(1) for _ in range(size)]], [own])):  # fmt: skip
        pg.allgather(outputs, given).wait()
        flat = outputs if given is own else outputs[0]
        parallel_assert([t.item() for t in flat] == list(range(size)))
    nested = [[torch.zeros(1)] for _ in range(size)]
    pg.allgather_coalesced(nested, [own]).wait()
    parallel_assert([one.item() for (one,) in nested] == list(range(size)))

    outputs = [torch.zeros(1) for _ in range(size)]
    pg.alltoall(outputs, [torch.full((1,), float(10 * rank + r)) for r in range(size)]).wait()
    parallel_assert([t.item() for t in outputs] == [10 * r + rank for r in range(size)])
    out = torch.zeros(size)
    pg.alltoall_base(out, torch.arange(size) + 10.0 * rank, [], []).wait()
    parallel_assert(out.tolist() == [10 * r + rank for r in range(size)])
    with parallel_raises(ValueError, match="list of one"):
        pg.allreduce([a, b])


def test_options_have_torchs_attributes():
    for name in (
        "AllreduceOptions", "AllreduceCoalescedOptions", "AllToAllOptions", "BarrierOptions",
        "BroadcastOptions", "GatherOptions", "ReduceOptions", "ReduceScatterOptions",
        "ScatterOptions",
    ):  # fmt: skip
        ours, theirs = getattr(dist, name)(), getattr(torch.distributed, name)()
        for attribute in (each for each in dir(theirs) if not each.startswith("_")):
            if attribute == "reduceOp":
                parallel_assert(ours.reduceOp is dist.ReduceOp.SUM)
            else:
                pair = getattr(ours, attribute), getattr(theirs, attribute)
                parallel_assert(pair[0] == pair[1], f"{name}.{attribute}: {pair}")


@pytest.mark.parametrize("module", [dist, torch.distributed], ids=["own", "torch's"])
def test_a_barrier_takes_its_options(module):
    pg = dist.group.WORLD
    options = module.BarrierOptions()
    works = [pg.barrier(options), pg.barrier(opts=options), pg.barrier()]
    for work in works:
        work.wait()
    parallel_assert(all(work.is_completed() for work in works))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("module", [dist, torch.distributed], ids=["own", "torch's"])
def test_a_barriers_options_bound_it_in_time(module):
    pg = dist.new_group()
    options = module.BarrierOptions()
    options.timeout = timedelta(seconds=0.3)
    error = None
    if pg.rank() == 0:
        try:
            pg.barrier(options).wait()
        except dist.DistTimeoutError as raised:
            error = raised
    parallel_assert((error is not None) == (pg.rank() == 0))
    parallel_assert(pg.timeout > timedelta(seconds=1))
    dist.destroy_process_group(pg)


def test_lists_and_options():
    pg, size = dist.group.WORLD, dist.get_world_size()
    rank, last = pg.rank(), size - 1
    found = {}

    def rooted(kind, **fields):
        options = kind()
        for name, value in fields.items():
            setattr(options, name, value)
        return options

    def own():
        return torch.tensor([rank])

    def each(n):
        return [torch.zeros(1, dtype=torch.int64) for _ in range(n)]

    t = own()
    pg.broadcast([t], rooted(dist.BroadcastOptions, rootRank=last)).wait()
    found["broadcast"] = int(t) == last
    t = own()
    most = rooted(dist.ReduceOptions, rootRank=last, reduceOp=dist.ReduceOp.MAX)
    pg.reduce([t], most).wait()
    found["reduce"] = int(t) == rank
    t = own()
    pg.reduce(t, last, dist.ReduceOp.MIN).wait()
    found["reduce in short"] = int(t) == (0 if rank == last else rank)
    t = own()
    pg.broadcast(t, np.int64(last)).wait()
    found["a root that is a number of NumPy"] = int(t) == last
    flat = torch.zeros(size, dtype=torch.int64) if rank == last else None
    pg.gather_single(flat, own(), np.int64(last)).wait()
    found["gather_single to it"] = flat is None or flat.tolist() == list(range(size))
    gathered = each(size) if rank == last else []
    pg.gather(gathered, own(), torch.tensor(last)).wait()
    (t,) = each(1)
    pg.scatter(t, gathered, np.int64(last)).wait()
    found["gather to it, and scatter from it"] = int(t) == rank
    out = [each(size)] if rank == last else []
    pg.gather(out, [own()], rooted(dist.GatherOptions, rootRank=last)).wait()
    found["gather"] = rank != last or [int(x) for x in out[0]] == list(range(size))
    (t,) = each(1)
    parts = [[torch.tensor([r * r]) for r in range(size)]] if rank == last else []
    pg.scatter([t], parts, rooted(dist.ScatterOptions, rootRank=last)).wait()
    found["scatter"] = int(t) == rank * rank
    (t,) = each(1)
    most = rooted(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.MAX)
    pg.reduce_scatter([t], [[torch.tensor([r + rank]) for r in range(size)]], most).wait()
    found["reduce_scatter"] = int(t) == rank + last
    (t,) = each(1)
    pg._reduce_scatter_base(t, torch.arange(size) + rank, most).wait()
    found["_reduce_scatter_base"] = int(t) == rank + last
    flat = torch.zeros(size, dtype=torch.int64)
    pg._allgather_base(flat, own()).wait()
    found["_allgather_base"] = flat.tolist() == list(range(size))
    (t,) = each(1)
    works = [pg.recv([t], (rank - 1) % size, 4), pg.send([own()], (rank + 1) % size, 4)]
    for work in works:
        work.wait()
    found["messages"] = int(t) == (rank - 1) % size
    parallel_assert(all(found.values()), f"{[name for name, right in found.items() if not right]}")


@pytest.mark.mpi(min_size=2)
def test_timeout_of_one_call():
    """It ends the operation, not the group."""
    pg = dist.new_group()
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.3)
    error = None
    if pg.rank() == 0:
        try:
            pg.allreduce([torch.ones(1)], options).wait()
        except dist.DistTimeoutError as raised:
            error = raised
    parallel_assert((error is not None) == (pg.rank() == 0))
    parallel_assert(pg.timeout > timedelta(seconds=1))
    dist.destroy_process_group(pg)


@pytest.mark.mpi(min_size=2)
def test_receive_from_any_rank():
    pg = dist.group.WORLD
    got = torch.zeros(1)
    if pg.rank() == 0:
        for _ in range(pg.size() - 1):
            work = pg.recv_anysource([got], 5)
            work.wait()
            parallel = got.item() == work.source_rank()
            assert parallel
    else:
        dist.send(torch.tensor([float(pg.rank())]), 0, tag=5)
    parallel_assert(True)


@pytest.mark.parametrize("short", [True, False], ids=["short", "options"])
def test_a_timeout_may_be_seconds_and_nothing_else(short):
    pg = dist.new_group()
    options = dist.BarrierOptions()
    options.timeout = 60.0
    pg.barrier(60.0 if short else options).wait()
    for wrong in (True, "1"):
        options.timeout = wrong
        with parallel_raises(TypeError, match="timeout must be a datetime.timedelta, not "):
            pg.barrier(wrong if short else options)
    with parallel_raises(TypeError, match="timeout must be a datetime.timedelta, not bool"):
        pg.broadcast(torch.zeros(1), 0, True)
    dist.destroy_process_group(pg)


def test_a_method_and_a_function_are_one_operation():
    rank, size = dist.get_rank(), dist.get_world_size()
    pg, method = dist.group.WORLD, rank % 2
    if method:
        pg.barrier().wait()
    else:
        dist.barrier()
    t = torch.tensor([rank])
    if method:
        pg.broadcast(t, size - 1).wait()
    else:
        dist.broadcast(t, size - 1)
    parallel_assert(int(t) == size - 1)
    whole = torch.empty(size, 1, dtype=torch.int64) if rank == 0 else None
    if method:
        pg.gather_single(whole, torch.tensor([rank])).wait()
    else:
        dist.gather_single(torch.tensor([rank]), whole)
    parallel_assert(whole is None or whole.flatten().tolist() == list(range(size)))


WRONG = {
    "a list is missing": ("scatter", ValueError, lambda pg, t: pg.scatter(t, None, 0)),
    "no destinations": ("gather", ValueError, lambda pg, t: pg.gather(None, t, 0)),
    "of another size": ("gather_single", ValueError, lambda pg, t: pg.gather_single(t[:0], t)),
    "no whole number": ("broadcast", TypeError, lambda pg, t: pg.broadcast(t, 0.5)),
    "two tensors": ("all_reduce", ValueError, lambda pg, t: pg.allreduce([t, t])),
    "sparse": ("all_reduce", ValueError, lambda pg, t: pg.allreduce(t.to_sparse())),
    "no splits": (
        "all_to_all_single",
        TypeError,
        lambda pg, t: pg.alltoall_base(t.clone(), t, 0, []),
    ),
    "mixed": (
        "all_reduce_coalesced",
        TypeError,
        lambda pg, t: pg.allreduce_coalesced([t, t + 1j], dist.ReduceOp.MAX),
    ),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", WRONG)
def test_the_other_ranks_hear_of_arguments_that_are_refused(case):
    name, expected, call = WRONG[case]
    size, pg = dist.get_world_size(), dist.group.WORLD
    t, error = torch.ones(size), None
    fine = {
        "scatter": lambda: pg.scatter([t], [], 0),
        "gather": lambda: pg.gather([], [t], 0),
        "gather_single": lambda: pg.gather_single(None, t, 0),
        "all_reduce": lambda: pg.allreduce([t]),
        "broadcast": lambda: pg.broadcast(t, 0),
        "all_to_all_single": lambda: pg.alltoall_base(t.clone(), t, [], []),
        "all_reduce_coalesced": lambda: pg.allreduce_coalesced([t, t.clone()]),
    }
    try:
        (call(pg, t) if pg.rank() == 0 else fine[name]()).wait()
    except Exception as raised:
        error = raised
    wanted = expected if pg.rank() == 0 else dist.DistMismatchError
    parallel_assert(isinstance(error, wanted), f"{error!r}")
    pg.barrier().wait()


def test_messages_to_and_from_a_rank_that_is_none():
    pg = dist.group.WORLD
    with parallel_raises(TypeError, match="dstRank must be a whole number, not float"):
        pg.send([torch.zeros(1)], 0.5)
    with parallel_raises(ValueError, match="srcRank=-1 is outside the group"):
        pg.recv([torch.zeros(1)], -1)
