"""Groups over NCCL, on the stand-in: every operation beside the same one over MPI."""

from __future__ import annotations

import weakref
from datetime import timedelta

import cases
import numpy as np
import pytest
import standin
import torch
from standin import cpu, gpu

import hpcdist as dist
from hpcdist import ReduceOp, _nccl, dtypes
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.standin

BOTH = "cpu:mpi,cuda:nccl"


def start(backend: str = BOTH, seconds: float = 20.0, **options) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        backend, timeout=timedelta(seconds=seconds), pg_options=dist.NCCLOptions(**options)
    )


@pytest.fixture(scope="module")
def both(runtime, _process_group):
    start()


@pytest.fixture(autouse=True)
def _in_place(request, both):
    """Each test finds the group of both backends, whatever the one before has done."""
    if not dist.is_initialized() or dist.get_backend() != BOTH:
        start()
    yield
    if request.function.__name__.startswith("test_alone"):
        dist.destroy_process_group()


def taken(dtype: torch.dtype, op: ReduceOp) -> bool:
    try:
        _nccl.reduction(dtypes.lookup(dtype).code, op.code)
    except TypeError:
        return False
    return True


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    found = cpu(found)
    if not (wanted.is_floating_point() or wanted.is_complex()) or wanted.dtype in cases.FLOAT8:
        return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    size = dist.get_world_size()
    eps = torch.finfo(wanted.dtype).eps * 8 * size
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    return torch.allclose(found.to(wide), wanted.to(wide), rtol=eps, atol=eps)


def test_reductions_give_what_mpi_gives(rng):
    wrong, refused, size, rank = [], 0, dist.get_world_size(), dist.get_rank()
    for name, op, dtype in cases.pairs():
        if name == "AVG" and dtype in cases.INTS:
            continue  # NCCL divides the wrapped sum, MPI's kernels what it was before
        own = cases.draw(rng, dtype, (size, 5 * size))[rank].clone()
        if not taken(dtype, op):
            with pytest.raises(TypeError, match="NCCL"):
                dist.all_reduce(gpu(own), op)
            refused += 1
            continue
        here, there = own.clone(), gpu(own)
        dist.all_reduce(here, op)
        dist.all_reduce(there, op)
        part, other = torch.empty(5, dtype=dtype), gpu(torch.empty(5, dtype=dtype))
        dist.reduce_scatter_tensor(part, own, op)
        work = dist.reduce_scatter_tensor(other, gpu(own), op, async_op=True)
        work.wait()
        some, more = own.clone(), gpu(own)
        dist.reduce(some, size - 1, op)
        dist.reduce(more, size - 1, op)
        listed = gpu(torch.empty(5, dtype=dtype))
        dist.reduce_scatter(listed, [gpu(each) for each in own.split(5)], op)
        several = [gpu(own[:3]), gpu(own[3:])]
        dist.all_reduce_coalesced(several, op)
        good = near(there, here) and near(other, part) and near(more, some)
        good = good and near(listed, part)
        good = good and near(several[0], here[:3]) and near(several[1], here[3:])
        if not good:
            wrong.append((name, dtype))
    parallel_assert(not wrong, lambda: str(wrong))
    parallel_assert(refused > 10)


def test_everything_moves(rng):
    wrong, size, rank = [], dist.get_world_size(), dist.get_rank()
    for dtype in cases.MOVED:
        sent = [cases.draw(rng, dtype, 3 * size) for _ in range(size)]
        own, root = sent[rank], size - 1

        def empty(n: int, dtype=dtype):
            return gpu(torch.zeros(n, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype))

        checks = []
        copy = gpu(own)
        dist.broadcast(copy, root)
        checks.append((copy, sent[root]))
        whole = empty(3 * size * size)
        dist.all_gather_into_tensor(whole, gpu(own))
        checks.append((whole, torch.cat([each.view(torch.uint8) for each in sent]).view(dtype)))
        uneven = [empty(1 + place) for place in range(size)]
        dist.all_gather(uneven, gpu(own[: 1 + rank]))
        checks += [(uneven[i], sent[i][: 1 + i]) for i in range(size)]
        outs = [empty(3 * size) for _ in range(size)] if rank == root else None
        dist.gather(gpu(own), outs, root)
        checks += list(zip(outs or [], sent, strict=False))
        mine = empty(3 * size)
        dist.scatter(mine, [gpu(each) for each in sent] if rank == root else None, root)
        checks.append((mine, own))
        crossed = empty(3 * size)
        dist.all_to_all_single(crossed, gpu(own))
        column = [each[3 * rank : 3 * rank + 3].view(torch.uint8) for each in sent]
        checks.append((crossed, torch.cat(column).view(dtype)))
        for found, wanted in checks:
            if not torch.equal(cpu(found).view(torch.uint8), wanted.view(torch.uint8)):
                wrong.append(dtype)
    parallel_assert(not wrong, lambda: str(wrong))


def test_uneven_all_to_all(rng):
    size, rank = dist.get_world_size(), dist.get_rank()
    # rank i sends i + j rows to rank j
    ins = [rank + other for other in range(size)]
    own = torch.arange(2 * sum(ins), dtype=torch.float32).reshape(-1, 2) + 1000 * rank
    here, there = torch.empty(sum(ins), 2), gpu(torch.empty(sum(ins), 2))
    dist.all_to_all_single(here, own, ins, ins)
    dist.all_to_all_single(there, gpu(own), ins, ins)
    parallel_assert(torch.equal(cpu(there), here))
    outs = [gpu(torch.empty(n, 2)) for n in ins]
    dist.all_to_all(outs, [gpu(each) for each in own.split(ins)], async_op=True).wait()
    parallel_assert(torch.equal(torch.cat([cpu(each) for each in outs]), here))
    with parallel_raises(ValueError, match="do not add up"):
        dist.all_to_all_single(there, gpu(own), ins, [n + 1 for n in ins])


def test_async_operations_are_on_a_stream_of_their_own():
    stream = standin.Stream()
    with standin.on(stream):
        data = gpu(torch.zeros(4))
        # the group's stream waits for what the current one does before ...
        ones = torch.ones(4)
        stream.kernel(3.0, data.data_ptr(), ones.data_ptr(), data.nbytes)
        work = dist.all_reduce(data, async_op=True)
        parallel_assert(
            bool((data.as_subclass(torch.Tensor) == 0).all()) and not work.is_completed()
        )
        # ... and the current one for it, from wait() on; the caller does not
        parallel_assert(work.wait() and bool((data.as_subclass(torch.Tensor) == 0).all()))
        parallel_assert(bool((cpu(data) == dist.get_world_size()).all()))
        parallel_assert(work.is_completed() and work.is_success() and work.exception() is None)
        parallel_assert(work.result()[0] is data)
        # with a timeout the caller waits
        stream.kernel(0.2)
        work = dist.all_reduce(data, async_op=True)
        with parallel_raises(dist.DistTimeoutError, match=r"all_reduce #\d+ .*0.02 s of wait"):
            work.wait(timedelta(seconds=0.02))
        parallel_assert(work.wait(10.0) and work.is_success())
        future = dist.all_reduce(data, async_op=True).get_future()
        parallel_assert(future.wait()[0] is data)


@pytest.mark.parametrize("how", ["sync", "async", "other stream"])
def test_alone_tensors_are_kept_for_as_long_as_they_are_needed(how, runtime, monkeypatch):
    """Memory that the stream waits for may be used again in it: nothing is kept any longer."""
    monkeypatch.setattr(runtime, "orderly", True)
    start()
    memory = torch.ones(4)  # the stand-in's own is not used again in the order of streams
    stream = standin.Stream()
    waiter = standin.Stream() if how == "other stream" else stream
    with standin.on(stream):
        first = gpu(torch.ones(1))
        dist.all_reduce(first)  # makes the communicator
        stream.kernel(0.3)
        data = memory.as_subclass(standin.FakeCuda)
        alive = weakref.ref(data)
        work = dist.all_reduce(data, async_op=how != "sync")
        del data
        parallel_assert((alive() is None) == (how == "sync"))
        if work is not None:
            with standin.on(waiter):
                work.wait()
            done = work.is_completed()
            del work
            parallel_assert(not done and (alive() is None) == (how == "async"), f"{done}")
    waiter.synchronize()
    dist.barrier()
    parallel_assert(bool((memory == dist.get_world_size()).all()), f"{memory}")


def test_alone_lists_are_free_after_a_synchronous_call(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "orderly", True)
    start()
    memory = [torch.ones(4) for _ in range(dist.get_world_size() + 1)]
    tensors = [each.as_subclass(standin.FakeCuda) for each in memory]
    alive = [weakref.ref(each) for each in tensors]
    dist.all_gather(tensors[1:], tensors[0])
    dist.reduce(tensors[0], 0)
    tensors.clear()
    left = sum(each() is not None for each in alive)
    standin.Stream(0).synchronize()
    parallel_assert(not left, lambda: f"{left} tensors are kept")


def test_each_tensor_goes_to_its_backend():
    host, other = torch.ones(3), gpu(torch.ones(3))
    dist.all_reduce(host)
    dist.all_reduce(other)
    size = dist.get_world_size()
    parallel_assert(torch.equal(host, cpu(other)) and bool((host == size).all()))
    parallel_assert(dist.get_backend_config() == BOTH)
    with parallel_raises(ValueError, match="moves tensors on cuda only"):
        dist.all_gather([torch.ones(3)] * size, other)
    with parallel_raises(ValueError, match="is not dense"):
        dist.all_reduce(gpu(torch.ones(4, 4))[:, ::2])
    with parallel_raises(ValueError, match=rf"has 5 elements, and needs {3 * size}"):
        dist.all_gather_into_tensor(gpu(torch.ones(5)), other)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_that_cannot_be_moved_are_refused_for_what_they_are():
    group = dist.new_group(backend="cuda:nccl")
    lazy = gpu(torch.ones(4, dtype=torch.complex64)).conj()
    advice = r"negated view; pass tensor\.resolve_conj\(\)\.resolve_neg\(\)"
    for once in (lazy, lazy.imag):
        for known in (gpu(torch.ones(2, dtype=once.dtype)), gpu(torch.ones(2))):
            dist.broadcast(known, 0, group)  # a tensor of a type that is known takes another path
            with parallel_raises(ValueError, match=advice):
                dist.broadcast(once, 0, group)
            with parallel_raises(ValueError, match="lazily conjugated or negated view"):
                dist.all_gather([gpu(once.resolve_neg())] * dist.get_world_size(), once, group)
    with parallel_raises(TypeError, match="complex32, which hpcdist does not move"):
        dist.broadcast(gpu(torch.ones(3, dtype=torch.complex32)), 0, group)
    nibbles = gpu(torch.ones(3, dtype=torch.uint8)).view(torch.uint4)
    with parallel_raises(TypeError, match="uint4, which hpcdist does not move"):
        dist.broadcast(nibbles, 0, group)
    dist.destroy_process_group(group)


def test_messages(rng):
    size, rank = dist.get_world_size(), dist.get_rank()
    sent = [torch.arange(5) + 100 * each for each in range(size)]
    right, left = (rank + 1) % size, (rank - 1) % size
    outs = gpu(torch.zeros(5, dtype=torch.int64))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, gpu(sent[rank]), right),
            dist.P2POp(dist.irecv, outs, left),
        ]
    )
    for work in works:
        work.wait()
    parallel_assert(torch.equal(cpu(outs), sent[left]))
    with parallel_raises(ValueError, match="any rank"):
        dist.irecv(outs)
    if size == 1:
        with pytest.raises(ValueError, match="cannot send to itself"):
            dist.isend(outs, 0)
        return
    outs.zero_()
    if rank == 0:
        dist.send(gpu(sent[0]), 1)
        dist.isend(gpu(sent[0]), 1).wait()
    elif rank == 1:
        source = dist.recv(outs, 0)
        assert source == 0 and torch.equal(cpu(outs), sent[0])
        outs.zero_()
        work = dist.irecv(outs, 0)
        work.wait()
        assert work.source_rank() == 0 and torch.equal(cpu(outs), sent[0])
    dist.barrier()


def test_subgroups():
    size, rank = dist.get_world_size(), dist.get_rank()
    odd = dist.new_group(list(range(rank % 2, size, 2)), use_local_synchronization=True)
    data = gpu(torch.tensor([float(rank)]))
    dist.all_reduce(data, group=odd)
    parallel_assert(cpu(data).item() == sum(range(rank % 2, size, 2)))
    dist.destroy_process_group(odd)
    gone = data.clone()
    with parallel_raises(ValueError, match="has been destroyed"):
        dist.all_reduce(gone, group=odd)


@pytest.mark.parametrize("blocking", [True, False])
def test_alone_without_mpi_for_the_host(blocking):
    start("nccl", blocking=blocking)
    rank, size = dist.get_rank(), dist.get_world_size()
    data = gpu(torch.ones(2))
    dist.all_reduce(data)
    parallel_assert(bool((cpu(data) == size).all()))
    dist.barrier()
    dist.barrier(async_op=True).wait()
    # objects go through the device
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    parallel_assert(found == [{"rank": each} for each in range(size)])
    box = [None] if rank else ["from 0"]
    dist.broadcast_object_list(box, 0)
    parallel_assert(box == ["from 0"])
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank * 10, gathered, 0)
    parallel_assert(rank != 0 or gathered == [10 * each for each in range(size)])
    mine = [None]
    dist.scatter_object_list(mine, list("abcd"[:size]) if rank == 0 else None, 0)
    parallel_assert(mine == ["abcd"[rank]])
    if size > 1:
        if rank == 0:
            dist.send_object_list(["hello"], 1)
        elif rank == 1:
            box = [None]
            dist.recv_object_list(box, 0)
            assert box == ["hello"]
    dist.barrier()
    half = dist.new_group(list(range(rank % 2, size, 2)), use_local_synchronization=True)
    dist.all_reduce(data, group=half)
    parallel_assert(bool((cpu(data) == size * half.size()).all()))


def test_alone_subgroups_of_each_node():
    start("nccl")
    node = dist.group.WORLD.carrier.node_ranks
    own, _ = dist.new_subgroups()
    parallel_assert(own.size() == len(node) and dist.get_rank() in node)


def test_alone_one_array_as_input_and_output():
    start("nccl")
    size, data = dist.get_world_size(), np.arange(3)
    gather = dist.group.WORLD.carrier.all_gather_into_tensor
    if size > 1:
        with parallel_raises(ValueError, match=rf"has 3 elements, and needs {3 * size}"):
            gather(data, data, api="test")
    else:
        gather(data, data, api="test")
        assert data.tolist() == [0, 1, 2]


@pytest.mark.mpi(min_size=2)
def test_alone_ranks_compare_their_versions(monkeypatch):
    # the loaded library says what the variable says; hpcdist asked when it loaded it
    from hpcdist import _nccl_loader

    start()
    last = dist.get_world_size() - 1
    known = _nccl_loader.load()
    if dist.get_rank() == last:
        monkeypatch.setattr(known, "version", 22703)
    with parallel_raises(
        dist.DistMismatchError, match=r"same NCCL: rank \d+ has 2\.\d+\.\d, the other"
    ):
        dist.all_reduce(gpu(torch.ones(1)))


def test_options_are_checked():
    with parallel_raises(TypeError, match="must be hpcdist.NCCLOptions"):
        from hpcdist.backends import nccl
        from hpcdist.backends.base import BackendOptions

        nccl.create(BackendOptions(None, 0, 1, timedelta(seconds=1), "x"), object())


def test_a_negative_timeout_of_wait_is_none():
    stream = standin.Stream()
    for group in (None, dist.new_group(list(range(dist.get_world_size())), backend="mpi")):
        with standin.on(stream):
            stream.kernel(0.05)
            data = gpu(torch.ones(4))
            work = dist.all_reduce(data, group=group, async_op=True)
            parallel_assert(work.wait(timedelta(milliseconds=-1)))
            parallel_assert(bool((cpu(data) == dist.get_world_size()).all()))
            parallel_assert(work.is_success() and work._source_rank() == -1)
            with parallel_raises(ValueError, match="not a number"):
                work.wait(float("nan"))


@pytest.mark.parametrize("module", [dist, torch.distributed], ids=["own", "torch's"])
def test_options_in_the_place_of_async_op_are_refused(module):
    size, options = dist.get_world_size(), module.AllToAllOptions()
    x = gpu(torch.ones(size))
    for call in (
        lambda: dist.broadcast(x, 0, None, options),
        lambda: dist.all_reduce(x, ReduceOp.SUM, None, options),
        lambda: dist.all_gather_single(gpu(torch.ones(size * size)), x, None, options),
        lambda: dist.all_to_all_single(gpu(torch.ones(size)), x, None, None, None, options),
        lambda: dist.all_gather([gpu(torch.ones(size)) for _ in range(size)], x, None, options),
    ):
        with parallel_raises(TypeError, match="async_op must be True or False, not AllToAllOpt"):
            call()
    dist.group.WORLD.barrier(module.BarrierOptions()).wait()
