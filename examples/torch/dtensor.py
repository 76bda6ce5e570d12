"""Tensors that are spread over the ranks, and a layer computed by all of them: torch's DTensor.

    mpirun -n 4 python examples/torch/dtensor.py

A DTensor has the shape of the whole and holds a part of it; a device mesh says which ranks hold
which. Operations on it communicate where they have to. Tensor parallelism is that for layers: the
columns of the first matrix and the rows of the second lie on different ranks, so that the whole
block needs one all-reduce.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hpcdist.torch


def device_of(chosen: str) -> torch.device:
    """This rank's device; tensors that are made without one go there."""
    if chosen == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch cannot use a GPU here")
        index = hpcdist.get_node_local_rank(0) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        torch.set_default_device(f"cuda:{index}")
    return torch.get_default_device()


def say(text: str) -> None:
    if get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="DTensor over MPI")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("mpi",), help="mpi: also where ranks share a GPU")
    options = parser.parse_args()
    device = device_of(options.device)
    over_mpi = hpcdist.MPIOptions() if options.backend == "mpi" else None
    hpcdist.torch.init_process_group(pg_options=over_mpi)
    size = get_world_size()
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ranks",))

    torch.manual_seed(0)
    matrix, vector = torch.randn(4 * size, 6), torch.randn(6)
    rows = distribute_tensor(matrix, mesh, [Shard(0)])
    say(f"{tuple(rows.shape)} in rows: {tuple(rows.to_local().shape)} on each of {size} ranks")
    product = rows @ distribute_tensor(vector, mesh, [Replicate()])
    say(f"times a vector: {product.placements[0]}, nothing was sent")
    columns = rows.redistribute(mesh, [Shard(1)])
    say(f"in columns, by one all_to_all: {tuple(columns.to_local().shape)} on rank 0")
    error = (product.full_tensor() - matrix @ vector).abs().max().item()
    say(f"the whole product is off by {error:.0e}")

    block = nn.Sequential(nn.Linear(16, 8 * size), nn.GELU(), nn.Linear(8 * size, 16))
    x = torch.randn(5, 16)
    alone = block(x)
    alone.square().sum().backward()
    gradient = block[0].weight.grad.clone()
    block.zero_grad()
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    together = block(x)
    together.square().sum().backward()
    local = block[0].weight.to_local()
    say(f"tensor parallel: {tuple(local.shape)} of the first matrix on rank 0")
    off = max(
        (together - alone).abs().max().item(),
        (block[0].weight.grad.full_tensor() - gradient).abs().max().item() / gradient.abs().max(),
    )
    assert off < 1e-5, off
    say("output and gradients are those of one process")
    destroy_process_group()


if __name__ == "__main__":
    main()
