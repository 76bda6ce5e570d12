"""A group that one rank has destroyed while others still use it: they learn of it at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Seconds: timeout of the groups; the most that a rank may wait.
LONG, SOON = 20, 5


def ones(count: int = 3) -> torch.Tensor:
    return torch.ones(count)


def received_in_slices(group: dist.ProcessGroup, source: int) -> None:
    """Wait again and again, each time for less than a message may take."""
    work = dist.irecv(ones(), source, group=group)
    while True:
        with suppress(dist.DistTimeoutError):
            work.wait(timedelta(seconds=0.2))
            return


CALLS: dict[str, Callable[[dist.ProcessGroup, int], object]] = {
    "all_reduce": lambda group, _: dist.all_reduce(ones(), group=group),
    "a long one": lambda group, _: dist.all_reduce(ones(1 << 18), group=group),
    "barrier": lambda group, _: dist.barrier(group),
    "monitored_barrier": lambda group, _: dist.monitored_barrier(group),
    "broadcast": lambda group, last: dist.broadcast(ones(), 0, group=group),
    "its broadcast": lambda group, last: dist.broadcast(ones(), last, group=group),
    "objects": lambda group, last: dist.all_gather_object([None] * group.size(), 1, group=group),
    "async": lambda group, _: dist.all_reduce(ones(), group=group, async_op=True).wait(),
    "recv": lambda group, last: dist.recv(ones(), last, group=group),
    "irecv": lambda group, last: dist.irecv(ones(), last, group=group).wait(),
    "in slices": received_in_slices,
    "a long send": lambda group, last: dist.send(ones(1 << 20), last, group=group),
}


def ended(call: Callable[[], object]) -> tuple[str, float]:
    """What a call ends with, and after how many seconds."""
    began = time.monotonic()
    try:
        call()
    except dist.DistError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "late"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_rank_that_destroys_a_group_ends_the_calls_of_the_others(used: bool, late: bool) -> None:
    """Whether they wait already, or come when it has long left; and so each later call."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    said = []
    for name, call in CALLS.items():
        group = dist.new_group(timeout=timedelta(seconds=LONG))
        if used:
            dist.all_reduce(ones(), group=group)
        dist.barrier()
        if rank == last:
            time.sleep(0 if late else 0.1)
            dist.destroy_process_group(group)
        else:
            time.sleep(0.1 if late else 0)
            for again in range(2):
                text, took = ended(lambda group=group, call=call: call(group, last))
                good = text.startswith("DistMismatchError: ") and took < SOON
                if not good or f"rank {last}" not in text or "destroyed" not in text:
                    said.append(f"{name} {again}: {text!r} after {took:.1f} s")
            dist.destroy_process_group(group)
    parallel_assert(not said, lambda: f"{said}")
    total = ones()
    dist.all_reduce(total)
    parallel_assert(total.tolist() == [last + 1] * 3)


def test_what_a_rank_has_begun_before_it_destroys_a_group_completes() -> None:
    """Its works are those of the others too; what only they have begun is an error."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for _ in range(2):
        group = dist.new_group(timeout=timedelta(seconds=LONG))
        sums = [torch.full((5,), rank + 1.0) for _ in range(4)]
        works = [dist.all_reduce(each, group=group, async_op=True) for each in sums[:3]]
        if rank == last:
            dist.send(ones(), 0, group=group)
            dist.destroy_process_group(group)
        else:
            if rank == 0:
                time.sleep(0.05)
            works.append(dist.all_reduce(sums[3], group=group, async_op=True))
        texts = [ended(work.wait)[0] for work in works]
        parallel_assert(texts[:3] == [""] * 3, lambda texts=texts: f"{texts}")
        right = (last + 1) * (last + 2) / 2
        parallel_assert(all(bool((each == right).all()) for each in sums[:3]), str(sums))
        parallel_assert(rank == last or "destroyed" in texts[3], lambda texts=texts: f"{texts}")
        if rank == 0:
            time.sleep(1)  # long after it was sent, and its sender has left
            got = torch.zeros(3)
            dist.recv(got, last, group=group)
            assert got.tolist() == [1.0] * 3
        if rank != last:
            dist.destroy_process_group(group)
        dist.barrier()


@pytest.mark.parametrize("name", list(CALLS))
def test_calls_name_a_rank_whose_own_calls_had_not_ended(name: str) -> None:
    """Its send is never received, so it does not free what it has of the group."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    dist.barrier()
    stays = ""
    if rank == last:
        sent = torch.ones(1 << 20)
        dist.isend(sent, 0, group=group, tag=7)
        group.timeout = timedelta(seconds=0.2)  # of destroy_process_group; the send has more
        stays, _ = ended(lambda: dist.destroy_process_group(group))
    dist.barrier()
    text, took = "", 0.0
    if rank != last:
        text, took = ended(lambda: CALLS[name](group, last))
        dist.destroy_process_group(group)
    dist.barrier()
    parallel_assert(rank != last or "did not end within" in stays, stays)
    named = f"rank {last} of group '{group.name}' has destroyed it"
    parallel_assert(rank == last or (named in text and took < SOON), f"{text!r} {took:.1f}")


WINDOW: dict[str, Callable[[dist.Window, int], object]] = {
    "put": lambda window, last: window.put(ones(), last),
    "get": lambda window, last: window.get(ones(), last),
    "accumulate": lambda window, last: window.accumulate(ones(), last),
    "signal": lambda window, last: window.signal(last),
}


@pytest.mark.parametrize("name", list(WINDOW))
def test_memory_of_a_rank_that_has_destroyed_the_group_is_not_used(name: str) -> None:
    """That of the others is, until they destroy it too."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    memory = dist.zeros(3, group=group)
    window = group.new_window(memory)
    dist.barrier()
    said = ""
    if rank == last:
        dist.destroy_process_group(group)
    else:
        text, until = "", time.monotonic() + LONG
        while not text and time.monotonic() < until:  # until the last rank is there
            text, _ = ended(lambda: WINDOW[name](window, last))
        wanted = f"DistMismatchError: rank {last} of group '{group.name}' has destroyed it: {name} "
        if not text.startswith(wanted):
            said = f"{text!r}, not {wanted!r}"
        window.put(ones(), rank)
        dist.destroy_process_group(group)
    dist.barrier()
    parallel_assert(not said, said)
    parallel_assert(rank == last or memory.tolist() == [1.0] * 3, f"{memory}")


@pytest.mark.one_node  # whoever drops a group sends no message
@pytest.mark.parametrize("name", ["all_reduce", "recv", "a long send", "put", "signal"])
def test_a_rank_that_has_dropped_the_group_is_not_said_to_have_destroyed_it(name: str) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group: Any = dist.new_group(timeout=timedelta(seconds=LONG))
    window: Any = group.new_window(dist.zeros(3, group=group))
    called = group.name if rank != last else ""  # a group whose name was asked for is kept
    dist.barrier()
    text = ""
    if rank == last:
        del group, window
        gc.collect()
        dist.barrier()
    else:
        dist.barrier()
        until = time.monotonic() + LONG
        while not text and time.monotonic() < until:  # the last rank leaves with its next call
            text, _ = ended(
                partial(WINDOW[name], window, last)
                if name in WINDOW
                else partial(CALLS[name], group, last)
            )
    if rank == last:
        dist.destroy_process_group(dist.new_group([rank], use_local_synchronization=True))
    dist.barrier()
    named = f"rank {last} of group '{called}' has dropped all references to it"
    parallel_assert(rank == last or named in text, text)


def test_a_receive_from_any_rank_names_those_that_have_destroyed_the_group() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    dist.barrier()
    text, took = "", 0.0
    if rank == 0:
        text, took = ended(lambda: dist.recv(ones(), group=group))
    dist.destroy_process_group(group)
    who = "ranks " + ", ".join(map(str, range(1, last + 1))) if last > 1 else "rank 1"
    wanted = f"DistMismatchError: {who} of group '{group.name}' ha{'ve' if last > 1 else 's'} "
    parallel_assert(rank > 0 or (text.startswith(wanted) and took < SOON), f"{text!r} {took:.1f}")
