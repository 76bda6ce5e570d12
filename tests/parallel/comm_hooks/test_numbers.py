"""Hooks on parameters of every dtype: complex ones keep their imaginary parts."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import DDP
from torch import nn

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import comm_hooks as hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

SHAPE = (6, 4)


class Net(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(SHAPE, dtype=dtype))
        self.row = nn.Parameter(torch.ones(SHAPE[1], dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        total = (self.matrix * gradient.conj()).sum() + (self.row * gradient[0].conj()).sum()
        return total.real if total.is_complex() else total


def gradient(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Two ranks of a matrix, so that PowerSGD of rank 4 is exact."""
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(4.0), indexing="ij")
    real = rows - 2 * columns + rank
    return (torch.complex(real, 3 + columns - rank) if dtype.is_complex else real).to(dtype)


def mean(dtype: torch.dtype) -> torch.Tensor:
    size = dist.get_world_size()
    return sum(gradient(dtype, rank) for rank in range(size)) / size  # type: ignore[return-value]


def after(model: DDP, steps: int = 4) -> list[torch.Tensor]:
    """The gradients of the last step."""
    dtype = model.module.matrix.dtype
    for _ in range(steps):
        model.zero_grad()
        model(gradient(dtype, dist.get_rank())).backward()
    return [p.grad for p in model.parameters()]


def check(found: list[torch.Tensor], tolerance: float, label: str) -> None:
    wanted = mean(found[0].dtype)
    for one, other in zip(found, (wanted, wanted[0]), strict=True):
        off = (one - other).abs().max().item()
        parallel_assert(off <= tolerance, lambda off=off: f"{label}: off by {off}")


def power(**options) -> hooks.PowerSGDState:
    return hooks.PowerSGDState(
        None, 4, start_powerSGD_iter=2, min_compression_rate=0.1, random_seed=1, **options
    )


# Name -> (state, hook, tolerance for numbers of up to 10)
CASES = {
    "allreduce": lambda: (None, hooks.allreduce_hook, 1e-6),
    "fp16": lambda: (None, hooks.fp16_compress_hook, 0.02),
    "bf16": lambda: (None, hooks.bf16_compress_hook, 0.1),
    "fp16 wrapper": lambda: (None, hooks.fp16_compress_wrapper(hooks.allreduce_hook), 0.02),
    "bf16 wrapper": lambda: (None, hooks.bf16_compress_wrapper(hooks.allreduce_hook), 0.1),
    "both": lambda: (
        None, hooks.bf16_compress_wrapper(hooks.quantization_pertensor_hook), 0.2),
    "per tensor": lambda: (None, hooks.quantization_pertensor_hook, 0.1),
    "per channel": lambda: (None, hooks.quantization_perchannel_hook, 0.1),
    "PowerSGD": lambda: (power(), hooks.powerSGD_hook, 1e-4),
    "batched PowerSGD": lambda: (
        hooks.PowerSGDState(None, 8, start_powerSGD_iter=2), hooks.batched_powerSGD_hook, 1e-4),
    "post-local": lambda: (
        hooks.PostLocalSGDState(None, dist.group.WORLD, 2), hooks.post_localSGD_hook, 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", list(CASES))
def test_every_hook_averages_every_dtype(name: str, as_view: bool) -> None:
    for dtype in (torch.complex64, torch.complex128, torch.float64):
        state, hook, tolerance = CASES[name]()
        model = DDP(Net(dtype), gradient_as_bucket_view=as_view)
        model.register_comm_hook(state, hook)
        check(after(model), tolerance, str(dtype))


@pytest.mark.parametrize(
    "hook",
    [
        hooks.powerSGD_hook,
        hooks.batched_powerSGD_hook,
        hooks.fp16_compress_wrapper(hooks.powerSGD_hook),
    ],
    ids=["by matrix", "batched", "in the wrapper"],
)
def test_powersgd_averages_what_float16_cannot_sum(hook) -> None:
    wrapped = hook not in (hooks.powerSGD_hook, hooks.batched_powerSGD_hook)
    model = DDP(Net(torch.float32 if wrapped else torch.float16))
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 0.1}
    model.register_comm_hook(hooks.PowerSGDState(None, 2, **options), hook)
    large = torch.zeros(SHAPE, dtype=model.module.matrix.dtype)
    large[0, 0] = 40_000.0
    for _ in range(4):
        model.zero_grad()
        model(large).backward()
    for p in model.parameters():
        off = (p.grad.float() - (large if p.dim() == 2 else large[0]).float()).abs().max().item()
        parallel_assert(off <= 100, lambda off=off: f"off by {off}")


def test_a_hook_sees_real_numbers_and_complex_gradients() -> None:
    """As torch's hooks do, so that one written for torch loses nothing here either."""
    seen = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append((bucket.buffer(), bucket.gradients()))
        return hooks.allreduce_hook(None, bucket)

    model = DDP(Net(torch.complex64))
    model.register_comm_hook(None, hook)
    check(after(model, 1), 1e-6, "a hook of the user's")
    buffer, gradients = seen[0]
    parallel_assert(buffer.dtype == torch.float32 and buffer.shape == (2 * 28,))
    parallel_assert(sorted(g.shape for g in gradients) == [(4,), SHAPE])
    parallel_assert(all(g.dtype == torch.complex64 for g in gradients))

    seen.clear()
    model = DDP(Net(torch.complex64))
    model.register_comm_hook(None, hooks.bf16_compress_wrapper(hook))
    check(after(model, 1), 0.1, "a wrapped one")
    buffer, gradients = seen[0]
    parallel_assert(buffer.dtype == torch.bfloat16 and buffer.shape == (2 * 28,))
    parallel_assert(sorted(g.shape for g in gradients) == [(4, 2), (*SHAPE, 2)])


def test_a_hook_may_return_either_form() -> None:
    def complex_result(state: None, bucket: dist.GradBucket):
        future = torch.futures.Future()
        flat = torch.cat([g.reshape(-1) for g in bucket.gradients()])
        dist.all_reduce(flat, dist.ReduceOp.AVG)
        # lazily conjugated twice over: the values are those of flat
        future.set_result(flat.conj().resolve_conj().conj())
        return future

    def too_short(state: None, bucket: dist.GradBucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer()[: bucket.buffer().numel() // 2])
        return future

    model = DDP(Net(torch.complex128))
    model.register_comm_hook(None, complex_result)
    check(after(model), 1e-12, "complex")
    model = DDP(Net(torch.complex128))
    model.register_comm_hook(None, too_short)
    with parallel_raises(TypeError, match="as many elements"):
        after(model, 1)


class Descend:
    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(gradient, alpha=0.5)


def stepping(kind: str, model: DDP, average: hooks.default.Hook):
    """Return the state and the hook of an optimizer that moves against gradients, by half."""
    if kind == "in backward":
        state = hooks.OptimizerInBackward(torch.optim.SGD, model.parameters(), lr=0.5)
        return state, hooks.optimizer_in_backward_hook
    if kind == "after a hook":
        return None, hooks.hook_then_optimizer(average, hooks.OptimizerHookState(Descend()))
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5
    )
    return None, hooks.hook_with_zero_step(average, model, zero)


@pytest.mark.parametrize("half", [None, "fp16", "bf16"])
@pytest.mark.parametrize("kind", ["in backward", "after a hook", "ZeRO"])
def test_optimizers_in_hooks_step_complex_parameters(kind: str, half: str | None) -> None:
    for dtype in (torch.complex64, torch.complex128, torch.float64):
        model = DDP(Net(dtype))
        state, hook = stepping(
            kind, model, hooks.allreduce_hook if half else hooks.fp16_compress_hook
        )
        if half:
            hook = getattr(hooks, f"{half}_compress_wrapper")(hook)
        model.register_comm_hook(state, hook)
        model(gradient(dtype, dist.get_rank())).backward()
        moved = [2 * (1 - p.detach()) for p in model.parameters()]
        check(moved, 0.1 if half == "bf16" else 0.02, f"{kind}, {half}, {dtype}")


def test_the_range_of_float16() -> None:
    model = DDP(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, hooks.fp16_compress_hook)
    for gradient, wanted in ((60000.0, 60000.0), (70000.0, float("inf")), (1e-8, 0.0)):
        model.zero_grad()
        (model(torch.ones(1, 1)) * gradient).sum().backward()
        found = model.module.weight.grad.item()
        parallel_assert(found == pytest.approx(wanted, rel=1e-3, abs=0), str(found))
