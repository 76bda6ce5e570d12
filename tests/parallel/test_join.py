"""Join: ranks with different numbers of inputs train together."""

from __future__ import annotations

import dataclasses
import functools
import logging
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from gloo import gloo, gloo_world
from torch.distributed.algorithms import join as theirs

import hpcdist as dist
from hpcdist.parallel import join as ours
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


@dataclasses.dataclass
class Option:
    number: int
    other: Any


def counters(module, package, group):
    """A joinable and its hook for either library: the sum of the ranks that still take part."""

    class Hook(module.JoinHook):
        def __init__(self, owner):
            self.owner = owner

        def main_hook(self):
            self.owner.shadowed += 1
            package.all_reduce(torch.zeros(1))

        def post_hook(self, is_last_joiner):
            self.owner.last = is_last_joiner
            total = torch.tensor([self.owner.total])
            first = torch.tensor([float(dist.get_rank()) if is_last_joiner else -1.0])
            package.all_reduce(first, op=package.ReduceOp.MAX)
            package.broadcast(total, int(first))
            self.owner.total = total.item()

    class Counter(module.Joinable):
        def __init__(self):
            super().__init__()
            self.total, self.shadowed, self.last, self.kwargs = 0.0, 0, None, None

        def __call__(self):
            work = module.Join.notify_join_context(self)
            one = torch.ones(1)
            package.all_reduce(one)
            if work is not None:
                work.wait()
            self.total += one.item()

        def join_hook(self, **kwargs):
            self.kwargs = kwargs
            return Hook(self)

        join_device = property(lambda self: torch.device("cpu"))
        join_process_group = property(lambda self: group())

    return Counter


def our_counter():
    return counters(ours, dist, lambda: dist.group.WORLD)()


def test_same_as_torch():
    gloo_world()
    me = dist.get_rank()
    found = []
    for module, package in ((ours, dist), (theirs, gloo)):
        make = counters(module, package, lambda package=package: package.group.WORLD)
        one, other = make(), make()
        with module.Join([one, other], colour="red"):
            for _ in range(1 + 2 * me):
                one()
                other()
        found.append([(c.total, c.shadowed, c.last, c.kwargs) for c in (one, other)])
    parallel_assert(found[0] == found[1], lambda: f"{found[0]} is not {found[1]}")
    size = dist.get_world_size()
    parallel_assert(found[0][0][1:3] == (2 * (size - 1 - me), me == size - 1))


def test_even_inputs_none_at_all_and_afterwards():
    counter = our_counter()
    for steps in (2, 0):
        with ours.Join([counter]):
            for _ in range(steps):
                counter()
        parallel_assert(counter.shadowed == 0 and counter.last)
    before = dist.group.WORLD.carrier.seq
    counter()  # outside of the block it makes its own collective only
    with ours.Join([counter], enable=False):
        counter()
    parallel_assert(dist.group.WORLD.carrier.seq == before + 2 and counter.shadowed == 0)


def test_the_handle_counts_who_still_trains():
    counter = our_counter()
    seen = []
    with ours.Join([counter]):
        for _ in range(1 + dist.get_rank()):
            work = ours.Join.notify_join_context(counter)
            dist.all_reduce(torch.zeros(1))
            work.wait()
            seen.append(int(work.result()[0][0]))
        counter.total = float(len(seen))
    size = dist.get_world_size()
    parallel_assert(seen == [size - step for step in range(1 + dist.get_rank())], lambda: str(seen))


@pytest.mark.mpi(min_size=2)
def test_blocks_of_one_joinable_are_not_nested():
    counter, size = our_counter(), dist.get_world_size()
    before = ours.Join([counter])
    with ours.Join([counter]):
        with parallel_raises(ValueError, match="in the block of another Join already"):
            ours.Join([counter])
        with parallel_raises(ValueError, match="in the block of another Join already"):
            before.__enter__()
        for _ in range(dist.get_rank() + 1):
            with ours.Join([counter], enable=False):
                counter()
    parallel_assert(counter.shadowed == size - 1 - dist.get_rank())
    with before:
        counter()


@pytest.mark.mpi(min_size=2)
def test_throw_on_early_termination():
    counter = our_counter()
    steps = 0
    with parallel_raises(RuntimeError, match="exhaust.*throw_on_early_termination"):
        with ours.Join([counter], throw_on_early_termination=True):
            for _ in range(3 if dist.get_rank() == 0 else 5):
                counter()
                steps += 1
    parallel_assert(steps == 3)
    parallel_assert(np.isfinite(counter.total))


@pytest.mark.mpi(min_size=2)
def test_a_collective_that_no_hook_shadows_is_named():
    counter = our_counter()
    loss = torch.ones(1)
    with parallel_raises(dist.DistMismatchError, match="Join"), ours.Join([counter]):
        if dist.get_rank():
            dist.all_reduce(loss)


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ():
    counter, odd = our_counter(), dist.get_rank() == dist.get_world_size() - 1
    with parallel_raises(dist.DistMismatchError, match="'throw_on_early_termination'"):
        with ours.Join([counter], throw_on_early_termination=odd):
            pass
    text = "Join" if odd else "disagree"
    with parallel_raises(dist.DistMismatchError, match=text):
        with ours.Join([counter], enable=not odd):
            dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_after_a_block_that_could_not_be_entered():
    counter, odd = our_counter(), dist.get_rank() == dist.get_world_size() - 1
    with parallel_raises(dist.DistMismatchError, match="argument 'value'"):
        with ours.Join([counter], value=odd):
            pass
    before = dist.group.WORLD.carrier.seq
    counter()
    parallel_assert(dist.group.WORLD.carrier.seq == before + 1)  # no count of who still trains
    with ours.Join([counter]):
        counter()


@pytest.mark.mpi(min_size=2)
def test_arguments_that_only_look_different():
    """An object's default text has its address in it, which no two processes have in common."""
    counter, odd = our_counter(), dist.get_rank() == dist.get_world_size() - 1
    kept = [bytearray(1 << 16 if odd else 16)]  # no two have objects at the same addresses
    other = {
        "scaler": object(),
        "criterion": lambda x: x,
        "several": [object(), {"f": test_wrong_use, "set": {3, 1, 2} if odd else {2, 1, 3}}],
        "partial": functools.partial(max, 1),
        "weights": torch.ones(2) * odd,
        "log": logging.getLogger(f"rank{odd}"),
        "dtype": torch.float32,
        "option": Option(2, kept),
    }
    with ours.Join([counter], **other):
        counter()
    parallel_assert(counter.kwargs == other)
    for value in (
        [1, {"a": (2, 3.0 + odd)}],
        {"a": torch.float32 if odd else torch.float64},
        Option(odd, None),
        object() if odd else lambda: 1,
        np.float32(1 + odd),
        timedelta(seconds=1 + odd),
        torch.nn.Linear if odd else torch.nn.Conv2d,
    ):
        with parallel_raises(dist.DistMismatchError, match="argument 'value'"):
            with ours.Join([counter], value=value):
                pass


def test_wrong_use():
    with parallel_raises(ValueError, match="at least one"):
        ours.Join([])

    class Careless(ours.Joinable):
        def __init__(self):
            pass

        join_hook = join_device = join_process_group = None

    with parallel_raises(RuntimeError, match=r"Careless must call Joinable.__init__"):
        ours.Join.notify_join_context(Careless())
    group = dist.new_group()
    other = counters(ours, dist, lambda: group)()
    with parallel_raises(ValueError, match="the same process group"):
        ours.Join([our_counter(), other])
    dist.destroy_process_group(group)
