"""A job with two spares, for one case of test_spares.py: spares.py CASE."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch

import hpcdist as dist
from hpcdist.elastic import State, elastic, joining

STEPS, FATAL = 8, 4
#: The ranks that die in step FATAL, by case; rank 1 in all others.
VICTIMS = {"neighbours": (1, 2), "more": (1, 2, 3), "none": (), "all": (0, 1, 2, 3)}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def calls() -> None:
    """What a former spare cannot call: each says so at once."""
    one = torch.ones(2)
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(one),
        "asynchronous": lambda: dist.all_reduce(one, async_op=True),
        "send": lambda: dist.send(one, 0),
        "objects": lambda: dist.all_gather_object([None] * dist.get_world_size(), 3),
        "method": lambda: dist.group.WORLD.allreduce(one),
        "new_group": lambda: dist.new_group([0, dist.get_rank()]),
        "reconfigure": lambda: dist.group.WORLD.reconfigure(),
    }.items():
        began = time.monotonic()
        try:
            call()
        except dist.DistError as error:
            said = "elastic.joining()" in str(error) and time.monotonic() - began < 1
            print(f"refused {name} {said}", flush=True)
    dist.barrier()
    print(f"place {dist.get_rank()} {dist.get_world_size()} {os.environ['RANK']}", flush=True)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100, exit=True)
    if case == "different":
        os.environ["HPCDIST_SPARES"] = os.environ["OMPI_COMM_WORLD_RANK"]
    dist.init_process_group(timeout=timedelta(seconds=30))
    spare, victims = joining(), VICTIMS.get(case, (1,))
    if case == "early" and dist.get_rank() == 1 and not spare:
        die()
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 5 if spare and case == "shapes" else 4)
    if spare and case == "calls":
        calls()
    if spare and case == "raises":
        raise RuntimeError("of the program")
    parallel = dist.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": parallel, "optimizer": optimizer}
    if spare and case == "uncovered":
        dist.DistributedDataParallel(model)  # gone at once: it does not count
        other = dist.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert other.module is not None
    if spare and case == "layout":
        del parts["optimizer"]
    state = State(**parts)
    if case == "commit first":
        state.commit()
    if case == "resume first":
        state.resume()
        state.commit()

    def step(index: int) -> None:
        if dist.get_rank() in victims and index == FATAL and not spare:
            die()
        optimizer.zero_grad()
        parallel(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()

    if case.startswith("own"):
        own_loop(case, state, step)
    else:
        loops(case, state, step)
    total = float(model.weight.detach().double().sum())
    print(f"end {dist.get_rank()}/{dist.get_world_size()} {state.step} {total:.9f}", flush=True)
    if case == "second":
        State(**parts).commit()
    if case not in ("exit", "finally"):
        dist.destroy_process_group()


def loops(case: str, state: State, step: Callable[[int], None]) -> None:
    """One loop, or two on one State, of which the second has the death."""
    for steps in (FATAL, STEPS) if case == "two loops" else (STEPS,):
        for each in elastic(state, steps, every=3 if case == "every" else 1):
            with each:
                step(each.index)


def own_loop(case: str, state: State, step: Callable[[int], None]) -> None:
    """A loop of the program's own, which counts its steps itself."""
    state.values.done = 0
    if case == "own, resumed":
        state.resume()
    else:
        state.commit()
    while state.values.done < STEPS:
        well = True
        try:
            step(state.values.done)
            state.values.done += 1
        except dist.RankFailedError:
            well = False
        state.commit(yes=well)
    state.step = state.values.done


if __name__ == "__main__":
    try:
        main()
    finally:
        if sys.argv[1] == "finally":
            dist.destroy_process_group()
