"""Train a small network with stock PyTorch on several processes: nothing here knows hpcdist.

    torchrun --nproc-per-node 4 examples/torch/ddp_tutorial.py

It is written as the tutorials of PyTorch are: a sampler, DistributedDataParallel, a loop over
epochs. The two lines of docs/torch.md make it run over MPI: ``mpirun -n 4 python ddp_tutorial.py``.
"""

import argparse

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spirals(points: int = 768) -> TensorDataset:
    """Two spirals of points in the plane; the label says on which one a point lies."""
    torch.manual_seed(0)
    label = torch.arange(points) % 2
    angle = torch.rand(points) * 3 * torch.pi
    place = torch.stack([angle.cos(), angle.sin()], 1) * (angle / 8)[:, None]
    place = place * (1 - 2 * label[:, None]) + torch.randn(points, 2) * 0.02
    return TensorDataset(place, label)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on two spirals with stock PyTorch.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch cannot use a GPU here")
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"

    data = spirals()
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=64 // size, sampler=sampler, drop_last=True)

    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)
    )
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()

    for epoch in range(40):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for place, label in loader:
            place, label = place.to(device), label.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(place), label)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0], device=device)
        torch.distributed.all_reduce(total)
        if rank == 0 and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}", flush=True)

    place, label = (each.to(device) for each in data.tensors)
    right = (model(place).argmax(1) == label).float().mean().item()
    if rank == 0:
        name = torch.distributed.get_backend()
        print(f"{right:.1%} right, {size} processes, backend {name}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
