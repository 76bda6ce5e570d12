"""Windows and hooks of groups of stock torch.distributed over hpcdist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as td
from cases import Check, ring
from torch._C import _distributed_c10d as c10d

import hpcdist as dist
import hpcdist.torch
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

N = 1_003  # elements


@contextlib.contextmanager
def torchs_group() -> Iterator[td.ProcessGroup]:
    """torch's view of a group of all ranks, beside its default group.

    That may be gloo's, which tests that compare with it leave to the process.
    """
    found = td.is_initialized()
    if not found:
        hpcdist.torch.init_process_group()
    group = td.new_group(backend="hpcdist")
    try:
        yield group
    finally:
        td.destroy_process_group(group)
        if not found:
            td.destroy_process_group()


def options(name: str):
    """torch's options of that name, as it makes them; None where it has none (up to 2.13)."""
    return getattr(c10d, name)() if hasattr(c10d, name) else None


def test_windows_with_torchs_options_and_handles(rng):
    with torchs_group() as group:
        check, (rank, size, before, after) = Check(), ring()
        memory = hpcdist.zeros(N, dtype=torch.float64, group=hpcdist.torch.group(group))
        if hasattr(td, "_new_window"):
            parallel_assert(td._supports_window(group), "supports_window")
            window = td._new_window(memory, group)
        else:
            parallel_assert(group.supports_window, "supports_window")
            window = group.new_window(memory)
        parts = [torch.from_numpy(rng.standard_normal(300)) for _ in range(size)]
        put, signal, wait = (options(f"{name}Options") for name in ("Put", "Signal", "WaitSignal"))
        works = [window.put(parts[rank], after, 5, False, put)]
        works.append(window.signal(after, False, signal))
        works.append(window.wait_signal(before, True, wait))
        check.that(all(isinstance(work, td.Work) and work.wait() for work in works), "works")
        want = torch.zeros(N, dtype=torch.float64)
        want[5:305] = parts[before]
        check.equal(memory, want, "put")
        out = torch.empty(300, dtype=torch.float64)
        window.get(out, after, 5).wait()
        check.equal(out, parts[rank], "get")
        td.barrier(group)
        for other in range(size):
            window.accumulate(torch.full((N,), 2.0, dtype=torch.float64), other, op=td.ReduceOp.SUM)
        td.barrier(group)
        for _ in range(size):
            want += 2  # one by one, as they were added
        check.equal(memory, want, "accumulate")
        check.equal(window.map_remote_tensor(rank), memory, "map_remote_tensor")
        window.tensor_deregister()
        check.done()
        with parallel_raises(ValueError, match="contiguous"):
            group.new_window(torch.ones(4, 4).t())


def test_a_wait_for_a_signal_has_the_timeout_of_torchs_options():
    with torchs_group() as group:
        memory = hpcdist.zeros(4, group=hpcdist.torch.group(group))
        window = group.new_window(memory)
        opts = options("WaitSignalOptions") or hpcdist.WaitSignalOptions()
        opts.timeout = timedelta(milliseconds=50)
        with parallel_raises(dist.DistTimeoutError, match=r"0\.05 s in wait_signal"):
            window.wait_signal(group.rank(), False, opts)


def test_a_timeout_of_foreign_options_is_a_number_of_seconds_or_refused():
    with torchs_group() as group:
        window, own = group.new_window(torch.zeros(4)), group.rank()
        with parallel_raises(dist.DistTimeoutError, match=r"0\.05 s in wait_signal"):
            window.wait_signal(own, False, SimpleNamespace(timeout=0.05))
        with parallel_raises(TypeError, match=r"a datetime\.timedelta or seconds, not str"):
            window.put(torch.ones(2), own, 0, False, SimpleNamespace(timeout="3"))
        with parallel_raises(TypeError, match="opts must be a PutOptions, not int"):
            window.put(torch.ones(2), own, 0, False, 3)


def test_hooks_see_operations_of_both_sides():
    with torchs_group() as group:
        begins, begun = [], []
        group.register_pre_hook(7, begins.append)
        group.register_post_hook(7, begun.append)
        tensor, size = torch.ones(3), group.size()
        td.all_reduce(tensor, group=group)
        td.broadcast(tensor, group=group, group_src=size - 1, async_op=True).wait()
        td.all_gather_into_tensor(torch.empty(3 * size), tensor, group=group)
        dist.all_reduce(tensor, group=hpcdist.torch.group(group))
        td.barrier(group)
        names = ["ALLREDUCE", "BROADCAST", "ALLGATHER_BASE", "ALLREDUCE", "BARRIER"]
        kinds = getattr(c10d, "HookOpName", None)
        wanted = names if kinds is None else [kinds.__members__[name] for name in names]
        parallel_assert([seen.name for seen in begins] == wanted, f"{begins}")
        parallel_assert(
            [seen.op_id for seen in begins] == [seen.op_id for seen in begun], f"{begun}"
        )
        parallel_assert([seen.async_op for seen in begins[:2]] == [False, True], f"{begins}")
        parallel_assert(begins[1].root == size - 1 and begins[0].input_tensors[0] is tensor, "what")
        works = [seen.work for seen in begun]
        parallel_assert(works[0] is None and isinstance(works[1], td.Work), f"{works}")
        group.unregister_pre_hook(7)
        group.unregister_post_hook(7)
        group.unregister_post_hook(8)
        td.all_reduce(tensor, group=group)
        parallel_assert(len(begins) == len(begun) == 5, "a hook ran that was removed")


def test_a_hook_that_raises_on_one_rank_is_an_error_on_all():
    with torchs_group() as group:

        def refuse(seen: object) -> None:
            if group.rank() == 0:
                raise RuntimeError("no more")

        group.register_pre_hook(1, refuse)
        with parallel_raises((RuntimeError, dist.DistError), match="no more"):
            td.all_reduce(torch.ones(2), group=group)
        group.unregister_pre_hook(1)
        tensor = torch.ones(2)
        td.all_reduce(tensor, group=group)
        parallel_assert(tensor.tolist() == [group.size()] * 2, f"{tensor}")


def test_torchs_names_of_arguments(rng):
    with torchs_group() as group:
        size, rank = group.size(), group.rank()
        t = torch.full((2,), rank + 1.0)
        group.allreduce(tensor=t, op=td.ReduceOp.MAX).wait()
        parallel_assert(t.tolist() == [size] * 2)
        t = torch.full((2,), rank + 1.0)
        group.reduce(tensor=t, root=size - 1, op=td.ReduceOp.MAX).wait()
        group.broadcast(tensor=t, root=size - 1).wait()
        parallel_assert(t.tolist() == [size] * 2)
        parts = [torch.zeros(1) for _ in range(size)]
        mine, got = torch.full((1,), float(rank)), torch.zeros(1)
        group.gather(output_tensors=parts, input_tensor=mine, root=0).wait()
        group.scatter(output_tensor=got, input_tensors=parts, root=0).wait()
        parallel_assert(got.item() == rank)
        group.reduce_scatter(
            output_tensor=got, input_tensor=[mine] * size, op=td.ReduceOp.MAX
        ).wait()
        parallel_assert(got.item() == size - 1)
        whole = torch.zeros(size)
        group._allgather_base(output=whole, input=mine).wait()
        group._reduce_scatter_base(outputTensor=got, inputTensor=whole).wait()
        parallel_assert(got.item() == rank * size)
        group.alltoall_base(
            output=whole, input=torch.arange(float(size)), output_split_sizes=[1] * size,
            input_split_sizes=[1] * size,
        ).wait()  # fmt: skip
        parallel_assert(whole.tolist() == [rank] * size)
        sent = group.send([mine], dstRank=(rank + 1) % size, tag=0)
        group.recv([got], srcRank=(rank - 1) % size, tag=0).wait()
        sent.wait()
        parallel_assert(got.item() == (rank - 1) % size)
        with parallel_raises(TypeError, match="unexpected keyword"):
            group.broadcast(t, nothing=0)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_root_of_numpy_or_a_tensor(kind):
    """Where it was not an int, it was 0."""
    with torchs_group() as group:
        check, (size, rank), last = Check(), (group.size(), group.rank()), group.size() - 1
        own = torch.full((2,), rank + 1.0)
        group.broadcast(found := own.clone(), kind(last)).wait()
        check.that(found.tolist() == [size] * 2, f"broadcast: {found}")
        group.reduce(found := own.clone(), kind(last), td.ReduceOp.MAX).wait()
        check.that(rank < last or found.tolist() == [size] * 2, f"reduce: {found}")
        parts = [torch.zeros(2) for _ in range(size)] if rank == last else []
        group.gather(parts, own, kind(last)).wait()
        check.that(all(t.tolist() == [i + 1.0] * 2 for i, t in enumerate(parts)), f"{parts}")
        group.scatter(found := torch.zeros(2), parts, kind(last)).wait()
        check.equal(found, own, "scatter")
        check.done()


def test_short_forms_refuse_what_is_no_root_or_operation():
    with torchs_group() as group:
        t = torch.ones(2)
        for call in (group.broadcast, group.reduce):
            with parallel_raises(TypeError, match="root must be a whole number, not float"):
                call(t, 1.0)
        for wrong in (5, dist.ReduceOp.MAX):
            with parallel_raises(TypeError, match=r"op must be a torch\.distributed\.ReduceOp"):
                group.allreduce(t, wrong)
        parallel_assert(t.tolist() == [1.0] * 2, f"{t}")


@pytest.mark.parametrize(("ranks", "why"), [([-1, 0], "rank -1 is outside"), ([0, 0], "twice")])
def test_split_group_refuses_ranks_that_the_group_has_not(ranks, why):
    with torchs_group() as group, parallel_raises(ValueError, match=why):
        group.split_group(ranks, timedelta(seconds=2))


def test_splits_of_numpy():
    with torchs_group() as group:
        size, rank = group.size(), group.rank()
        found, ones = torch.zeros(size), np.ones(size, np.int64)
        td.all_to_all_single(found, torch.arange(float(size)), ones, ones, group=group)
        parallel_assert(found.tolist() == [rank] * size, f"{found}")


def test_the_future_of_all_gather_coalesced_has_gloos_lists():
    """It was one flat list."""
    with torchs_group() as group:
        size, rank = group.size(), group.rank()

        def gathered(group):
            own = [torch.full((2,), float(rank)), torch.full((2,), rank + 10.0)]
            outputs = [[torch.zeros(2), torch.zeros(2)] for _ in range(size)]
            future = td.all_gather_coalesced(outputs, own, group=group, async_op=True)
            found = future.wait()
            if size == 1:
                return [t.tolist() for t in found]
            return [[t.tolist() for t in each] for each in found]

        found, wanted = gathered(group), gathered(td.new_group(backend="gloo"))
        parallel_assert(found == wanted, f"{found} and not {wanted}")
