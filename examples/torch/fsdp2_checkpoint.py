"""Shard a network with torch's FSDP2 over MPI, save it with torch's DCP, and go on with it later.

    mpirun -n 4 python examples/torch/fsdp2_checkpoint.py --steps 20 --folder saved
    mpirun -n 2 python examples/torch/fsdp2_checkpoint.py --steps 40 --folder saved

``fully_shard`` leaves each rank a part of every parameter, its gradient and its optimizer's state.
A checkpoint of torch.distributed.checkpoint (DCP) is a folder to which every rank writes its parts;
it can be read by another number of ranks. The second command does: it finds the folder, loads what
four ranks wrote into two, and trains on as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hpcdist.torch

BATCH = 48


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((8, 64), (64, 64), (64, 1)):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the step's data; all parts together are the same for any ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.rand(BATCH, 8, generator=generator) * 2 - 1
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:3] ** 2).sin()
    return x.chunk(get_world_size())[get_rank()], y.chunk(get_world_size())[get_rank()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with FSDP2 over MPI, save with DCP")
    parser.add_argument("--steps", type=int, default=40, help="in all, those before included (40)")
    parser.add_argument("--folder", help="where to save, and to go on from if it is there")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("mpi",), help="mpi: also where ranks share a GPU")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch cannot use a GPU here")
        device = torch.device("cuda", hpcdist.get_node_local_rank(0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    over_mpi = hpcdist.MPIOptions() if options.backend == "mpi" else None
    hpcdist.torch.init_process_group(pg_options=over_mpi)

    model = network().to(device)
    mesh = init_device_mesh(device.type, (get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    done = 0
    if options.folder and os.path.exists(os.path.join(options.folder, ".metadata")):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "done": 0}
        dcp.load(state, checkpoint_id=options.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        done = state["done"]
        if get_rank() == 0:
            print(f"goes on from step {done}, ranks: {get_world_size()}", flush=True)

    for step in range(done, options.steps):
        x, y = (each.to(device) for each in batch(step))
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        if get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {total / get_world_size():.5f}", flush=True)

    parts = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    print(f"rank {get_rank()} held {parts} of {whole} numbers", flush=True)
    if options.folder:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "done": options.steps}
        dcp.save(state, checkpoint_id=options.folder)
    destroy_process_group()


if __name__ == "__main__":
    main()
