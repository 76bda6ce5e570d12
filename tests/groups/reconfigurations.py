"""Reconfigures the world over and over, though no rank dies.

reconfigurations.py [ROUNDS]: each makes a group, and reconfigures with an operation in flight. Then
threads make groups meanwhile.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

import hpcdist as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from breaking import breaking, interrupting  # noqa: E402
from patience import at_most, patience  # noqa: E402

LENGTH = 100_000


def check(fine: bool, what: str) -> None:
    if not fine:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def one_round(world: dist.ProcessGroup) -> float:
    """Returns the seconds that reconfigure took."""
    size = dist.get_world_size()
    dist.new_group()
    tensor = np.ones(LENGTH, np.float32)
    handle = dist.all_reduce(tensor, async_op=True)
    done = world.reconfigure()
    check(done.lost == () and done.ranks == tuple(range(size)), f"{done}")
    small = np.ones(4)
    dist.all_reduce(small)
    check(small.tolist() == [size] * 4, f"{small}")
    try:
        handle.wait()
    except dist.RankFailedError as error:
        # Either text: what a busy machine had not ended by then says that it came too late.
        check(told_why(str(error)) and error.ranks == (), f"{error}, {error.ranks}")
    else:
        check(bool((tensor == size).all()), f"{tensor}")
    return done.seconds


def one_is_late(world: dist.ProcessGroup) -> None:
    """A rank waits for the others in an operation, and they reconfigure."""
    if dist.get_rank() == 1:
        began = time.monotonic()
        try:
            dist.barrier()
        except dist.RankFailedError as error:
            check("the default group is being reconfigured" in str(error), f"{error}")
        else:
            check(False, "the barrier ended")
        check(time.monotonic() - began < at_most(5), f"{time.monotonic() - began:.2f} s")
    world.reconfigure()
    dist.barrier()


def groups_are_made_meanwhile(world: dist.ProcessGroup, lists: list[list[int]]) -> None:
    """A thread for each list of ranks makes and destroys groups while this rank reconfigures.

    One that needs no other rank goes on: some of its groups begin in a world that goes just then.
    """
    over, errors = threading.Event(), []

    def make(ranks: list[int]) -> None:
        while not over.is_set():
            try:
                dist.destroy_process_group(dist.new_group(ranks, timeout=timedelta(seconds=1)))
            except dist.DistTimeoutError:  # in the new world, where another rank has stopped
                return
            except Exception as error:
                errors.append(error)
                if len(ranks) > 1:
                    return

    threads = [threading.Thread(target=make, args=(ranks,)) for ranks in lists]
    for thread in threads:
        thread.start()
    time.sleep(0.03)
    world.reconfigure()
    over.set()
    for thread in threads:
        thread.join(20)
    check(not any(thread.is_alive() for thread in threads), "a thread is still making a group")
    for error in errors:
        check(isinstance(error, dist.RankFailedError) and told_why(str(error)), repr(error))
    dist.barrier()


def told_why(text: str) -> bool:
    """Whether an error of new_group says what was done to the group that it needs."""
    return "is being reconfigured" in text or "was reconfigured" in text


def handlers_raise(world: dist.ProcessGroup, rounds: int, usual: float) -> None:
    """At any moment of it, which took `usual` seconds: it is to be called again, or it is done."""
    raised = 0
    with interrupting() as interrupted:
        for _ in range(rounds):
            handle = world.get_reconfigure_handle()
            dist.new_group()
            while world.get_reconfigure_handle() == handle:
                began = time.monotonic()
                stop = interrupted(world.reconfigure, random.uniform(0, 2 * usual))
                raised += bool(stop)
                # Cores may be less busy than they were, or more: some alarms are to come in time.
                usual = usual * 1.2 if stop else max(usual / 2, time.monotonic() - began)
            tensor = np.ones(3)
            dist.all_reduce(tensor)
            check(tensor.tolist() == [dist.get_world_size()] * 3, f"{tensor}")
    check(raised > 0, "no handler raised")


def each_line_raises(world: dist.ProcessGroup) -> None:
    """On one rank: it, too, is to call again, or it is done."""
    at, goes_on = 0, np.ones(1)
    while goes_on:
        handle, broke = world.get_reconfigure_handle(), False
        while world.get_reconfigure_handle() == handle:
            if broke or dist.get_rank():
                world.reconfigure()
            else:
                broke = breaking(world.reconfigure, at, "groups/reconfigure.py")
                goes_on.fill(broke)
        dist.broadcast(goes_on, 0)
        at += 1
    check(at > 20, f"{at} lines")


def main() -> None:
    faulthandler.dump_traceback_later(100 * patience(), exit=True)
    dist.init_process_group(timeout=timedelta(seconds=30))
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    pair = sorted({rank // 2 * 2, min(rank // 2 * 2 + 1, size - 1)})
    seconds = sorted(one_round(world) for _ in range(int(sys.argv[1]) if sys.argv[1:] else 20))
    allowed = 0.2 * patience()  # as busy as the cores are now
    one_is_late(world)
    for _ in range(5):
        groups_are_made_meanwhile(world, [list(range(size)), pair])
    usual = seconds[len(seconds) // 2]
    handlers_raise(world, 30, usual)
    each_line_raises(world)
    sys.setswitchinterval(1e-6)
    for _ in range(5):
        groups_are_made_meanwhile(world, [[rank]] * 3)
    if rank == 0:
        took = f"half of them took less than {usual:.3f} s, of {allowed:.3f} allowed"
        print(took, flush=True)
    dist.destroy_process_group()


main()
