"""What DistributedDataParallel does beyond averaging gradients, on one small model.

    mpirun -n 2 python examples/07_ddp_features.py
    mpirun -n 2 python examples/07_ddp_features.py --save features.pt

Each part trains a fresh copy of the same network on random data and says what it came to. What
should come to the same parameters is compared.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from say import say, title
from torch import nn
from where import add_options, start

import hpcdist as dist
from hpcdist.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from hpcdist.parallel import Join, SyncBatchNorm, comm_hooks
from hpcdist.parallel.averaging import PeriodicModelAverager

STEPS = 8
Model = dist.DistributedDataParallel


def network() -> nn.Module:
    """The same on every rank and in every part."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))


def batches(steps: int = STEPS) -> list[torch.Tensor]:
    """This rank's inputs; other ranks have others."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    drawn = [torch.randn(8, 16, generator=generator, device="cpu") for _ in range(steps)]
    return [x.to(torch.get_default_device()) for x in drawn]


def train(model: nn.Module, optimizer: Any, inputs: list[torch.Tensor]) -> float:
    """Learn to add up neighbours; returns the last loss, averaged over the ranks."""
    loss = torch.zeros(())
    for x in inputs:
        optimizer.zero_grad()
        loss = (model(x) - x.view(8, 4, 4).sum(2)).square().mean()
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same_on_all_ranks(model: nn.Module) -> bool:
    low, high = flat(model), flat(model)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return torch.equal(low, high)


def report(name: str, loss: float, model: nn.Module) -> None:
    text = "equal" if same_on_all_ranks(model) else "DIFFERENT"
    if dist.get_rank() == 0:
        print(f"{name:<24} loss {loss:.4f}, parameters {text} on all ranks", flush=True)


def plain() -> torch.Tensor:
    """Average every gradient: what the other parts are compared with."""
    model = Model(network())
    report("plain", train(model, sgd(model), batches()), model)
    return flat(model)


def hooks() -> None:
    """Gradients on their way, compressed."""
    for name, state, hook in (
        ("bfloat16", None, comm_hooks.bf16_compress_hook),
        ("8 bits", None, comm_hooks.quantization_perchannel_hook),
        (
            "PowerSGD",
            comm_hooks.PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=1.5),
            comm_hooks.powerSGD_hook,
        ),
    ):
        model = Model(network())
        model.register_comm_hook(state, hook)
        report(name, train(model, sgd(model), batches()), model)


def accumulate() -> None:
    """Two backward passes, one exchange of gradients."""
    model = Model(network())
    optimizer = sgd(model)
    loss = 0.0
    for first, second in zip(*[iter(batches())] * 2, strict=True):
        with model.no_sync():
            model(first).square().mean().backward()
        loss = train(model, _KeepGradients(optimizer), [second])
    report("two passes per step", loss, model)


class _KeepGradients:
    """An optimizer whose zero_grad comes after the step, so that gradients add up before it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def divided_state(expected: torch.Tensor) -> None:
    """Each rank keeps the optimizer's state of its share of the parameters."""
    model = Model(network())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    report("ZeroRedundancyOptimizer", train(model, zero, batches()), model)
    assert torch.equal(flat(model), expected), "ZeRO must come to the same parameters"
    say(f"keeps the state of {len(zero.optim.state)} of {len(list(model.parameters()))} parameters")


def overlapped(expected: torch.Tensor) -> None:
    """The same, each step taken inside backward as soon as a bucket is averaged."""
    model = Model(network())
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
    )
    hook = comm_hooks.hook_with_zero_step(comm_hooks.allreduce_hook, model, zero)
    model.register_comm_hook(None, hook)
    report("ZeRO inside backward", train(model, zero, batches()), model)
    assert torch.allclose(flat(model), expected, atol=1e-6), "and so must it inside backward"


def post_local() -> None:
    """Average gradients for four steps, afterwards parameters at every second one."""
    model = Model(network())
    state = comm_hooks.PostLocalSGDState(None, None, 4, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=4)
    optimizer = PostLocalSGDOptimizer(sgd(model), averager)
    report("post-local SGD", train(model, optimizer, batches(STEPS + 1)), model)


def whole_batch() -> None:
    """Batch normalisation with the statistics of all ranks' batches."""
    model = Model(SyncBatchNorm.convert_sync_batchnorm(network()))
    report("SyncBatchNorm", train(model, sgd(model), batches()), model)


def uneven() -> None:
    """Each rank has one batch more than the one before."""
    model = Model(network())
    mine = batches(STEPS + dist.get_rank())
    optimizer, steps = sgd(model), 0
    with Join([model]):
        for x in mine:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps += 1
    say(f"took {steps} steps")


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint on rank 0 so that `path` always holds a whole one, the old or the new."""
    if dist.get_rank() == 0:
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    dist.barrier()  # nobody reads it before it is there


def checkpoint(path: Path) -> None:
    """Stop in the middle, and go on from a file."""
    ends = []
    for stop in (False, True):
        model = Model(network())
        optimizer = sgd(model)
        train(model, optimizer, batches()[:4])
        if stop:
            save(path, {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})
            state = torch.load(path, weights_only=True)
            model = Model(network())
            model.module.load_state_dict(state["model"])
            optimizer = sgd(model)
            optimizer.load_state_dict(state["optimizer"])
        report("stopped" if stop else "not stopped", train(model, optimizer, batches()[4:]), model)
        ends.append(flat(model))
    assert torch.allclose(*ends, atol=1e-6), "a run from a checkpoint must not differ"


def main() -> None:
    parser = argparse.ArgumentParser(description="Features of DistributedDataParallel.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also stop and go on from FILE")
    arguments = add_options(parser).parse_args()
    torch.set_num_threads(1)
    start(arguments)  # init_process_group, and where new tensors go
    title("gradients")
    expected = plain()
    parts: list[Callable[[], None]] = [hooks, accumulate]
    for part in parts:
        part()
    title("optimizers")
    divided_state(expected)
    overlapped(expected)
    post_local()
    title("batches")
    whole_batch()
    uneven()
    if arguments.save:
        title("checkpoints")
        checkpoint(arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
