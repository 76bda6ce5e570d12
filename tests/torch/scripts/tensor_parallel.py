"""In the pattern of torch's example of tensor parallelism: a mesh, a plan, the model's own loop."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def main():
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(6):
        torch.manual_seed(step)  # the same input on all ranks of the mesh
        loss = model(torch.rand(20, 10)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"number loss{step} {loss.item():.7g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
