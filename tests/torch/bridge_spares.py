"""A job of three ranks and spares with stock torch: test_survivors.py runs it.

bridge_spares.py CASE,START: START says how it begins: "mpi" by torch's function, "native" after
hpcdist's, "gloo" as a program that knows nothing of hpcdist. Rank 1 dies in step 2, and rank 0 in
step 4.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from patience import patience  # noqa: E402

CASE, _, START = sys.argv[1].partition(",")
STEPS, DEATHS = 6, {2: 1, 4: 0}


def start() -> None:
    limit = timedelta(seconds=30)
    if START == "gloo":
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        td.init_process_group("gloo", rank=rank, world_size=size, timeout=limit)
        return
    if START == "native":
        import hpcdist

        hpcdist.init_process_group(timeout=limit)
    td.init_process_group("hpcdist" if START else "gloo", "mpi://", timeout=limit)


def calls() -> None:
    """What a former spare cannot call: each says so at once."""
    one, size = torch.ones(2), td.get_world_size()
    for name, call in {
        "all_reduce": lambda: td.all_reduce(one),
        "asynchronous": lambda: td.all_reduce(one, async_op=True),
        "broadcast": lambda: td.broadcast(one, 0),
        "coalesced": lambda: td._broadcast_coalesced(td.group.WORLD, [one], 100, 0),
        "all_gather": lambda: td.all_gather([torch.ones(2)] * size, one),
        "send": lambda: td.send(one, 0),
        "objects": lambda: td.all_gather_object([None] * size, 3),
        "new_group": lambda: td.new_group([0, 1]),
        "reconfigure": lambda: td.group.WORLD.reconfigure(),
    }.items():
        began = time.monotonic()
        try:
            call()
        except RuntimeError as error:
            said = "elastic.joining()" in str(error) and time.monotonic() - began < patience()
            print(f"refused {name} {said}", flush=True)
    td.barrier()
    print(f"place {td.get_rank()} {size} {os.environ['RANK']}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(70, exit=True)
    start()
    if not START:
        print("started", flush=True)
        return
    from hpcdist.elastic import State, elastic, joining

    spare, mine = joining(), td.get_rank()
    if spare and CASE == "calls":
        calls()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    if CASE == "shards":
        parallel = fully_shard(model)
    else:
        parallel = DistributedDataParallel(model, find_unused_parameters=CASE == "uncovered")
    if spare and CASE == "uncovered":
        other = DistributedDataParallel(torch.nn.Linear(2, 2))
        assert other.module is not None
    state = State(model=model)
    for step in elastic(state, STEPS):
        with step:
            if DEATHS.get(step.index) == mine and not spare:
                os.kill(os.getpid(), signal.SIGKILL)
            parallel(torch.ones(3, 4)).sum().backward()
    pair = td.new_group([0, 1])
    td.barrier(pair)
    print(
        f"end {td.get_rank()}/{td.get_world_size()} {state.step} {os.environ['RANK']}", flush=True
    )
    td.destroy_process_group()


main()
