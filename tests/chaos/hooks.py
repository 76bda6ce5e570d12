"""DDP with communication hooks, whose results NumPy knows: exactly, or as precisely as they are.

The matrices' gradients have rank 1 and one side in common, so that PowerSGD loses nothing; batched,
it has as many columns as the square. Parameters change only where a hook or an averager does it.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

import hpcdist as dist
from chaos.cases import values
from chaos.program import Step, hook_of
from chaos.training import Boom, Trainer
from hpcdist.parallel import averaging, comm_hooks

#: Matrices and vectors in several buckets of `CAP` MiB.
SHAPES: list[Any] = [(64, 48), 3, 500, (20, 30), 1, 9_000]
CAP = 0.02
#: What the optimizer and the averager's program multiply gradients by.
RATE = 1 / 64
#: Iterations without compression, or of global gradients.
FIRST = 2
#: How far results may be off: in proportion, and in all.
NEAR = {
    "fp16": (3e-3, 0.0), "fp16_wrapper": (3e-3, 0.0), "bf16": (2e-2, 0.0),
    "bf16_wrapper": (2e-2, 0.0), "per_tensor": (0.0, 0.22), "per_channel": (0.0, 0.22),
    "power": (1e-2, 0.0), "batched_power": (0.0, 0.05),
}  # fmt: skip


class Sgd:
    """The smallest optimizer that `hook_then_optimizer` takes."""

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        with torch.no_grad():
            parameter.sub_(gradient, alpha=RATE)


class Hooked(Trainer):
    """One group's model on one rank, with one hook after the other."""

    shapes = SHAPES
    cap = CAP
    name = ""
    iterations = 0
    new = True

    def step(self, step: Step) -> None:
        if hook_of(self.runner.drawn, step) != self.name:
            self.model = None
        self.new = self.model is None or self.iterations <= FIRST
        self.at = step
        super().step(step)

    def register(self, step: Step) -> None:
        self.name, self.iterations = hook_of(self.runner.drawn, step), 0
        ones = [np.ones(shape, np.float32) for shape in SHAPES]
        self.every = [[one.copy() for one in ones] for _ in range(self.group.size())]
        self.averager = averaging.PeriodicModelAverager(2, process_group=self.group)
        state, hook = self._hook()

        def with_faults(state: Any, bucket: Any) -> Any:
            if self.fault == "raises in the hook":
                raise Boom
            if self.fault == "returns nothing":
                return None
            future = hook(state, bucket)
            return future.then(_boom) if self.fault == "raises in a callback" else future

        self.model.register_comm_hook(state, with_faults)

    def _hook(self) -> tuple[Any, Any]:
        """The state and the hook of this name."""
        h, group = comm_hooks, self.group
        plain = h.allreduce_hook
        if self.name == "power":
            return h.PowerSGDState(group, start_powerSGD_iter=FIRST), h.powerSGD_hook
        if self.name == "batched_power":
            state = h.PowerSGDState(group, 10_000, start_powerSGD_iter=FIRST)
            return state, h.batched_powerSGD_hook
        if self.name == "post_local":
            state = h.PostLocalSGDState(group, None, FIRST, post_local_gradient_allreduce=False)
            return state, h.post_localSGD_hook
        return group, {
            "allreduce": plain,
            "fp16": h.fp16_compress_hook,
            "bf16": h.bf16_compress_hook,
            "fp16_wrapper": h.fp16_compress_wrapper(plain),
            "bf16_wrapper": h.bf16_compress_wrapper(plain),
            "per_tensor": h.quantization_pertensor_hook,
            "per_channel": h.quantization_perchannel_hook,
            "noop": h.noop_hook,
            "averager": h.noop_hook,
            "own": _own,
            "own_blocking": _own_blocking,
            "then_step": h.hook_then_optimizer(plain, h.OptimizerHookState(Sgd())),
        }[self.name]

    def constants(self, step: Step, rank: int) -> list[np.ndarray]:
        found = []
        for part, shape in enumerate(SHAPES):
            if isinstance(shape, int):
                found.append(values(step, rank, shape, part))
            else:
                side = 1 + values(step, 0, shape[0], part) % 2
                found.append(np.outer(side, values(step, rank, shape[1], part + 50)))
        return found

    def iteration(self, mine: list[torch.Tensor]) -> None:
        super().iteration(mine)
        if self.name == "averager":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(parameter.grad, alpha=RATE)
            self.averager.average_parameters(self.model.parameters())

    def recover(self) -> None:
        """Have ranks that are behind catch up, where hpcdist cannot: docs/hooks.md.

        As long as a hook is new, or changes what it does, nothing tells how many calls it makes.
        """
        # What the averager calls is the program's, which did not come to it on a failing rank.
        if self.runner.agree(self.at, not self.new and self.name != "averager"):
            return
        self.runner.catch_up(self.group)

    def check(self, step: Step) -> str:
        """Gradients and parameters; only in iterations that are good does `every` go on."""
        gradients = [self.constants(step, rank) for rank in range(self.group.size())]
        means = [np.mean(each, axis=0) for each in zip(*gradients, strict=True)]
        averages = [mean.astype(np.float32) for mean in means]
        alone = self.name in ("noop", "averager") or (
            self.name == "post_local" and self.iterations >= FIRST
        )
        wanted = gradients[self.group.rank()] if alone else averages
        relative, whole = NEAR.get(self.name, (1e-6, 0.0))
        problems = [
            _compare(f"gradient of parameter {part}", parameter.grad, want, relative, whole)
            for part, (parameter, want) in enumerate(
                zip(self.model.module.parts, wanted, strict=True)
            )
        ]
        self._advance(averages if self.name == "then_step" else None, gradients)
        problems += [
            _compare(f"parameter {part}", parameter, want, 1e-5, 1e-3)
            for part, (parameter, want) in enumerate(
                zip(self.model.module.parts, self.every[self.group.rank()], strict=True)
            )
        ]
        return next(filter(None, problems), "")

    def _advance(self, averages: Any, gradients: list[list[np.ndarray]]) -> None:
        """Do with the parameters of all ranks what this iteration does."""
        for mine, own in zip(self.every, gradients, strict=True):
            if self.name in ("then_step", "averager"):
                for one, gradient in zip(mine, averages or own, strict=True):
                    one -= RATE * gradient
        if self.name == "averager" and self.iterations % 2 == 0:
            for parts in zip(*self.every, strict=True):
                mean = np.mean(parts, axis=0)
                for part in parts:
                    part[...] = mean
        self.iterations += 1

    def digest(self) -> str:
        if self.name in ("noop", "averager", "post_local"):
            return ""
        bits = b"".join(parameter.grad.numpy().tobytes() for parameter in self.model.parameters())
        return f"{zlib.crc32(bits):08x}"


def _compare(name: str, got: torch.Tensor, want: np.ndarray, relative: float, whole: float) -> str:
    found = got.detach().numpy()
    wrong = ~np.isclose(found, want, rtol=relative, atol=whole)
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    where = f"element {first} is {found.flat[first]}, not {want.flat[first]}"
    return f"{name}: {where} ({int(wrong.sum())} of {wrong.size} differ)"


def _boom(future: Any) -> Any:
    raise Boom


def _own(group: Any, bucket: Any) -> Any:
    """A hook as a user writes it."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].div_(group.size()))


def _own_blocking(group: Any, bucket: Any) -> Any:
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer.div_(group.size()))
    return future
