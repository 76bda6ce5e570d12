"""DistributedDataParallel: forward and backward with faults, and gradients that are known.

The loss is the sum of every parameter times a constant that depends on rank, step and parameter.
So a gradient is that constant, and its average over the ranks is known without any communication.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import hpcdist as dist
from chaos.cases import compare, values
from chaos.program import Step


class Boom(Exception):
    """What a rank's hook raises in the middle of backward."""


#: Elements of the parameters: several buckets of `CAP` MiB, and a gradient that is not copied.
SIZES = [70_000, 3, 500, 20_000, 300_000, 1, 90_000]
CAP = 0.2
#: Parts of a step's outcome.
BACKWARD, BUILD = 0, 1


class Known(nn.Module):
    """Parameters whose gradients are the constants that forward is given."""

    def __init__(self, shapes: Sequence[Any]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])

    def forward(self, constants: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * c).sum() for p, c in zip(self.parts, constants, strict=True))


class Trainer:
    """One group's model on one rank."""

    shapes: Sequence[Any] = SIZES
    cap = CAP

    def __init__(self, runner: Any, group: Any) -> None:
        self.runner, self.group = runner, group
        self.model: Any = None
        self.views = False
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients let go, and copies
        self.nap, self.fault = 0.0, ""

    def build(self, step: Step) -> None:
        """Wrap a new model, with time enough: after an error the group must be good for that."""
        before, began = self.group.timeout, time.monotonic()
        self.group.carrier.timeout = 10.0
        try:
            module = Known(self.shapes)
            module.parts[2].register_hook(self.hook)
            self.views = self.runner.drawn.rng("views", step.group, step.number).random() < 0.5
            self.model = dist.DistributedDataParallel(
                module,
                process_group=self.group,
                bucket_cap_mb=self.cap,
                gradient_as_bucket_view=self.views,
            )
            self.register(step)
            self.runner.write(step.number, BUILD, "ok", began)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.runner.write(step.number, BUILD, "error", began, text)
        finally:
            self.group.timeout = before

    def hook(self, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(self.nap)
        if self.fault == "raises in backward":
            raise Boom
        return grad

    def register(self, step: Step) -> None:
        """Give the new model what it needs beside its arguments."""

    def constants(self, step: Step, rank: int) -> list[np.ndarray]:
        """A rank's gradients."""
        return [values(step, rank, size, part) for part, size in enumerate(SIZES)]

    def recover(self) -> None:
        """All ranks have an error or hear of one: what they do before they build a new model."""

    def iteration(self, mine: list[torch.Tensor]) -> None:
        self.model(mine).backward()

    def step(self, step: Step) -> None:
        """Forward and backward; then all ranks agree, by the board, whether it was good."""
        runner, rank = self.runner, self.runner.rank
        if self.model is None:
            self.build(step)
            if not runner.agree(step, self.model is not None):
                self.model = None
                return
        late = step.late.get(rank, 0.0)
        self.fault = step.odd[1] if step.odd and step.odd[0] == rank else ""
        in_backward = step.number % 2 == 1
        self.nap = late if in_backward else 0.0
        time.sleep(0.0 if in_backward else late)
        self.zero_grad(set_to_none=bool(step.number % 3))
        mine = [torch.from_numpy(each) for each in self.constants(step, rank)]

        def make() -> None:
            self.iteration(mine)

        kind, began, text = runner.attempt(step, make, None, self.group)
        if "Boom" in text:
            kind = "own"
        if kind == "ok":
            kind, text = runner.judge(lambda: self.check(step))
        if kind == "ok":
            text = self.digest()
        runner.write(step.number, BACKWARD, kind, began, text)
        good = runner.agree(step, kind == "ok")
        if not good:
            self.model = None
            self.recover()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients, and keep them with copies: what comes later must not change them."""
        grads = [parameter.grad for parameter in self.model.module.parts]
        own = set_to_none and not self.views  # a view shows what comes to its bucket
        self.kept = [(grad, grad.clone()) for grad in grads if own and grad is not None]
        self.model.zero_grad(set_to_none)

    def check(self, step: Step) -> str:
        for place, (grad, copy) in enumerate(self.kept):
            if not torch.equal(grad, copy):
                return f"gradient {place} of an earlier iteration, which was kept, has changed"
        ranks = self.group.size()
        every = [self.constants(step, rank) for rank in range(ranks)]
        for part, parameter in enumerate(self.model.module.parts):
            want = np.mean([each[part] for each in every], axis=0).astype(np.float32)
            problem = compare(parameter.grad.numpy(), want, 1e-6)
            if problem:
                return f"gradient of parameter {part}: {problem}"
        return ""

    def digest(self) -> str:
        """What must be the same on all ranks that have a result."""
        return ""


def run(runner: Any, step: Step, group: Any) -> None:
    """One iteration of the model of a group."""
    trainers = runner.trainers
    if step.group not in trainers:
        kind = Trainer
        if runner.drawn.row.hooks:
            from chaos.hooks import Hooked as kind  # noqa: N813
        trainers[step.group] = kind(runner, group)
    trainers[step.group].step(step)
