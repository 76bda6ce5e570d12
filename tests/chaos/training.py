"""DistributedDataParallel: forward and backward with faults, and gradients that are known.

The loss is the sum of every parameter times a constant that depends on rank, step and parameter.
So a gradient is that constant, and its average over the ranks is known without any communication.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

import hpcdist as dist
from chaos.board import VOTE
from chaos.cases import compare, values
from chaos.program import Step


class Boom(Exception):
    """What a rank's hook raises in the middle of backward."""


#: Elements of the parameters: several buckets of `CAP` MiB.
SIZES = [70_000, 3, 500, 20_000, 1, 90_000]
CAP = 0.2
#: Parts of a step's outcome.
BACKWARD, BUILD = 0, 1


class Known(nn.Module):
    """Parameters whose gradients are the constants that forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in SIZES])

    def forward(self, constants: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * c).sum() for p, c in zip(self.parts, constants, strict=True))


def constants(step: Step, rank: int) -> list[np.ndarray]:
    return [values(step, rank, size, part) for part, size in enumerate(SIZES)]


class Trainer:
    """One group's model on one rank."""

    def __init__(self, runner: Any, group: Any) -> None:
        self.runner, self.group = runner, group
        self.model: Any = None
        self.nap, self.raises = 0.0, False

    def build(self, step: Step) -> None:
        """Wrap a new model, with time enough: after an error the group must be good for that."""
        before, began = self.group.timeout, time.monotonic()
        self.group._comm.timeout = 10.0
        try:
            module = Known()
            module.parts[2].register_hook(self.hook)
            ddp = dist.DistributedDataParallel
            self.model = ddp(module, process_group=self.group, bucket_cap_mb=CAP)
            self.runner.write(step.number, BUILD, "ok", began)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.runner.write(step.number, BUILD, "error", began, text)
        finally:
            self.group.timeout = before

    def hook(self, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(self.nap)
        if self.raises:
            raise Boom
        return grad

    def step(self, step: Step) -> None:
        """Forward and backward; then all ranks agree, by the board, whether it was good."""
        runner, rank = self.runner, self.runner.rank
        if self.model is None:
            self.build(step)
        if self.model is None:
            return
        late = step.late.get(rank, 0.0)
        self.raises = step.odd is not None and step.odd[0] == rank
        in_backward = step.number % 2 == 1
        self.nap = late if in_backward else 0.0
        time.sleep(0.0 if in_backward else late)
        self.model.zero_grad(set_to_none=bool(step.number % 3))
        mine = [torch.from_numpy(each) for each in constants(step, rank)]

        def make() -> None:
            self.model(mine).backward()

        kind, began, text = runner.attempt(step, make, None, self.group)
        if text.startswith("Boom"):
            kind = "own"
        if kind == "ok":
            kind, text = runner.judge(lambda: self.check(step))
        runner.write(step.number, BACKWARD, kind, began, text)
        board, stream = runner.board, runner.stream
        board.set(rank, stream, VOTE, 0.0 if kind == "ok" else step.number + 1)
        board.meet(rank, stream)
        good = not any(board.cell(each, stream, VOTE) for each in range(runner.drawn.ranks))
        board.meet(rank, stream)
        if not good:
            self.model = None

    def check(self, step: Step) -> str:
        ranks = self.group.size()
        every = [constants(step, rank) for rank in range(ranks)]
        for part, parameter in enumerate(self.model.module.parts):
            want = np.mean([each[part] for each in every], axis=0).astype(np.float32)
            problem = compare(parameter.grad.numpy(), want, 1e-6)
            if problem:
                return f"gradient of parameter {part}: {problem}"
        return ""


def run(runner: Any, step: Step, group: Any) -> None:
    """One iteration of the model of a group."""
    trainers = runner.trainers
    if step.group not in trainers:
        trainers[step.group] = Trainer(runner, group)
    trainers[step.group].step(step)
