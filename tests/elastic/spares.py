"""A job of three ranks and spares, for cases of test_spares.py: spares.py CASE,CASE..."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

import hpcdist as dist
from hpcdist import _engine
from hpcdist.elastic import State, elastic, handover, joining
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.recordings import read

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from patience import patience  # noqa: E402

STEPS, FATAL = 8, 4
#: The ranks that die in step FATAL, by case; rank 1 in all others.
VICTIMS = {"neighbours": (1, 2), "none": (), "all": (0, 1, 2)}
CASES = sys.argv[1].split(",")
INTERRUPTED = Path(os.environ.get("HPCDIST_TEST_FOLDER", ""), "interrupted")
FATAL_BEGUN = Path(os.environ.get("HPCDIST_TEST_FOLDER", ""), "fatal")


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
            said = "elastic.joining()" in str(error) and time.monotonic() - began < patience()
            print(f"refused {name} {said}", flush=True)
    dist.barrier()
    print(f"place {dist.get_rank()} {dist.get_world_size()} {os.environ['RANK']}", flush=True)


def raise_while_waiting() -> None:
    """Let the first spare's wait fail, and the second one's after the recovery from that."""
    recover, number = _engine.recover, int(os.environ["OMPI_COMM_WORLD_RANK"]) - 3
    calls = itertools.count()

    def fails(*args: object) -> None:
        if next(calls) == number:
            while not FATAL_BEGUN.exists():
                time.sleep(0.01)
            raise (SystemExit if number else RuntimeError)("of the wait")
        recover(*args)

    if number >= 0:
        _engine.recover = fails


def die_as_told() -> None:
    while not FATAL_BEGUN.exists():
        time.sleep(0.01)
    die()


def lose_a_spare() -> None:
    """Go on before the first commit, and make another group, when the first spare has died."""
    FATAL_BEGUN.touch()
    while not _engine.lost_ranks(dist.group.WORLD.carrier.native):
        time.sleep(0.01)
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(group)


def die_as_holder() -> None:
    """Let rank 2 die when rank 1 has got from it what the former rank 1 alone had."""

    def wait_and_die(*_rest: object, **_more: object) -> None:
        time.sleep(0.6)
        die()

    handover.put_back_all = wait_and_die


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    if "zero" in CASES:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100, exit=True)
    if "different" in CASES:
        os.environ["HPCDIST_SPARES"] = os.environ["OMPI_COMM_WORLD_RANK"]
    if "wait" in CASES:
        raise_while_waiting()
    if "early spare" in CASES and os.environ["OMPI_COMM_WORLD_RANK"] == "3":
        threading.Thread(target=die_as_told, daemon=True).start()
    dist.init_process_group(timeout=timedelta(seconds=30))
    spare, mine = joining(), dist.get_rank()
    victims = next((VICTIMS[case] for case in CASES if case in VICTIMS), (1,))
    if "early" in CASES and dist.get_rank() == 1 and not spare:
        die()
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    if spare and "calls" in CASES:
        calls()
    if spare and "raises" in CASES:
        raise RuntimeError("of the program")
    if "holder" in CASES and dist.get_rank() == 2 and not spare:
        die_as_holder()
    if "early spare" in CASES and not spare:
        lose_a_spare()
    parallel = dist.DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    parts = {"model": parallel, "optimizer": optimizer}
    if spare and "uncovered" in CASES:
        dist.DistributedDataParallel(model)  # gone at once: it does not count
        other = dist.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert other.module is not None
    state = State(**parts)
    if "commit first" in CASES:
        state.commit()
    if "resume first" in CASES:
        state.resume()
        state.commit()

    def step(index: int) -> None:
        while "wait" in CASES and index == FATAL and sum(map(len, state.lost)) < 2:
            FATAL_BEGUN.touch()
            dist.barrier()
        if mine in victims and index == FATAL and not spare:
            die()
        optimizer.zero_grad()
        parallel(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()

    if "own" in CASES:
        own_loop(state, step)
    else:
        loops(state, step)
    total = float(model.weight.detach().double().sum())
    print(f"end {dist.get_rank()}/{dist.get_world_size()} {state.step} {total:.9f}", flush=True)
    print(f"recovered {read(_engine.recorder_path()).survival.took / 1e9:.3f}", flush=True)
    if "second" in CASES:
        State(**parts).commit()
    if not {"exit", "finally"} & set(CASES):
        dist.destroy_process_group()


def loops(state: State, step: Callable[[int], None]) -> None:
    """One loop, or two on one State, of which the second has the death."""
    for steps in (FATAL, STEPS) if "two loops" in CASES else (STEPS,):
        for each in elastic(state, steps, every=3 if "every" in CASES else 1):
            with each:
                step(each.index)


class Raised(Exception):
    """Of a signal handler."""


def interrupted(index: int) -> None:
    """Let a signal handler raise on rank 2 while it waits for rank 0, which comes afterwards."""

    def raises(*_: object) -> None:
        raise Raised

    if "handler" not in CASES or index != FATAL - 1 or INTERRUPTED.exists():
        return
    here = dist.get_rank()
    if here == 2:
        signal.signal(signal.SIGALRM, raises)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    elif here == 0:
        while not INTERRUPTED.exists():
            time.sleep(0.01)
    try:
        dist.barrier()
    except Raised:
        INTERRUPTED.touch()
        raise
    raise AssertionError("the barrier ended")


def own_loop(state: State, step: Callable[[int], None]) -> None:
    """A loop of the program's own, which counts its steps itself."""
    state.values.done = 0
    if "resumed" in CASES:
        state.resume()
    else:
        state.commit()
    while state.values.done < STEPS:
        well = True
        try:
            interrupted(state.values.done)
            step(state.values.done)
            state.values.done += 1
        except (dist.RankFailedError, Raised):
            well = False
        except dist.DistTimeoutError as error:
            assert "where a signal handler raised" in str(error), error
            well = False
        state.commit(yes=well)
    state.step = state.values.done


if __name__ == "__main__":
    try:
        main()
    finally:
        if "finally" in CASES:
            dist.destroy_process_group()
