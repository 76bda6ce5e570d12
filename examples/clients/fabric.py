"""Lightning's Fabric with DDP; torchrun runs it over gloo.

HPCDIST_TAKE_OVER=gloo,mpi mpirun -n 2 python fabric.py
"""

import os

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    seed_everything(3, verbose=False)
    x = torch.randn(256, 8)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1).sin()), 16))
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    for epoch in range(3):
        total = torch.zeros(())
        for number, (a, b) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = nn.functional.mse_loss(model(a).squeeze(1), b)
                fabric.backward(loss)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = fabric.all_reduce(total / len(loader), reduce_op="mean")
        fabric.print(f"number epoch{epoch} {mean.item():.8g}", flush=True)
    everyone = fabric.all_gather(torch.tensor([fabric.global_rank + 1.0]))
    fabric.print(f"number gathered {everyone.sum().item():.8g}", flush=True)
    note = fabric.broadcast({"from": 0} if fabric.global_rank == 0 else None)
    assert note == {"from": 0}


if __name__ == "__main__":
    main()
