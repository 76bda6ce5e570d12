"""In the pattern of torch's tutorial of communication hooks: gradients in half precision."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo", init_method="env://")
    assert dist.get_rank() == int(os.environ["RANK"])
    for name in ("fp16", "power"):
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3)))
        if name == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
        total = sum(p.double().sum() for p in model.parameters()).item()
        if dist.get_rank() == 0:
            print(f"number {name} {total:.6g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
