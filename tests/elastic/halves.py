"""Two groups train a model each, with shards of its optimizer, while ranks die.

Of six ranks rank 1 dies in a step, then the last. The models end as those of one process would that
had the same inputs. Then a rank dies with the only copy of its shard.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from datetime import timedelta

import torch

import hpcdist as dist
from hpcdist.elastic import State, StateLostError, elastic
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import DistributedDataParallel

STEPS = 12
#: Step to the rank that dies in it, as numbered first.
DEATHS = {4: 1, 8: 5}


def model_of(half: int) -> torch.nn.Module:
    torch.manual_seed(half)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, 3, generator=generator)).square().mean()


def reference(half: int) -> torch.nn.Module:
    """Train as the half does, in one process."""
    model = model_of(half)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ranks = [rank for rank in range(6) if rank // 3 == half]
    for step in range(STEPS):
        if step in DEATHS and DEATHS[step] in ranks:
            ranks.remove(DEATHS[step])
        optimizer.zero_grad()
        sum(loss_of(model, step, rank) / len(ranks) for rank in ranks).backward()
        optimizer.step()
    return model


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    dist.init_process_group(timeout=timedelta(seconds=40))
    me = dist.get_rank()
    half = me // 3
    group, _ = dist.new_subgroups(3)
    line = dist.init_device_mesh("cpu", (6,))
    model = DistributedDataParallel(model_of(half), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, process_group=group, lr=0.1
    )
    try:
        State(model=model, optimizer=optimizer).commit()
        raise AssertionError("the group would be lost")
    except ValueError as error:
        assert "give State rebuild=True" in str(error), error
    state = State(model=model, optimizer=optimizer, rebuild=True)
    for step in elastic(state, STEPS):
        with step:
            if DEATHS.get(step.index) == me:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, step.index, me).backward()
            optimizer.step()
    torch.testing.assert_close(
        list(model.module.parameters()), list(reference(half).parameters()), rtol=1e-5, atol=1e-6
    )
    dist.barrier(group)
    assert line.mesh.tolist() == [0, 1, 2, 3] and line.get_coordinate() == (dist.get_rank(),), line
    print(f"trained in {group.size()}", flush=True)
    # From here on no rank has a copy of another one's shard.
    state.parts["optimizer"]._copies = 0  # type: ignore[union-attr]
    state.commit()
    try:
        for step in elastic(state, STEPS + 3):
            with step:
                if me == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(1))
        raise AssertionError("the shard of rank 4 is there")
    except StateLostError as error:
        assert "of the group" in str(error) and "[1]" in str(error), error
    print("lost", flush=True)
    dist.destroy_process_group()


main()
