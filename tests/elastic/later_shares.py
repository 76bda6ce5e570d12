"""The batch stays from a second loop on, and a rank has died since the commit of the first one."""

from __future__ import annotations

import faulthandler
import os
import signal
from datetime import timedelta

import torch

import hpcdist as dist
from hpcdist.elastic import State, elastic

faulthandler.dump_traceback_later(60, exit=True)
dist.init_process_group(timeout=timedelta(seconds=30))
torch.manual_seed(1)
model = dist.DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = State(model=model, optimizer=optimizer)


def train(steps: int, keep_batch: bool) -> None:
    for step in elastic(state, steps, keep_batch=keep_batch):
        with step:
            optimizer.zero_grad()
            for share in step.shares():
                model(torch.full((2, 6), float(share))).sum().backward()
            optimizer.step()
            assert step.share_count == dist.get_world_size()


train(2, keep_batch=False)
if dist.get_rank() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
train(4, keep_batch=True)
second = State(model=model)
try:
    second.begin()
except ValueError as error:
    print(f"refused: {error}", flush=True)
print(f"ended {state.step} {state.batch.count} {state.lost}", flush=True)
dist.destroy_process_group()
