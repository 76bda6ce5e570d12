"""A small Llama with tensor parallelism and FSDP2; torchrun runs it over gloo.

HPCDIST_TAKE_OVER=gloo,mpi mpirun -n 4 python llama.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

WIDTH, HEADS, WORDS, LENGTH, LAYERS = 32, 4, 64, 16, 2


class Block(nn.Module):
    """Attention and a gated network, with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        heads = (each(y).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in heads)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


PLAN = {
    **{name: tp.ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "gate", "up")},
    **{name: tp.RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")},
    "norm1": tp.SequenceParallel(),
    "norm2": tp.SequenceParallel(),
}


def main() -> None:
    shape = (dist.get_world_size() // 2, 2)
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(3)
    blocks = [Block() for _ in range(LAYERS)]
    last = nn.Linear(WIDTH, WORDS, bias=False)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.RMSNorm(WIDTH), last)
    ends = {
        "0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        str(LAYERS + 1): tp.SequenceParallel(),
        str(LAYERS + 2): tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    tp.parallelize_module(model, grid["tensor"], ends)
    for block in blocks:
        fully_shard(tp.parallelize_module(block, grid["tensor"], PLAN), mesh=grid["data"])
    fully_shard(model, mesh=grid["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    words = torch.randint(0, WORDS, (4, 8, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    mine = words[grid["data"].get_local_rank() :: grid["data"].size()]
    for step in range(6):
        batch = mine[step % len(mine)]
        found = model(batch[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(found, batch[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"number loss{step} {loss.item():.8g}", flush=True)
            print(f"number norm{step} {norm.item():.8g}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
