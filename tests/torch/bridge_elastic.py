"""A training that torchrun starts again after a worker has failed; test_bridge.py runs it.

    torchrun --nproc-per-node 2 --max-restarts 1 bridge_elastic.py FOLDER

The second worker fails in the third step of the first attempt. Each attempt goes on from the last
step that was saved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as td
from torch import nn

import hpcdist.torch

STEPS = 6


def main() -> None:
    saved = Path(sys.argv[1]) / "state.pt"
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    hpcdist.torch.init_process_group()
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    done = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        done = state["done"]
    print(f"attempt {attempt} rank {td.get_rank()} of {td.get_world_size()} from {done}")
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(done, STEPS):
        if attempt == 0 and step == 2 and td.get_rank() == 1:
            os._exit(7)
        optimizer.zero_grad()
        ddp(torch.full((3, 4), td.get_rank() + step + 1.0)).square().mean().backward()
        optimizer.step()
        if td.get_rank() == 0:
            part = saved.with_suffix(".part")
            torch.save({"model": model.state_dict(), "done": step + 1}, part)
            part.replace(saved)
        td.barrier()
    weight = model.weight.detach().clone()
    td.all_reduce(weight, td.ReduceOp.MAX)
    assert torch.equal(weight, model.weight)
    td.destroy_process_group()
    print(f"attempt {attempt} is done")


if __name__ == "__main__":
    main()
