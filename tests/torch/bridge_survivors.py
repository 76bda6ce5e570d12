"""A training with torch's DDP, or hpcdist's, of which ranks die; test_survivors.py runs it.

    mpirun --with-ft ulfm -n 4 python bridge_survivors.py bridge|native

In the third step rank 0 is killed, in the fifth the highest rank that is left. The others go on,
repeat the step, and end with the parameters of a training in one process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td
from torch import nn

import hpcdist
import hpcdist.torch

STEPS = 7
#: Step -> the rank that dies then, of those that are left.
DEATHS = {2: 0, 4: -1}
#: A group of all ranks, which a death ends.
GROUPS: list[Any] = []


def check(fine: bool, what: Any) -> None:
    if not fine:
        raise AssertionError(f"former rank {os.environ['OMPI_COMM_WORLD_RANK']}: {what}")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def data(step: int, who: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + who)
    return torch.randn(6, 8, generator=made, dtype=torch.double)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(living: list[list[int]]) -> torch.Tensor:
    """Train without communication: in each step on the data of the ranks that lived."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, ranks in enumerate(living):
        optimizer.zero_grad()
        sum(model(data(step, who)).square().mean() for who in ranks).div(len(ranks)).backward()
        optimizer.step()
    return flat(model)


def go_on_bridge(victim: int, size: int) -> None:
    world, (pair,) = td.group.WORLD, GROUPS
    handle = world.get_reconfigure_handle()
    if hasattr(td, "_reconfigure"):  # torch 2.14
        check(td._supports_reconfigure() and td._get_reconfigure_handle() == handle, handle)
        done = td._reconfigure(uuid=1, handles=set(), timeout=timedelta(seconds=20))
    else:
        done = world.reconfigure(timeout=timedelta(seconds=20))
    check(isinstance(done, td.Work) and done.wait() and done.is_success(), done)
    check(done.lost == (victim,) and len(done.ranks) == size - 1, (done.lost, done.ranks))
    check(world is td.group.WORLD and world.get_reconfigure_handle() != handle, handle)
    check(td.get_world_size() == hpcdist.get_world_size() == size - 1, td.get_world_size())
    check(td.get_rank() == hpcdist.get_rank() == int(os.environ["RANK"]), td.get_rank())
    try:
        td.all_reduce(torch.ones(1), group=pair)
    except ValueError as error:
        check("not initialized" in str(error) or "was lost" in str(error), error)
    else:
        check(td.get_rank(pair) == -1, "the old group works")
    try:
        pair.allreduce([torch.ones(1)]).wait()
    except ValueError as error:
        check("was lost when the default group was reconfigured" in str(error), error)
    else:
        check(False, "the old group's method works")


def go_on_native(victim: int, size: int) -> None:
    done = hpcdist.group.WORLD.reconfigure(timeout=timedelta(seconds=20))
    check(done.lost == (victim,), done)


def main() -> None:
    faulthandler.dump_traceback_later(80, exit=True)
    bridge = sys.argv[1] == "bridge"
    dist: Any = td if bridge else hpcdist
    start = hpcdist.torch if bridge else hpcdist
    start.init_process_group(timeout=timedelta(seconds=30))
    me, aborted = dist.get_rank(), []
    dist.group.WORLD.register_abort_hook(5, lambda: aborted.append(dist.get_world_size()))
    model = network()
    ddp = (nn.parallel if bridge else hpcdist).DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    deaths, living, step = dict(DEATHS), [], 0
    living_now = list(range(dist.get_world_size()))
    GROUPS[:] = [dist.new_group()]
    while step < STEPS:
        size = dist.get_world_size()
        try:
            if step in deaths:
                victim = range(size)[deaths[step]]
                if dist.get_rank() == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            ddp(data(step, me)).square().mean().backward()
        except RuntimeError as error:  # torch's C++ makes one of hpcdist.RankFailedError
            check(f"rank {victim} of the job died" in str(error), error)
            del deaths[step]
            (go_on_bridge if bridge else go_on_native)(victim, size)
            check(aborted[-1] == size, aborted)
            del living_now[victim]
            GROUPS[:] = [dist.new_group()]
            continue
        optimizer.step()
        living.append(list(living_now))
        step += 1
    check(not deaths and len(aborted) == len(DEATHS), (deaths, aborted))
    found, wanted = flat(model), alone(living)
    check(torch.allclose(found, wanted, rtol=0, atol=1e-14), (found - wanted).abs().max())
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, me, group=GROUPS[0])
    check(everybody == living_now, everybody)
    dist.destroy_process_group()
    print("ended", flush=True)


main()
