"""Ranks that come late and give up, at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from cases import Check, here
from long_form import size as how_many

import hpcdist as dist


def give_up_at_random(group: dist.ProcessGroup, count: Callable[[int], None]) -> None:
    """Late ranks and a timeout of 2 ms: all have the right result, or all have an error."""
    check, (rank, size) = Check(), here()
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
        outcomes: list[int] = [0] * size
        dist.all_gather_object(outcomes, result)
        check.that(set(outcomes) in ({1}, {-1}), f"check {number}: {outcomes}")
        ended[result < 0] += 1
    group.carrier.timeout = 20.0
    count(sum(ended))
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    check.that(bool((total == size).all()), f"{total}")
    check.done()
