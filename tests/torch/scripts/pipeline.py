"""In the pattern of torch's tutorial of pipeline parallelism: a stage per rank, and a schedule."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group()
    device = torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, device)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(16, 12), torch.randn(16, 12)
    losses = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    norm = sum(p.grad.square().sum() for p in layers[rank].parameters()).sqrt().item()
    print(f"number norm{rank} {norm:.8g}", flush=True)
    if rank == size - 1:
        print(f"number loss {torch.stack(losses).mean().item():.8g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
