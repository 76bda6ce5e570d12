"""Ranks that come late and give up, at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from cases import Check, here
from long_form import size as how_many

import hpcdist as dist
from hpcdist.backends.mpi import LEVELS
from hpcdist.testing import parallel_raises


class Endings:
    """What the ranks get of one call after the other: all the right result, or all an error.

    At level fast of the entry check some may have the one and some the other. Then all get errors
    of all later calls.
    """

    def __init__(self, check: Check, group: dist.ProcessGroup) -> None:
        self._check, self._group = check, group
        self._fast = group.carrier.check == LEVELS["fast"]
        self.apart = False

    def judge(self, number: int, result: int) -> set[int]:
        """Compare; 1: the right result, -1: a timeout that has changed nothing, else a mistake."""
        outcomes: list[int] = [0] * here()[1]
        dist.all_gather_object(outcomes, result)
        kinds = set(outcomes)
        mixed = kinds == {1, -1}
        fits = kinds == {-1} or (not self.apart and (kinds == {1} or (mixed and self._fast)))
        self._check.that(fits, f"check {number}: {outcomes}, after mixed ones: {self.apart}")
        self.apart |= mixed
        return kinds

    def end(self) -> None:
        """Make one more call, in time."""
        total = torch.ones(3)
        if self.apart:
            with parallel_raises(dist.DistTimeoutError, match="other ranks have gone on"):
                dist.all_reduce(total, group=self._group)
        else:
            dist.all_reduce(total, group=self._group)
            self._check.that(bool((total == here()[1]).all()), f"{total}")


def give_up_at_random(group: dist.ProcessGroup, count: Callable[[int], None]) -> None:
    """Late ranks and a timeout of 2 ms: the endings are as they must be."""
    check, (rank, size) = Check(), here()
    endings = Endings(check, group)
    group.carrier.timeout = patience = 0.002
    luck = random.Random(rank)
    ended = [0, 0]
    for number in range(how_many(150, 20_000)):
        time.sleep(luck.choice((0.0, 0.0, 0.0, 2 * patience * luck.random())))
        tensor = torch.tensor([number * 10 + rank])
        root = number % size
        want = number * 10 + root
        try:
            if number % 2:
                dist.broadcast(tensor, root, group=group)
            else:
                work = dist.all_reduce(tensor, group=group, async_op=number % 3 == 0)
                if work is not None:
                    work.wait()
                want = sum(number * 10 + each for each in range(size))
            result = int(int(tensor) == want)
        except dist.DistTimeoutError:
            result = -1
        endings.judge(number, result)
        ended[result < 0] += 1
    group.carrier.timeout = 20.0
    endings.end()
    count(sum(ended))
    check.done()
