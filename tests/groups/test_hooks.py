"""Hooks before and after a group's operations."""

from __future__ import annotations

import threading

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.hooked import Hooked
from hpcdist.groups.hooks import Hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    if made in dist.group.world.groups:
        dist.destroy_process_group(made)


def calls(pg, size):
    """Every kind of operation, with what its hooks are to see: name, inputs, outputs, root."""
    rank = pg.rank()
    t, whole = torch.ones(2), torch.ones(2 * size)
    parts = [torch.ones(2) for _ in range(size)]
    mine = parts if rank == 0 else None
    n = size if rank == 0 else 0
    return [
        (lambda a: dist.all_reduce(t, group=pg, async_op=a), "all_reduce", 1, 1, -1),
        (lambda a: dist.all_reduce_coalesced([t, t.clone()], group=pg, async_op=a),
         "all_reduce_coalesced", 2, 2, -1),
        (lambda a: dist.broadcast(t, 0, pg, a), "broadcast", 1, 1, 0),
        (lambda a: dist.reduce(t, 0, group=pg, async_op=a), "reduce", 1, 1, 0),
        (lambda a: dist.all_gather(parts, t, pg, a), "all_gather", 1, size, -1),
        (lambda a: dist.all_gather_single(whole, t, pg, a), "all_gather_into_tensor", 1, 1, -1),
        (lambda a: dist.gather(t, mine, 0, pg, a), "gather", 1, n, 0),
        (lambda a: dist.gather_single(t, whole if rank == 0 else None, 0, pg, a), "gather_single",
         1, n, 0),
        (lambda a: dist.scatter(t, mine, 0, pg, a), "scatter", n, 1, 0),
        (lambda a: dist.reduce_scatter(t, parts, group=pg, async_op=a), "reduce_scatter",
         size, 1, -1),
        (lambda a: dist.reduce_scatter_single(t, whole, group=pg, async_op=a),
         "reduce_scatter_tensor", 1, 1, -1),
        (lambda a: dist.all_to_all([x.clone() for x in parts], parts, pg, a), "all_to_all",
         size, size, -1),
        (lambda a: dist.all_to_all_single(whole.clone(), whole, group=pg, async_op=a),
         "all_to_all_single", 1, 1, -1),
        (lambda a: dist.barrier(pg, a), "barrier", 0, 0, -1),
    ]  # fmt: skip


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hooks_see_every_collective(group, asynchronous):
    before, after = [], []
    group.register_pre_hook(7, before.append)
    group.register_post_hook(7, after.append)
    wrong = []
    for call, name, inputs, outputs, root in calls(group, group.size()):
        before.clear(), after.clear()
        work = call(asynchronous)
        if asynchronous:
            work.wait()
        if len(before) != 1 or len(after) != 1:
            wrong.append(f"{name}: {len(before)} and {len(after)} calls")
            continue
        seen, done = before[0], after[0]
        found = seen.name, len(seen.input_tensors), len(seen.output_tensors), seen.root
        if found != (name, inputs, outputs, root) or seen.async_op is not asynchronous:
            wrong.append(f"{name}: {found} {seen.async_op}")
        if (done.name, done.op_id) != (name, seen.op_id) or done.work is not work:
            wrong.append(f"{name}: afterwards {done}")
    parallel_assert(not wrong, f"{wrong}")
    group.unregister_pre_hook(7)
    group.unregister_post_hook(7)
    parallel_assert(not isinstance(group.carrier, Hooked))


@pytest.mark.mpi(min_size=2)
def test_hooks_see_messages(group):
    before = []
    group.register_pre_hook(0, before.append)
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sent, got = torch.full((2,), float(rank)), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, sent, right, group), dist.P2POp(dist.irecv, got, left, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    work = dist.isend(sent, right, group)
    dist.recv(got, left, group)
    work.wait()
    found = [(seen.name, seen.root, seen.async_op) for seen in before]
    parallel_assert(
        found
        == [("isend", right, True), ("irecv", left, True), ("isend", right, True),
            ("recv", left, False)],
        f"{found}",
    )  # fmt: skip
    parallel_assert(got.tolist() == [left, left])


def test_hooks_of_the_default_group_and_of_objects():
    before = []
    world = dist.group.WORLD
    world.register_pre_hook(1, before.append)
    try:
        dist.all_reduce(torch.ones(1))
        found = [None] * world.size()
        dist.all_gather_object(found, world.rank())
    finally:
        world.unregister_pre_hook(1)
    dist.all_reduce(torch.ones(1))
    names = [seen.name for seen in before]
    parallel_assert(
        names[0] == "all_reduce" and set(names[1:]) == {"all_gather_object"}, f"{names}"
    )
    parallel_assert(found == list(range(world.size())))


@pytest.mark.mpi(min_size=2)
def test_an_exception_in_a_hook_is_raised_on_all_ranks(group):
    def refuse(_seen):
        raise ValueError("no such luck")

    if group.rank() == 1:
        group.register_pre_hook(0, refuse)
    with parallel_raises((ValueError, dist.DistMismatchError), match="no such luck"):
        dist.all_reduce(torch.ones(4), group=group)
    if group.rank() == 1:
        group.unregister_pre_hook(0)
    t = torch.ones(4)
    dist.all_reduce(t, group=group)
    parallel_assert(t[0] == group.size())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_in_a_hook_leaves_a_call_that_can_be_made_again(group, kind):
    pending = [group.rank() == 1]

    def interrupted(_seen):
        if pending.pop():
            raise kind

    group.register_pre_hook(0, interrupted)
    t = torch.ones(4)
    try:
        dist.all_reduce(t, group=group)
    except kind:
        pending.append(False)
        dist.all_reduce(t, group=group)
    group.unregister_pre_hook(0)
    parallel_assert(t[0] == group.size())


def mixed(group):
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(2, dtype=torch.complex64)], group=group)


def sparse(group):
    dist.all_reduce(torch.eye(3).to_sparse(), group=group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reduce", [mixed, sparse], ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_type_error_of_a_hook_ends_a_call_that_has_another_way(group, reduce, when):
    """It was taken for the tensor's, and the reduction was made once more, by one rank alone."""

    def refuse(_seen):
        raise TypeError("a mistake in the hook")

    seq, first, raised = group.carrier.seq, group.rank() == 0, None
    if first:
        getattr(group, f"register_{when}_hook")(0, refuse)
    try:
        reduce(group)
    except (TypeError, dist.DistError) as error:
        raised = error
    if first:
        getattr(group, f"unregister_{when}_hook")(0)
    told = "a mistake in the hook" in str(raised)
    parallel_assert(told if first or raised else (when, reduce) == ("post", mixed), f"{raised!r}")
    counted = [None] * group.size()
    dist.all_gather_object(counted, (group.carrier.seq - seq) % 2**32)
    parallel_assert(len(set(counted)) == 1, f"{counted}")
    t = torch.full((4,), 1.0 + group.rank())
    dist.all_reduce(t, group=group)
    parallel_assert(t[0] == sum(range(1, group.size() + 1)), f"{t}")


def test_hooks_of_sparse_tensors_and_subgroups(group):
    before = []
    group.register_pre_hook(0, before.append)
    t = torch.eye(3).to_sparse()
    dist.all_reduce(t, group=group)
    parallel_assert(torch.equal(t.to_dense(), torch.eye(3) * group.size()) and bool(before))


def test_wrong_registrations(group):
    group.register_pre_hook(0, print)
    cases = [
        (ValueError, "already", lambda: group.register_pre_hook(0, print)),
        (ValueError, "no hook 1", lambda: group.unregister_pre_hook(1)),
        (ValueError, "no hook 0", lambda: group.unregister_post_hook(0)),
        (TypeError, "callable", lambda: group.register_post_hook(0, 3)),
        (dist.DistBackendError, "abort hooks", lambda: group.register_abort_hook(0, print)),
        (ValueError, "no abort hook", lambda: group.unregister_abort_hook(0)),
    ]
    for error, text, call in cases:
        with parallel_raises(error, match=text):
            call()
    parallel_assert(not group.supports_abort_hooks)
    dist.destroy_process_group(group)
    with parallel_raises(ValueError, match="destroyed"):
        group.register_pre_hook(5, print)


def test_a_hook_that_comes_while_another_thread_removes_one(group, monkeypatch):
    group.register_pre_hook(0, print)
    carry, looked, registered = Hooks.carry, threading.Event(), threading.Event()
    seen: list = []

    def slow(self, backends):
        made = carry(self, backends)
        if not looked.is_set():
            looked.set()
            registered.wait(0.2)
        return made

    def register():
        looked.wait(5)
        group.register_pre_hook(1, seen.append)
        registered.set()

    monkeypatch.setattr(Hooks, "carry", slow)
    threads = [
        threading.Thread(target=group.unregister_pre_hook, args=(0,)),
        threading.Thread(target=register),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.all_reduce(torch.ones(1), group=group)
    parallel_assert([each.name for each in seen] == ["all_reduce"])


def test_timeout_of_a_group_with_hooks(group):
    from datetime import timedelta

    group.register_pre_hook(0, lambda seen: None)
    dist.set_timeout(timedelta(seconds=17), group)
    group.unregister_pre_hook(0)
    parallel_assert(group.timeout == timedelta(seconds=17))
