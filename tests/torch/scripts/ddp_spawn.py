"""The tutorial of DDP: the program spawns its processes, each sets itself up by rank and size."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ.get("TEST_PORT", "12355")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def demo(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.ones(20, 10) * (rank + 1)), torch.ones(20, 5))
        loss.backward()
        optimizer.step()
        print(f"number rank{rank}.{step} {loss.item():.8g}", flush=True)
    dist.destroy_process_group()


def main():
    world_size = 2
    mp.spawn(demo, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
