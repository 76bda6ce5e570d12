"""Ranks that die one after the other, each in another operation; the others go on.

survivors.py OPERATION...: the highest rank, then rank 0, then the highest kills itself at a random
moment while all call one operation over and over; the others reconfigure the world, check that it
works, and go on to the next operation.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import hpcdist as dist
from hpcdist.groups.reconfigure import agree

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from patience import at_most  # noqa: E402

SHORT, LONG = 16, 300_000
#: Seconds from the error to a group that works; other programs may use the cores.
AGAIN = 10.0


def operations() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()

    def asynchronous() -> None:
        for work in [dist.all_reduce(torch.ones(LONG), async_op=True) for _ in range(3)]:
            work.wait()

    def ring() -> None:
        handle = dist.irecv(torch.empty(LONG), (rank - 1) % size)
        dist.send(torch.ones(LONG), (rank + 1) % size)
        handle.wait()

    def from_any() -> None:
        if rank == 0:
            for _ in range(size - 1):
                dist.recv(torch.empty(SHORT))
        else:
            dist.send(torch.ones(SHORT), 0)

    def objects() -> None:
        dist.all_gather_object([None] * size, "x" * 5000)

    def levels() -> None:
        dist.all_reduce(torch.ones(4 * LONG))
        native = dist.group.WORLD.carrier.native
        check(native.checks_through == "shared memory and MPI" and native.node_memory > 0,
              f"{native.checks_through}, {native.node_memory} bytes")  # fmt: skip

    def groups() -> None:
        dist.destroy_process_group(dist.new_group())

    return {
        "carried": lambda: dist.all_reduce(torch.ones(2)),
        "node": lambda: dist.all_reduce(torch.ones(LONG)),
        "levels": levels,
        "library": lambda: dist.broadcast(torch.ones(LONG), size - 1),
        "pairs": lambda: dist.all_to_all_single(torch.empty(size * LONG), torch.ones(size * LONG)),
        "asynchronous": asynchronous,
        "barrier": dist.barrier,
        "ring": ring,
        "any": from_any,
        "objects": objects,
        "groups": groups,
    }


def die_soon(after: float) -> None:
    def die() -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def check(fine: bool, what: str) -> None:
    if not fine:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def until_lost(call: Any) -> dist.RankFailedError:
    while True:
        try:
            call()
        except dist.RankFailedError as error:
            return error


def works(size: int) -> None:
    """The new world, and groups of it, compute."""
    check(dist.get_world_size() == size, f"{dist.get_world_size()} ranks, not {size}")
    for length in (1, SHORT, LONG):
        tensor = torch.full((length,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        check(bool((tensor == size * (size + 1) / 2).all()), f"all_reduce of {length}: {tensor}")
    names: list[Any] = [None] * size
    dist.all_gather_object(names, dist.get_rank())
    check(names == list(range(size)), f"{names}")
    for ranks in (range(size), [0]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            tensor = torch.ones(LONG)
            dist.all_reduce(tensor, group=group)
            check(tensor[-1].item() == len(ranks), f"{tensor}")
            dist.destroy_process_group(group)
    dist.barrier()


def late(world: dist.ProcessGroup) -> None:
    """Rank 1 does not call reconfigure, until the others have given up and say so."""
    if dist.get_rank() != 1:
        try:
            world.reconfigure(timeout=timedelta(seconds=0.5))
        except dist.DistTimeoutError as error:
            check("not all ranks that are left" in str(error), f"{error}")
            check("rank 1 is " in str(error) or "HPCDIST_NODES" in os.environ, f"{error}")
            check("rank 2 is" not in str(error), f"{error}")
        else:
            check(False, "reconfigure did not wait for rank 1")
    check(agree(5 if dist.get_rank() else 12, timeout=timedelta(seconds=20)) == 4, "agree")


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    seed = int(os.environ.get("HPCDIST_TEST_SEED", "0"))
    dist.init_process_group(timeout=timedelta(seconds=30))
    world = dist.group.WORLD
    check(world.supports_reconfigure, "supports_reconfigure is False")
    for number, name in enumerate(sys.argv[1:]):
        rank, size = dist.get_rank(), dist.get_world_size()
        victim = 0 if number % 2 else size - 1
        left = tuple(r for r in range(size) if r != victim)
        sampler = dist.DistributedSampler(range(96), shuffle=False)
        pair, aborted = dist.new_group(range(size)), []
        world.register_abort_hook(number, lambda seen=aborted: seen.append(1))
        call = operations()[name]
        call()
        dist.barrier()
        if rank == victim:
            die_soon(random.Random(f"{seed} {name}").random() * 0.1)
        handle = world.get_reconfigure_handle()
        error = until_lost(call)
        check(error.ranks == (victim,), f"{error.ranks}")
        check(f"rank {victim} " in str(error), f"{error}")
        again = until_lost(lambda pair=pair: dist.all_reduce(torch.ones(1), group=pair))
        check(again.ranks == (victim,), f"{again.ranks}")
        if number == 0:
            late(world)
        began = time.monotonic()
        if number % 2:
            check(dist.shrink_group([victim]) is world, "shrink_group made another group")
        else:
            done = world.reconfigure(timeout=timedelta(seconds=20))
            check(done.wait() and done.lost == (victim,), f"{done}")
            check(done.ranks == left, f"{done}")
        works(size - 1)
        check(time.monotonic() - began < at_most(AGAIN), f"{time.monotonic() - began:.2f} s")
        check(world is dist.group.WORLD and world.size() == size - 1, "another world")
        check(world.get_reconfigure_handle() != handle, f"{handle}")
        check(rank == left[dist.get_rank()], f"now {dist.get_rank()}")
        check(list(sampler) == list(range(96))[dist.get_rank() :: size - 1], f"{list(sampler)}")
        check(aborted == [1], f"{aborted}")
        try:
            dist.all_reduce(torch.ones(1), group=pair)
        except ValueError as error:
            check("was lost when the default group was reconfigured" in str(error), f"{error}")
        else:
            check(False, "the old group works")
        if dist.get_rank() == 0:
            print(f"survived {name}: {size - 1} left", flush=True)
    dist.destroy_process_group()
    print("ended", flush=True)


main()
