"""The shortest script for torchrun: one model, one step after the other."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    assert rank % int(os.environ["LOCAL_WORLD_SIZE"]) == local_rank
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    for step in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"number loss{step} {loss.item():.8g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
