"""Stock torch.distributed over MPI: what test_bridge.py starts under mpirun.

    mpirun -n 2 python bridge.py [hpcdist|gloo]

Every line of the output says what was checked; a wrong result is an exception.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn

import hpcdist
import hpcdist.torch

warnings.filterwarnings("ignore")


def say(text: str) -> None:
    if td.get_rank() == 0:
        os.write(1, f"{text}\n".encode())


def collectives(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    t = torch.full((4,), rank + 1.0)
    td.all_reduce(t)
    assert t.tolist() == [total] * 4
    work = td.all_reduce(t, op=td.ReduceOp.MAX, async_op=True)
    assert work.wait(timedelta(seconds=20)) and work.is_completed()
    # the works of torch 2.10 itself cannot return one
    assert td.get_backend() != "hpcdist" or work.exception() is None
    future = td.all_reduce(torch.ones(3), async_op=True).get_future()
    assert future.then(lambda f: f.value()[0] * 2).wait().tolist() == [2.0 * size] * 3
    work = td.all_reduce(t, op=td.ReduceOp.MIN, async_op=rank == 0)  # as torch allows
    if work is not None:
        work.wait()
    assert t.tolist() == [total] * 4
    parts = [torch.full((3,), -1.0) for _ in range(size)]
    td.all_gather(parts, torch.full((3,), float(rank)))
    assert [p[2].item() for p in parts] == list(range(size))
    out = torch.full((2 * size,), -1.0)
    td.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out.tolist() == [float(r) for r in range(size) for _ in range(2)]
    piece = torch.full((2,), -1.0)
    td.reduce_scatter_tensor(piece, torch.arange(2.0 * size))
    assert piece.tolist() == [size * (2.0 * rank), size * (2.0 * rank + 1)]
    with td._coalescing_manager(async_ops=rank == 0) as manager:
        td.all_gather_into_tensor(out, t[:2])
        td.all_gather_into_tensor(got := torch.empty(size), torch.ones(1))
    manager.wait()
    assert out.tolist() == [total] * 2 * size and got.tolist() == [1.0] * size
    got = torch.full((size,), -1.0)
    td.all_to_all_single(got, torch.arange(size) + 10.0 * rank)
    assert got.tolist() == [rank + 10.0 * r for r in range(size)]
    lists = [torch.tensor([r]) for r in range(size)] if rank == 0 else None
    mine = torch.tensor([-1])
    td.scatter(mine, lists, src=0)
    assert mine.item() == rank
    kept = [torch.tensor([-1]) for _ in range(size)] if rank == size - 1 else None
    td.gather(mine, kept, dst=size - 1)
    assert kept is None or [k.item() for k in kept] == list(range(size))
    td.barrier()
    say("collectives")


def objects_and_messages(rank: int, size: int) -> None:
    everyone: list[object] = [None] * size
    td.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": r} for r in range(size)]
    box = [("from", 0) if rank == 0 else None]
    td.broadcast_object_list(box)
    assert box == [("from", 0)]
    right, left = (rank + 1) % size, (rank - 1) % size
    came = torch.full((3,), -1.0)
    ring = [
        td.P2POp(td.isend, torch.full((3,), float(rank)), right),
        td.P2POp(td.irecv, came, left),
    ]
    for work in td.batch_isend_irecv(ring):
        work.wait()
    assert came.tolist() == [float(left)] * 3
    if rank == 0:
        td.send(torch.arange(3.0), 1, tag=7)
    elif rank == 1:
        assert td.recv(came, tag=7) == 0 and came.tolist() == [0.0, 1.0, 2.0]
    say("objects and messages")


def groups(rank: int, size: int) -> None:
    lone = td.new_group([0])
    if rank == 0:
        t = torch.ones(2)
        td.all_reduce(t, group=lone)
        assert t.tolist() == [1.0, 1.0]
    if td.get_backend() == "hpcdist":  # in torch 2.15 over gloo, the next group never comes about
        pair = td.new_group([0, 1], use_local_synchronization=True)
        if rank < 2:
            td.all_reduce(t := torch.ones(2), group=pair)
            assert t.tolist() == [2.0, 2.0]
        td.all_reduce(t := torch.ones(2), group=td.new_group(timeout=timedelta(seconds=10)))
        assert t.tolist() == [size, size]
    else:  # its members alone would wait for the other ranks, as MPI starts with all of them
        said = ""
        try:
            td.new_group([0], timeout=timedelta(seconds=10), backend="hpcdist")
        except ValueError as error:
            said = str(error)
        assert ("hpcdist is not initialised" in said) == (rank == 0), said
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(8.0)
    shards = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal((shards * 2).full_tensor(), whole * 2)
    say("groups, mesh, DTensor")


def training(rank: int, size: int) -> None:
    """DDP and FSDP2 give what one process gives with all ranks' data."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    data = torch.randn(4 * size, 8)

    def model() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def train(module: nn.Module, batch: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()

    alone, many, shared = model(), model(), model()
    train(alone, data)
    own = data[4 * rank : 4 * rank + 4]
    train(nn.parallel.DistributedDataParallel(many), own)
    fully_shard(shared)
    shared.set_allocate_memory_from_process_group_for_comm(True)  # gloo has no such memory, either
    train(shared, own)
    for one, two, three in zip(
        alone.parameters(), many.parameters(), shared.parameters(), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one, three.full_tensor(), rtol=1e-6, atol=1e-6)
    say("DDP and FSDP2")


def failures(rank: int, size: int) -> None:
    """A failed all-reduce ends torch's backward with an error, and its future with its own."""
    group = td.new_group(timeout=timedelta(seconds=1))
    module = nn.parallel.DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    module(torch.ones(2, 4)).sum().backward()
    loss = module(torch.ones(2, 4)).sum()
    if rank == 0:
        time.sleep(2)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "DistTimeoutError" in str(error), str(error)
    else:
        raise AssertionError("a rank was late, and backward went well")
    td.barrier()
    work = td.all_reduce(torch.ones(3 + rank), async_op=True)
    futures = [work.get_future(), torch.futures.collect_all([work.get_future()])]
    for future in futures:
        try:
            future.wait()
        except hpcdist.DistMismatchError:
            continue
        raise AssertionError("different sizes, and the future holds no error")
    td.barrier()
    refused_pairs(rank, size)
    say("failures")


def refused_pairs(rank: int, size: int) -> None:
    """Of coalesced pairs one is wrong on a rank: the ranks stay in step, whoever waits or not."""
    cases = itertools.product(range(3), (True, False, rank == 0, rank != 0))
    for wrong, together in cases:
        whole = [torch.ones(2 * size) for _ in range(3)]
        shares = [torch.ones(2) for _ in range(3)]
        shares[wrong] = shares[wrong].to(torch.int64 if rank == 0 else torch.float32)
        for one, to, given in (
            (td.all_gather_into_tensor, whole, shares),
            (td.reduce_scatter_tensor, shares, whole),
        ):
            try:
                with td._coalescing_manager(async_ops=together) as manager:
                    for i in range(3):
                        one(to[i], given[i])
                if together:
                    manager.wait()
            except (TypeError, hpcdist.DistMismatchError) as error:
                assert "int64" in str(error), str(error)
            else:
                raise AssertionError(f"pair {wrong} of {one.__name__} was wrong")
            td.all_reduce(total := torch.ones(1))
            assert total.item() == size


def timeouts(rank: int, size: int) -> None:
    """torch's private function sets them, for its own backends and ours, and warns of none."""
    for given, later, late in ((20, 0.3, True), (0.3, 20, False)):
        group = td.new_group(timeout=timedelta(seconds=given))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.14 has a public one
            td.distributed_c10d._set_pg_timeout(timedelta(seconds=later), group)
        td.barrier()
        if rank == 0:
            time.sleep(1.5)
        try:
            td.all_reduce(torch.ones(3), group=group)
            assert not late, "a rank was late, and nobody noticed"
        except hpcdist.DistTimeoutError:
            assert late
        td.barrier()
    try:
        td.distributed_c10d._set_pg_timeout(7, group)
    except TypeError as error:
        assert "must be a datetime.timedelta" in str(error)
    else:
        raise AssertionError("a number was taken for a timeout")
    short_forms(rank, size)
    say("timeouts")


def short_forms(rank: int, size: int) -> None:
    """The timeout of a method's short form counts; C++ takes a number of seconds, too."""
    pg, soon = td.new_group(), timedelta(seconds=0.1)
    x, parts = torch.ones(size), [torch.ones(size) for _ in range(size)]
    total, options = td.ReduceOp.SUM, td.BarrierOptions()
    pg.barrier(timeout=timedelta(seconds=20)).wait()
    pg.barrier(options).wait()
    if rank == 0:
        for number, call in enumerate((
            lambda: pg.barrier(timeout=soon),
            lambda: pg.barrier(soon),
            lambda: pg.barrier(0.1),
            lambda: pg.broadcast(x, 0, timeout=soon),
            lambda: pg.allreduce([x], timeout=soon),
            lambda: pg.allreduce(x, total, soon),
            lambda: pg.reduce(x, 0, total, timeout=soon),
            lambda: pg.allgather(parts, x, timeout=0.1),
            lambda: pg.gather(parts, x, 0, timeout=soon),
            lambda: pg.scatter(x, parts, 0, timeout=soon),
            lambda: pg.reduce_scatter(x, parts, total, soon),
            lambda: pg.alltoall_base(x, torch.ones(size), [], [], timeout=soon),
        )):  # fmt: skip
            began = time.monotonic()
            try:
                call().wait()
            except hpcdist.DistTimeoutError:
                assert time.monotonic() - began < 5, number
            else:
                raise AssertionError(f"call {number} did not end by its timeout")
        for wrong in ("1", True):
            try:
                pg.barrier(timeout=wrong)
            except TypeError as error:
                assert "must be a datetime.timedelta" in str(error)
            else:
                raise AssertionError(f"{wrong!r} was taken for a timeout")
    td.barrier()


def both_sides(rank: int, size: int) -> None:
    """The same group seen from torch and from hpcdist, and hpcdist's errors through torch."""
    ours = hpcdist.torch.group()
    assert ours is hpcdist.group.WORLD and hpcdist.torch.to_torch(ours) is td.group.WORLD
    backwards = hpcdist.new_group(list(range(size))[::-1], sort_ranks=False)
    theirs = hpcdist.torch.to_torch(backwards)
    assert hpcdist.torch.group(theirs) is backwards and td.get_rank(theirs) == size - 1 - rank
    t = torch.tensor([float(rank)])
    td.broadcast(t, src=size - 1, group=theirs)
    assert t.item() == size - 1
    hpcdist.all_reduce(t, group=backwards)
    assert t.item() == size * (size - 1)
    try:
        td.all_reduce(torch.ones(2 + (rank == 0)))
    except hpcdist.DistMismatchError as error:
        assert "float32[3]" in str(error)
    else:
        raise AssertionError("a mismatch went unnoticed")
    total = torch.ones(2)
    td.all_reduce(total)
    assert total.tolist() == [float(size)] * 2
    say("both sides")


def methods(rank: int, size: int) -> None:
    """What torch's functions do not reach, or reach for its own backends only."""
    group = td.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    before = group._get_sequence_number_for_group()
    td.all_reduce(torch.ones(1))
    assert group._get_sequence_number_for_group() > before
    one, two = torch.ones(2), torch.full((3,), float(rank))
    with td._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
        td.all_reduce(one)
        td.all_reduce(two)
    together.wait()
    assert one.tolist() == [size] * 2 and two.tolist() == [size * (size - 1) / 2] * 3
    ends = group.split_group([0, size - 1], group_name="ends", group_desc="first and last")
    assert (ends is None) == (rank not in (0, size - 1))
    if ends is not None:
        t = torch.tensor([rank + 1.0])
        ends.allreduce([t]).wait()
        assert t.item() == size + 1 and (ends.group_name, ends.size()) == ("ends", 2)
    whole = list(range(size))  # members keep their group's order, whatever that of the list
    turned = hpcdist.torch.to_torch(hpcdist.new_group(whole[::-1], sort_ranks=False))
    assert turned.rank() == size - 1 - rank
    for ranks in (whole, whole[::-1]):
        for parent in (group, turned):
            part = parent.split_group(ranks)
            assert (part.rank(), part.ours.rank()) == (parent.rank(),) * 2
    late, store = torch.ones(2), td.distributed_c10d._get_default_store()
    if rank:
        store.wait(["rank 0 has waited"])
    work = td.all_reduce(late, async_op=True)
    if rank == 0:
        try:
            work.wait(timedelta(milliseconds=20))
        except hpcdist.DistTimeoutError:
            assert not work.is_completed()
        else:
            raise AssertionError("a wait of 20 ms waited for a rank that came later")
        store.set("rank 0 has waited", "")
    assert work.wait() and late.tolist() == [size] * 2
    given_up = td.new_group(list(range(size)))
    ran: list[int] = []
    given_up.register_abort_hook(0, lambda: ran.append(int(td.get_rank(given_up))))
    given_up.abort()
    assert ran == [rank], ran
    try:
        td.all_reduce(torch.ones(1), group=given_up)
    except (ValueError, hpcdist.DistError):
        pass
    else:
        raise AssertionError("an aborted group went on")
    td.all_reduce(late)
    assert late.tolist() == [size * size] * 2
    say("methods")


def other_backends() -> None:
    """The members of a group meet for another backend, however torch names the group on each."""
    hpcdist.torch.init_process_group("cpu:hpcdist,cuda:gloo", timeout=timedelta(seconds=20))
    rank, size = td.get_rank(), td.get_world_size()
    ends = [0, size - 1]
    td.new_group([0], use_local_synchronization=True)  # torch 2.15 counts it on rank 0 alone
    for _ in range(2):
        group = td.new_group(ends, timeout=timedelta(seconds=20))
        if rank in ends:
            other = group._get_backend(torch.device("cuda"))
            assert type(other).__name__ == "ProcessGroupGloo", other
            other.allreduce([t := torch.full((2,), rank + 1.0)]).wait()
            assert t.tolist() == [size + 1.0] * 2
    say("other backends")
    td.destroy_process_group()


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else "hpcdist"
    hpcdist.torch.init_process_group(backend, timeout=timedelta(seconds=20))
    rank, size = td.get_rank(), td.get_world_size()
    assert td.get_backend() == backend
    for check in (collectives, objects_and_messages, groups, training):
        check(rank, size)
    if backend == "hpcdist":
        if size > 1:
            failures(rank, size)
            timeouts(rank, size)
        both_sides(rank, size)
        methods(rank, size)
    td.destroy_process_group()
    if backend == "hpcdist":
        other_backends()
    # groups of gloo's in cycles would live on, and their threads may drop a tensor as Python ends
    gc.collect()
    os.write(1, f"rank {rank} is done\n".encode())


if __name__ == "__main__":
    main()
