"""DistributedDataParallel of random modules, used at random: as one process and as torch's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ddp_cases import DDP, TorchDDP, distance, in_pieces
from gloo import gloo_world
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]

WIDTH = 6


class Random(nn.Module):
    """Blocks of random kinds; a path says which of them run, in which order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList()
        for _ in range(choose.randint(3, 8)):
            kind = choose.choice(
                ["linear", "linear", "double", "shared", "words", "tiny", "frozen"]
            )
            layer: nn.Module
            if kind == "words":
                layer = nn.Embedding(9, WIDTH, sparse=choose.random() < 0.6)
            elif kind == "tiny":
                layer = nn.ParameterList([torch.ones(WIDTH), torch.zeros(())])
            else:
                layer = nn.Linear(WIDTH, WIDTH, bias=choose.random() < 0.5)
                linears = [b for b in self.blocks if isinstance(b, nn.Linear)]
                if kind == "double":
                    layer.double()
                elif kind == "frozen":
                    layer.requires_grad_(False)
                elif kind == "shared" and linears:
                    layer.weight = choose.choice(linears).weight
            self.blocks.append(layer)
        self.end = nn.Linear(WIDTH, 2)

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        layer = self.blocks[index]
        if isinstance(layer, nn.Embedding):
            return x + layer(torch.arange(len(x)) % (index + 2))
        if isinstance(layer, nn.ParameterList):
            return x * layer[0] + layer[1]
        weight = layer.weight
        bias = None if layer.bias is None else layer.bias.to(weight.dtype)
        return torch.tanh(nn.functional.linear(x.to(weight.dtype), weight, bias)).float()

    def forward(self, x: torch.Tensor, path: list[int], again: bool) -> dict[str, Any]:
        for index in path:
            if again:
                x = checkpoint(self.block, index, x, use_reentrant=False)
            else:
                x = self.block(index, x)
        return {"nest": [self.end(x)]}


def path(choose: random.Random, blocks: int) -> list[int]:
    return [choose.randrange(blocks) for _ in range(choose.randint(0, blocks))]


@pytest.mark.parametrize("number", range(12))
def test_random_modules(number: int, rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(rng.integers(1 << 30))
    choose = random.Random(seed)
    size, rank = dist.get_world_size(), dist.get_rank()
    arguments: dict[str, Any] = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": choose.random() < 0.5,
        "bucket_cap_mb": choose.choice([None, 0, 1e-4, 3e-4, 1e-3]),
    }
    in_pieces(monkeypatch, choose.choice([1, 200, 1000]))
    alone, module = Random(seed), Random(seed)
    static = choose.random() < 0.3  # then every step takes the same paths
    if static:
        arguments |= {"find_unused_parameters": False, "static_graph": True}
    model = DDP(module, **arguments)
    described = f"seed {seed}, {arguments}"
    runs = [model, alone]
    # Torch waits for ever where a rank does not use a sparse parameter, and takes no other paths
    # on each rank for one static graph.
    if not static and not any(getattr(block, "sparse", False) for block in module.blocks):
        gloo_world()
        runs.append(TorchDDP(Random(seed), **arguments))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in runs]
    paths = [path(choose, len(module.blocks)) for _ in range(size)]
    again = choose.random() < 0.5
    for step in range(4):
        if not static:
            paths = [path(choose, len(module.blocks)) for _ in range(size)]
        to_none, micro = choose.random() < 0.7, choose.choice([1, 1, 2])
        for optimizer in optimizers:
            optimizer.zero_grad(to_none)
        inputs = torch.randn(micro, size, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        for part in range(micro):
            losses = []
            for wrapper in (model, *runs[2:]):
                wrapper.require_backward_grad_sync = part == micro - 1
                out = wrapper(inputs[part, rank], paths[rank], again)["nest"][0]
                losses.append(out.square().mean())
                losses[-1].backward()
            for r in range(size):
                out = alone(inputs[part, r], paths[r], again)["nest"][0]
                if r == rank:
                    losses.append(out.square().mean())
                (out.square().mean() / size).backward()
            off = max((loss - losses[0]).abs().item() for loss in losses)
            parallel_assert(off <= 1e-5, f"{described}: loss off by {off} in step {step}")
        for (name, a), b in zip(module.named_parameters(), alone.parameters(), strict=True):
            where = f"{described}: {name} in step {step}"
            parallel_assert((a.grad is None) == (b.grad is None), where)
            if a.grad is not None:
                left, right = (g.to_dense() if g.is_sparse else g for g in (a.grad, b.grad))
                parallel_assert(torch.allclose(left, right, atol=1e-5), where)
        for optimizer in optimizers:
            optimizer.step()
    for other in runs[1:]:
        parallel_assert(distance(model, other) <= 1e-5, f"{described}: {type(other).__name__}")
