"""Among views, a gradient that is a piece by itself is averaged where it lies, if it is alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import DDP, grads, in_pieces
from ddp_network import all_close, assert_equal_everywhere, averages
from long_gradients import Two, apart, backward, data, expected, on_one_node, one_memory, watched
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every gradient of 512 bytes be a piece."""
    in_pieces(monkeypatch, 1024)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
def test_long_gradients_are_averaged_where_they_lie(dtype: torch.dtype) -> None:
    model = DDP(Two(apart, dtype), gradient_as_bucket_view=True)
    seen = watched(model)
    for step in range(3):
        backward(model, data(dtype, step))
        wanted = expected(apart, data(dtype, step))
        pairs = zip(grads(model), wanted, strict=True)
        rough = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
        parallel_assert(all(torch.allclose(a, b, **rough) for a, b in pairs), f"step {step}")
        assert_equal_everywhere([each.clone() for each in grads(model)])  # NumPy asks for memory
        model.zero_grad(set_to_none=bool(step % 2))
    if on_one_node(model):
        parallel_assert(seen == [[True, True, False]] * 3, str(seen))


def test_gradients_that_share_their_memory_are_copied() -> None:
    model = DDP(Two(one_memory, torch.float64), gradient_as_bucket_view=True)
    seen = watched(model)
    for step in range(2):
        backward(model, data(torch.float64, step))
        parallel_assert(all_close(grads(model), expected(one_memory, data(torch.float64, step))))
        model.zero_grad()
    # once the first has moved to its bucket, the other one is alone
    parallel_assert([first for first, *_ in seen] == [False] * 2, str(seen))


def test_memory_that_other_processes_map_is_not_averaged_in_its_place() -> None:
    model = DDP(Two(apart, torch.float64), gradient_as_bucket_view=True)
    for parameter in model.module.parameters():
        parameter.grad = torch.zeros_like(parameter).share_memory_()
    seen = watched(model)
    backward(model, data(torch.float64))
    parallel_assert(all_close(grads(model), expected(apart, data(torch.float64))))
    parallel_assert(seen == [[False] * 3], str(seen))


def test_a_tensor_that_a_hook_keeps_stays_as_it_is() -> None:
    model = DDP(Two(apart, torch.float64), gradient_as_bucket_view=True)
    kept: list[torch.Tensor] = []
    views: list[torch.Tensor] = []
    model.module.one.register_hook(kept.append)
    model.module.other.register_hook(lambda gradient: views.append(gradient[:2]))
    backward(model, data(torch.float64))
    alone = Two(apart, torch.float64)
    backward(alone, data(torch.float64))
    parallel_assert(torch.equal(kept[0], alone.one.grad), "the kept gradient has changed")
    parallel_assert(torch.equal(views[0], alone.other.grad[:2]), "the kept view has changed")
    parallel_assert(all_close(grads(model), averages(grads(alone))))


class SameNumpy(torch.autograd.Function):
    """Adds; NumPy gives both gradients one memory, which torch has as two."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        array = gradient.numpy()
        return torch.from_numpy(array), torch.from_numpy(array)


def in_numpy(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    both: torch.Tensor = SameNumpy.apply(one, other)
    return both * 2


def test_gradients_that_share_the_memory_of_an_array_are_copied() -> None:
    model = DDP(Two(in_numpy, torch.float64), gradient_as_bucket_view=True)
    for step in range(3):
        x = data(torch.float64, step)
        backward(model, x)
        wanted = expected(lambda one, other: (one + other) * 2, x)
        parallel_assert(all_close(grads(model), wanted), f"step {step}")
        model.zero_grad()


def test_a_storage_that_a_hook_keeps_stays_as_it_is() -> None:
    model = DDP(Two(apart, torch.float64), gradient_as_bucket_view=True)
    kept: list[torch.UntypedStorage] = []
    model.module.one.register_hook(lambda gradient: kept.append(gradient.untyped_storage()))
    backward(model, data(torch.float64))
    alone = Two(apart, torch.float64)
    backward(alone, data(torch.float64))
    there = torch.empty(0, dtype=torch.float64).set_(kept[0]).view(16, 24)
    parallel_assert(torch.equal(there, alone.one.grad), "the kept memory has changed")
    parallel_assert(all_close(grads(model), averages(grads(alone))))


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_hooks_on_parameters_see_their_own_gradients(as_view: bool) -> None:
    """Without views all gradients stay as they are until the end of backward."""
    model = DDP(Two(apart, torch.float64), gradient_as_bucket_view=as_view)
    parameters = list(model.module.parameters())
    seen: dict[int, list[torch.Tensor]] = {}

    def look(parameter: torch.Tensor) -> None:
        there = parameters if not as_view else [parameter]
        seen[id(parameter)] = [p.grad.clone() for p in there if p.grad is not None]

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    used = watched(model)
    backward(model, data(torch.float64))
    alone = Two(apart, torch.float64)
    backward(alone, data(torch.float64))
    own = [each.numpy().tobytes() for each in grads(alone)]
    local = all(each.numpy().tobytes() in own for found in seen.values() for each in found)
    parallel_assert(len(seen) == 3 and local, "a hook has seen an average")
    parallel_assert(used == [[False] * 3], str(used))
    parallel_assert(all_close(grads(model), averages(grads(alone))))


def test_gradients_accumulate_under_no_sync() -> None:
    model = DDP(Two(apart, torch.float64), gradient_as_bucket_view=True)
    seen = watched(model)
    first, second = data(torch.float64, 1), data(torch.float64, 2)
    with model.no_sync():
        backward(model, first)
    backward(model, second)
    parallel_assert(all_close(grads(model), expected(apart, first, second)))
    parallel_assert(not on_one_node(model) or seen == [[True, True, False]], str(seen))


def test_strides_and_sizes_other_than_the_parameters() -> None:
    torch.manual_seed(1)
    build = lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)  # noqa: E731
    torch.manual_seed(1)
    model = DDP(build(), gradient_as_bucket_view=True)
    seen = watched(model)
    torch.manual_seed(1)
    alone = build()
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(dist.get_rank()))
    for module in (model, alone):
        module(x).square().sum().backward()
    parallel_assert(all_close(grads(model), averages(grads(alone))))
    parallel_assert(not on_one_node(model) or any(seen[0]), str(seen))


@pytest.mark.parametrize("to_none", [True, False])
def test_what_a_failed_pass_has_begun_is_not_in_the_next_one(to_none: bool) -> None:
    """An exception on all ranks ends a backward whose first averages are on their way."""
    model = DDP(Two(apart, torch.float64), gradient_as_bucket_view=True)
    backward(model, data(torch.float64))
    model.zero_grad()
    fails = [False, True]

    def fail(_gradient: torch.Tensor) -> None:
        if fails and fails.pop(0):
            raise ValueError("boom")

    model.module.one.register_hook(fail)
    model.module.other.register_hook(fail)
    try:
        backward(model, data(torch.float64, 7))
        raised = False
    except ValueError:
        raised = True
    parallel_assert(raised)
    buckets = model.reducer.buckets
    begun = [each.parameters[0].grad for each in buckets if each.single and each.in_place]
    parallel_assert(begun == [None] * len(begun), str(begun))
    parallel_assert(not on_one_node(model) or len(begun) > 0, "none was in place")
    model.zero_grad(set_to_none=to_none)
    for step in range(2):
        backward(model, data(torch.float64, step))
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, step))))
        model.zero_grad(set_to_none=to_none)


def test_a_hook_that_is_registered_sees_whole_buckets() -> None:
    model = DDP(Two(apart, torch.float64), gradient_as_bucket_view=True)
    backward(model, data(torch.float64))
    model.zero_grad()
    seen: list[int] = []

    def hook(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        seen.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future()

    model.register_comm_hook(None, hook)
    backward(model, data(torch.float64, 1))
    parallel_assert(seen == [16 * 24 * 2 + 3], str(seen))
    parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, 1))))


def test_a_gradient_of_megabytes() -> None:
    """Between nodes it is copied once, and then goes through their memory."""
    torch.manual_seed(5)
    model = DDP(nn.Linear(1024, 512, bias=False), gradient_as_bucket_view=True)
    seen = watched(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        x = torch.randn(3, 1024, generator=generator)
        model(x).square().sum().backward()
        alone = nn.Linear(1024, 512, bias=False)
        alone.load_state_dict(model.module.state_dict())
        alone(x).square().sum().backward()
        parallel_assert(all_close(grads(model), averages(grads(alone))), f"step {step}")
        model.zero_grad()
    native = model.process_group.carrier.native
    if native.node_memory > 0:
        parallel_assert(seen[1:] == [[True]] * 2, str(seen))
