"""Without views, a long gradient is read where it lies, and takes the memory of its average."""

from __future__ import annotations

import time
import weakref
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

READ = [True, True, False]
COPIED = [False] * 3


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every gradient of 512 bytes be a piece."""
    in_pieces(monkeypatch, 1024)


def two(dtype: torch.dtype = torch.float64, meet: Any = apart, **options: Any) -> DDP:
    return DDP(Two(meet, dtype), **options)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64],
    ids=str,
)
def test_gradients_are_the_averages(dtype: torch.dtype) -> None:
    model = two(dtype)
    seen = watched(model)
    rough = {"rtol": 0.02, "atol": 0.02} if dtype.itemsize == 2 else {}
    for step in range(4):
        backward(model, data(dtype, step))
        pairs = zip(grads(model), expected(apart, data(dtype, step)), strict=True)
        parallel_assert(all(torch.allclose(a, b, **rough) for a, b in pairs), f"step {step}")
        assert_equal_everywhere([each.clone() for each in grads(model)])
        for parameter in model.module.parameters():
            gradient = parameter.grad
            whole = gradient.untyped_storage().nbytes() == gradient.nbytes
            parallel_assert(whole and not gradient._is_view(), "not a tensor of its own")
        model.zero_grad()
    if on_one_node(model):
        parallel_assert(seen == [READ] * 4, str(seen))


def test_gradients_and_buckets_exchange_their_memory() -> None:
    model = two()
    for step in range(4):
        buckets = {id(b.parameters[0]): b.buffer.data_ptr() for b in model.reducer.buckets}
        backward(model, data(torch.float64, step))
        if on_one_node(model):
            long = (model.module.one, model.module.other)
            exchanged = [p.grad.data_ptr() == buckets[id(p)] for p in long]
            parallel_assert(all(exchanged), f"step {step}: {exchanged}")
        starts = [p.grad.data_ptr() for p in model.module.parameters()]
        starts += [bucket.buffer.data_ptr() for bucket in model.reducer.buckets]
        parallel_assert(len({*starts}) == len(starts), str(starts))
        before = [gradient.clone() for gradient in grads(model)]
        for bucket in model.reducer.buckets:
            bucket.buffer.fill_(float("nan"))
        parallel_assert(all_close(grads(model), before), "a bucket is a gradient")
        model.zero_grad()


@pytest.mark.parametrize("to_none", [False, True])
def test_a_gradient_that_is_added_to_keeps_its_memory(to_none: bool) -> None:
    model = two()
    seen = watched(model)
    backward(model, data(torch.float64))
    model.zero_grad(set_to_none=to_none)
    with model.no_sync():
        backward(model, data(torch.float64, 1))
    before = [(gradient, gradient.data_ptr()) for gradient in grads(model)]
    backward(model, data(torch.float64, 2))
    wanted = expected(apart, data(torch.float64, 1), data(torch.float64, 2))
    parallel_assert(all_close(grads(model), wanted))
    same = [a is b and a.data_ptr() == p for a, (b, p) in zip(grads(model), before, strict=True)]
    parallel_assert(all(same), str(same))
    parallel_assert(seen[-1] == COPIED, str(seen))


class Behind:
    """Calls a function with the other long parameter when that one's gradient is there."""

    def __init__(self, model: DDP, call: Any) -> None:
        self.other, self.call = model.module.other, call
        model.module.one.register_hook(self)
        self.called: list[bool] = []

    def __call__(self, _gradient: torch.Tensor) -> None:
        self.called.append(self.other.grad is not None)
        if self.other.grad is not None:
            self.call(self.other)


@pytest.mark.parametrize("kind", ["tensor", "view", "storage"])
def test_a_gradient_that_the_program_keeps_gets_the_average(kind: str) -> None:
    take = {
        "tensor": lambda gradient: gradient,
        "view": lambda gradient: gradient[2:],
        "storage": lambda gradient: gradient.untyped_storage(),
    }[kind]
    model = two()
    kept: list[Any] = []
    seen = watched(model)
    behind = Behind(model, lambda parameter: kept.append(take(parameter.grad)))
    backward(model, data(torch.float64))
    wanted = expected(apart, data(torch.float64))
    parallel_assert(all_close(grads(model), wanted))
    parallel_assert(behind.called == [True], str(behind.called))
    gradient = model.module.other.grad
    if kind == "storage":
        parallel_assert(gradient.untyped_storage().data_ptr() == kept[0].data_ptr())
    else:
        parallel_assert(torch.equal(kept[0], take(gradient)), "what was kept is no average")
        same = kept[0].untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()
        parallel_assert(same, "the gradient is another one")
    parallel_assert(not on_one_node(model) or seen == [READ], str(seen))


def test_the_gradient_stays_the_same_object() -> None:
    model = two()
    weak: list[weakref.ref[torch.Tensor]] = []

    def mark(parameter: torch.Tensor) -> None:
        weak.append(weakref.ref(parameter.grad))
        parameter.grad.mark = len(weak)

    Behind(model, mark)
    for step in range(3):
        backward(model, data(torch.float64, step))
        gradient = model.module.other.grad
        parallel_assert(weak[-1]() is gradient and gradient.mark == step + 1, f"step {step}")
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, step))))
        del gradient
        model.zero_grad()


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_gradient_that_moves_to_other_memory_while_it_is_read(as_view: bool) -> None:
    model = two(gradient_as_bucket_view=as_view)
    Behind(model, lambda parameter: parameter.grad.share_memory_())
    for step in range(3):
        if dist.get_rank():  # so that the other ranks still read
            time.sleep(0.05)
        backward(model, data(torch.float64, step))
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, step))))
        model.zero_grad()


def test_memory_that_is_being_read_cannot_be_freed() -> None:
    model = two()
    texts: list[str] = []

    def free(parameter: torch.Tensor) -> None:
        try:
            parameter.grad.untyped_storage().resize_(0)
        except RuntimeError as error:
            texts.append(str(error))

    Behind(model, free)
    backward(model, data(torch.float64))
    parallel_assert(not on_one_node(model) or "not resizable" in texts[0], str(texts))
    if on_one_node(model):
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64))))
        model.module.one.grad.untyped_storage().resize_(0)  # afterwards it can
        parallel_assert(model.module.one.grad.untyped_storage().nbytes() == 0)


def test_hooks_see_this_rank_s_gradient_until_the_end() -> None:
    model = two()
    looked: list[torch.Tensor] = []
    Behind(model, lambda parameter: looked.append(parameter.grad.clone()))
    alone = Two(apart, torch.float64)
    for step in range(3):
        looked.clear()
        alone.zero_grad()
        backward(model, data(torch.float64, step))
        backward(alone, data(torch.float64, step))
        parallel_assert(torch.equal(looked[0], alone.other.grad), "a hook has seen an average")
        model.zero_grad()


def test_a_gradient_that_is_taken_away_comes_back_and_what_is_kept_stays_this_rank_s() -> None:
    model = two()
    kept: list[torch.Tensor] = []

    def take(parameter: torch.Tensor) -> None:
        kept.append(parameter.grad)
        parameter.grad = None

    Behind(model, take)
    for step in range(3):
        backward(model, data(torch.float64, step))
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, step))))
        model.zero_grad()
    for step in range(3):
        alone = Two(apart, torch.float64)
        backward(alone, data(torch.float64, step))
        parallel_assert(torch.equal(kept[step], alone.other.grad), f"that of step {step} changed")


def test_a_gradient_that_is_replaced_gets_the_average() -> None:
    model = two()
    given: list[torch.Tensor] = []

    def replace(parameter: torch.Tensor) -> None:
        given.append(torch.full_like(parameter, 7))
        parameter.grad = given[-1]

    Behind(model, replace)
    for step in range(3):
        backward(model, data(torch.float64, step))
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, step))))
        parallel_assert(model.module.other.grad is given[-1], "it was replaced again")
        model.zero_grad()


def test_a_gradient_that_changes_while_it_is_read_is_an_error() -> None:
    model = two()
    Behind(model, lambda parameter: parameter.grad.mul_(2))
    text = ""
    try:
        backward(model, data(torch.float64))
    except dist.DistError as error:
        text = str(error)
    wanted = "shape (16, 24) was changed in place during backward" if on_one_node(model) else ""
    parallel_assert(wanted in text, text)


@pytest.mark.parametrize("where", ["parameter", "wrapper", "module", "all modules"])
def test_gradients_that_hooks_may_change_are_copied(where: str) -> None:
    """What a hook does to the gradient of another parameter is lost, as with torch."""
    model = two()
    seen = watched(model)
    changed: list[int] = []

    def change(*_: Any) -> None:
        gradient = model.module.other.grad
        if gradient is not None:
            gradient.data.mul_(2)
            changed.append(1)

    if where == "parameter":
        handle = model.module.one.register_post_accumulate_grad_hook(change)
    elif where == "wrapper":
        handle = model.register_full_backward_pre_hook(change)
    elif where == "module":
        handle = model.module.register_full_backward_pre_hook(change)
    else:
        handle = nn.modules.module.register_module_full_backward_pre_hook(change)
    try:
        for step in range(2):
            wanted = expected(apart, data(torch.float64, step))  # which calls hooks as well
            backward(model, data(torch.float64, step))
            parallel_assert(all_close(grads(model), wanted))
            model.zero_grad()
    finally:
        handle.remove()
    parallel_assert(seen == [COPIED] * 2, str(seen))
    parallel_assert(where != "parameter" or changed == [1] * 2, str(changed))


def test_a_program_that_ends_a_pass_by_hand_may_change_gradients_before() -> None:
    model = two()
    model.require_manual_backward_finalization = True
    seen = watched(model)
    for step in range(2):
        backward(model, data(torch.float64, step))
        model.module.other.grad.data.zero_()
        model.finalize_backward()
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, step))))
        model.zero_grad()
    parallel_assert(seen == [COPIED] * 2, str(seen))


def test_gradients_of_one_memory_are_copied() -> None:
    model = two(meet=one_memory)
    for step in range(3):
        backward(model, data(torch.float64, step))
        wanted = expected(one_memory, data(torch.float64, step))
        parallel_assert(all_close(grads(model), wanted), f"step {step}")
        model.zero_grad()


def test_two_wrappers_of_one_module() -> None:
    module = Two(apart, torch.float64)
    models = DDP(module), DDP(module)
    for step in range(4):
        backward(models[step % 2], data(torch.float64, step))
        parallel_assert(all_close(grads(module), expected(apart, data(torch.float64, step))))
        module.zero_grad()


def test_a_pass_that_fails_leaves_the_gradients_of_this_rank() -> None:
    model = two()
    fails = [True]

    def fail(_parameter: torch.Tensor) -> None:
        if fails.pop():
            raise ValueError("boom")

    Behind(model, fail)
    with pytest.raises(ValueError, match="boom"):
        backward(model, data(torch.float64, 7))
    alone = Two(apart, torch.float64)
    backward(alone, data(torch.float64, 7))
    parallel_assert(torch.equal(model.module.other.grad, alone.other.grad), "it has changed")
    model.zero_grad()
    fails.extend([False] * 4)
    for step in range(2):
        backward(model, data(torch.float64, step))
        parallel_assert(all_close(grads(model), expected(apart, data(torch.float64, step))))
        model.zero_grad()


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_a_rank_that_uses_one_of_them(options: dict[str, bool]) -> None:
    odd = dist.get_rank() % 2
    finds = "find_unused_parameters" in options

    def meet(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one * one if odd and finds else one * one + other

    model = two(meet=meet, **options)
    for step in range(4):
        backward(model, data(torch.float64, step))
        alone = Two(meet, torch.float64)
        backward(alone, data(torch.float64, step))
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
        parallel_assert(all_close(grads(model), averages(own)), f"step {step}")
        model.zero_grad()


def test_a_divisor_and_zeros_of_ranks_that_are_done() -> None:
    """Joined ranks reduce zeros in place, while the others read their gradients."""
    model = two()
    right = []
    steps = 2 + 2 * dist.get_rank()
    with model.join(divide_by_initial_world_size=False):
        for step in range(steps):
            backward(model, data(torch.float64, step))
            done = [r for r in range(dist.get_world_size()) if 2 + 2 * r <= step]
            alone = Two(apart, torch.float64)
            sums = [torch.zeros_like(p) for p in alone.parameters()]
            for rank in sorted({*range(dist.get_world_size())} - {*done}):
                alone.zero_grad()
                generator = torch.Generator().manual_seed(100 * step + rank)
                x = torch.randn(16, 24, generator=generator).to(torch.float64)
                backward(alone, x)
                sums = [a + b for a, b in zip(sums, grads(alone), strict=True)]
            left = dist.get_world_size() - len(done)
            right.append(all_close(grads(model), [each / left for each in sums]))
            model.zero_grad()
    parallel_assert(right == [True] * steps, str(right))
