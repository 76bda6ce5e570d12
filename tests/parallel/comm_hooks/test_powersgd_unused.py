"""PowerSGD's error feedback of a parameter that no rank uses in a step: DDP drops its average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hpcdist as dist
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

#: Of the steps after the start: whether some rank uses the first parameter, the second one.
USED = [(True, True), (False, True), (True, True), (True, False), (False, False), (True, True)]


class Net(nn.Module):
    """Its gradients are what its input says; None leaves a parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        # Registered so that the last bucket, which tells what is used, is neither of the matrices'.
        self.last = nn.Parameter(torch.zeros(3))
        self.one = nn.Parameter(torch.zeros(24, 20, dtype=torch.complex64))
        self.two = nn.Parameter(torch.zeros(16, 28, dtype=torch.complex64))

    def forward(self, one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor:
        loss = self.last.sum()
        for parameter, gradient in ((self.one, one), (self.two, two)):
            if gradient is not None:
                loss = loss + torch.view_as_real(parameter * gradient).sum()
        return loss


class Matrix(nn.Module):
    """Its gradient is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(16, 16, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.matrix * gradient).sum()


def waiting(hook: Any) -> Any:
    """A hook of a user's, which waits for each bucket before the next one."""

    def wait(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(hook(state, bucket).wait())
        return future

    return wait


WRAPPERS = {
    "alone": lambda hook: hook,
    "bf16": hooks.bf16_compress_wrapper,
    "waiting": waiting,
}


def errors(state: hooks.PowerSGDState) -> dict[int, torch.Tensor]:
    """What this rank has not sent, by the number of the parameter."""
    found = {}
    for bucket, layout in state.error_layout.items():
        if (error := state.error_dict.get(bucket)) is not None:
            counts = [count for _, count in layout]
            parts = error[: sum(counts)].split(counts)
            found.update({n: p.clone() for (n, _), p in zip(layout, parts, strict=True)})
    return found


def gradients(step: int) -> list[torch.Tensor]:
    """Those of this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    shapes = ((24, 20), (16, 28))
    return [torch.randn(s, generator=generator, dtype=torch.complex64) for s in shapes]


@pytest.mark.parametrize("zero", [True, False], ids=["zero_grad", "old gradients"])
@pytest.mark.parametrize("cap", [25, 0.0001], ids=["one bucket", "buckets"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.batched_powerSGD_hook])
def test_what_was_sent_in_vain_is_put_back(hook: Any, wrapper: str, cap: float, zero: bool) -> None:
    model = dist.DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=cap)
    state = hooks.PowerSGDState(None, 2, 2)
    model.register_comm_hook(state, WRAPPERS[wrapper](hook))
    for step, used in enumerate([(True, True)] * 3 + USED):
        before = errors(state)
        if zero:
            model.zero_grad()
        pairs = zip(gradients(step), used, strict=True)
        # The first rank alone may use one: it is in use then, and its error is sent.
        mine = [g if use and (step < 5 or dist.get_rank() == 0) else None for g, use in pairs]
        model(*mine).backward()
        after = errors(state)
        for number, use in ((1, used[0]), (2, used[1])):
            if step > 2:
                kept = torch.equal(before[number], after[number])
                at = f"step {step}, parameter {number}: kept {kept}, used {use}"
                parallel_assert(kept != use, at)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_that_is_done_keeps_its_error_too(wrapper: str) -> None:
    """It shadows the passes of the others, which do not use the first parameter."""
    model = dist.DistributedDataParallel(Net(), find_unused_parameters=True)
    state = hooks.PowerSGDState(None, 2, 2)
    model.register_comm_hook(state, WRAPPERS[wrapper](hooks.powerSGD_hook))
    last = dist.get_rank() == dist.get_world_size() - 1
    before: dict[int, torch.Tensor] = {}
    with model.join():
        for step in range(6 if last else 4):
            one, two = gradients(step)
            model(one if step < 4 else None, two).backward()
            if step == 3:
                before = errors(state)
    after = errors(state)
    parallel_assert(torch.equal(before[1], after[1]), "the error of the unused one has changed")
    if dist.get_world_size() > 1:
        parallel_assert(not torch.equal(before[2], after[2]), "the error of the used one was kept")


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["single", "half"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.batched_powerSGD_hook])
def test_a_matrix_of_zeros_is_sent_once_it_is_none(
    hook: Any, rank: int, dtype: torch.dtype, feedback: bool
) -> None:
    """In the first compressed step, or without error feedback in any."""
    model = dist.DistributedDataParallel(Matrix(dtype))
    state = hooks.PowerSGDState(None, rank, 2, use_error_feedback=feedback)
    model.register_comm_hook(state, hook)
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for step in range(6):
        model.zero_grad()
        zero = step == (2 if feedback else 4)
        model(gradient * (not zero)).backward()
        averages = model.module.matrix.grad
        parallel_assert(bool(averages.any()) != zero, f"step {step}")
        parallel_assert(gathered_equal(averages), f"step {step}: the ranks have different averages")


def gathered_equal(tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return all(torch.equal(part, tensor) for part in parts)
