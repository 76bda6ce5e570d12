"""A peer that does not come, comes late, or is held up in a callback: named, or waited for."""

import time

import pytest
import torch
from cases import Check, here
from lateness import names
from long_form import LONG, deadline
from long_form import size as how_many
from mismatches import CALLS, OBJECTS, Spec, make

import hpcdist as dist

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Seconds: the group's timeout here, and what may come on top.
PATIENCE = 0.2
SLACK = 1.0 if LONG else 4.0


@pytest.fixture
def group():
    made = dist.new_group()
    made.carrier.timeout = PATIENCE
    yield made
    made.carrier.timeout = 20.0
    dist.barrier(made)
    dist.destroy_process_group(made)


def ends(spec: Spec) -> tuple[str, float]:
    """Make a call; the error it ended with as text, and how long it took."""
    began = time.monotonic()
    text = ""
    try:
        work = make(spec)
        if work is not None:
            work.wait()
    except dist.DistTimeoutError as error:
        text = f"timeout: {error}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - began


@deadline(60, long=300)
def test_a_peer_that_never_comes_is_named(rng, group, count):
    """Every collective, sync and async; the rank that stayed away is told when it does come."""
    check, (rank, size) = Check(), here()
    calls = [Spec(name, async_op=async_op, group=group) for name in CALLS for async_op in (0, 1)]
    calls = [spec for spec in calls if not (spec.async_op and spec.name in OBJECTS)]
    rng.shuffle(calls)
    chosen = calls[: how_many(6, len(calls))]
    slowest = 0.0
    for number, spec in enumerate(chosen):
        absent = number % size
        what = f"{spec.name}, async {spec.async_op}, rank {absent} away"
        dist.barrier()
        if rank != absent:
            text, spent = ends(spec)
            slowest = max(slowest, spent - PATIENCE)
            check.that(text.startswith("timeout") and names(text, absent), f"{what}: {text}")
            check.that(PATIENCE * 0.9 < spent < PATIENCE + SLACK, f"{what}: {spent:.2f} s")
        dist.barrier()
        if rank == absent:
            text, spent = ends(spec)
            told = "too late" in text or f"waiting for rank {rank}" in text  # between nodes
            check.that(text.startswith("timeout") and told, f"{what}, late: {text}")
            check.that(spent < SLACK, f"{what}, late: {spent:.2f} s")
    count(len(chosen), slowest)
    check.done()


def test_a_receive_that_nobody_sends_names_the_sender(group, count):
    check, (rank, size) = Check(), here()
    peer = (rank + 1) % size
    began = time.monotonic()
    text = ""
    try:
        dist.recv(torch.empty(3), group=group, group_src=peer)
    except dist.DistTimeoutError as error:
        text = str(error)
    spent = time.monotonic() - began
    check.that(f"from rank {peer}" in text, text)
    check.that(spent < PATIENCE + SLACK, f"{spent:.2f} s")
    count(1, spent - PATIENCE)
    check.done()


def test_the_last_sentence_has_room_after_a_long_text(group, count):
    """What a program reads in order to go on: whether the group can still be used."""
    rank, size = here()
    if rank == size - 1:
        time.sleep(3 * PATIENCE)
    with pytest.raises(dist.DistTimeoutError) as info:
        group.carrier.barrier(api=2500 * "x")
    text = str(info.value)
    assert text.endswith("x...\nNothing was transferred; the group can still be used."), text
    assert len(text) < 2048
    count(1)


def test_late_is_fine(count):
    check, (rank, size) = Check(), here()
    for late in range(size):
        for name in ("all_reduce", "all_to_all", "all_gather_object"):
            if rank == late:
                time.sleep(0.1)
            text, _ = ends(Spec(name))
            check.that(not text, f"{name}, rank {late} late: {text}")
    count(3 * size)
    check.done()


@pytest.mark.parametrize("where", ["future", "backward"])
def test_a_peer_that_sleeps_inside_a_callback_is_named(group, where, count):
    """A callback of a future runs on a thread of hpcdist's, one of autograd inside backward()."""
    check, (rank, size) = Check(), here()
    sleeper, nap = size - 1, 3 * PATIENCE
    text = spent = None
    dist.barrier()
    if rank == sleeper and where == "backward":
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(lambda grad: time.sleep(nap))
        weight.sum().backward()
    if where == "future":
        future = dist.barrier(async_op=True).get_future()
        chained = future.then(lambda _: time.sleep(nap if rank == sleeper else 0))
        chained.wait()
    text, spent = ends(Spec("all_reduce", group=group))
    check.that(text.startswith("timeout"), text)
    if rank != sleeper:
        check.that(f"rank {sleeper}" in text, text)
        check.that(spent < PATIENCE + SLACK, f"{spent:.2f} s")
    # the futures' thread was never what the ranks of other groups waited for
    total = torch.ones(1)
    dist.all_reduce(total)
    check.that(float(total) == size, f"{total}")
    count(1, spent - PATIENCE if rank != sleeper else 0.0)
    check.done()
