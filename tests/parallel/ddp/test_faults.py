"""DistributedDataParallel when something is wrong: an error that names it, on every rank, soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from ddp_cases import Boom, explode, in_pieces
from patience import at_most, hasty_group
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

DDP = dist.DistributedDataParallel


def last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def layers(*sizes: int, **kwargs) -> nn.Module:
    pairs = zip(sizes, sizes[1:], strict=False)
    return nn.Sequential(*[nn.Linear(a, b, **kwargs) for a, b in pairs])


def odd_shape() -> nn.Module:
    return layers(4, 5, 6 if last() else 7)


def odd_dtype() -> nn.Module:
    module = layers(4, 5, 6)
    if last():
        module[1].double()
    return module


def odd_stride() -> nn.Module:
    module = layers(4, 5, 6)
    if last():
        module[1].weight = nn.Parameter(module[1].weight.detach().t().contiguous().t())
    return module


def odd_grad_dtype() -> nn.Module:
    module = layers(4, 5, 6)
    module[1].weight.grad_dtype = torch.float64 if last() else torch.float32
    return module


def odd_requires_grad() -> nn.Module:
    module = layers(4, 5, 6)
    module[1].weight.requires_grad_(not last())
    return module


def odd_count() -> nn.Module:
    module = layers(4, 5, 6)
    if last():
        module[1].extra = nn.Parameter(torch.ones(2))
    return module


def odd_name() -> nn.Module:
    module = layers(4, 5)
    module.register_parameter("spare" if last() else "extra", nn.Parameter(torch.ones(2)))
    return module


def odd_buffer() -> nn.Module:
    module = layers(4, 5)
    module.register_buffer("mean", torch.zeros(3 if last() else 2))
    return module


def odd_lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3) if last() else nn.Linear(2, 3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("build", "found"),
    [
        (odd_shape, r"parameter '1\.weight' with shape \((6|7), 5\).* shape \((6|7), 5\)"),
        (odd_dtype, r"parameter '1\.weight' with dtype float\d\d, rank \d with dtype float\d\d"),
        (odd_stride, r"parameter '1\.weight' with stride"),
        (odd_grad_dtype, r"parameter '1\.weight' with dtype float\d\d.*grad_dtype"),
        (odd_requires_grad, r"parameter '1\.weight' with requires_grad (True|False)"),
        (odd_count, r"has \d params, while rank \d has \d params.* parameter '1\.extra'"),
        (odd_name, r"parameter '(spare|extra)' where rank \d has parameter '(spare|extra)'"),
        (odd_buffer, r"buffer 'mean' with shape \(\d,\)"),
        (odd_lazy, r"parameter '0\.weight' with shape"),
    ],
)
def test_modules_that_differ(build: Callable[[], nn.Module], found: str) -> None:
    module = build()
    dist.barrier()
    began = time.monotonic()
    with parallel_raises(dist.DistMismatchError, match=found) as raised:
        DDP(module)
    parallel_assert(time.monotonic() - began < at_most(1.0))
    # With two ranks neither is the majority, and rank 0 counts as right.
    odd = dist.get_world_size() - 1
    text = str(raised.value)
    parallel_assert(f"rank {odd} has" in text and "DDP expects same model across all ranks" in text)
    texts: list = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    parallel_assert(len(set(texts)) == 1, "ranks raise different texts")
    DDP(layers(3, 3))  # the group is still usable


@pytest.mark.mpi(min_size=3)
def test_the_majority_is_right_even_against_rank_0() -> None:
    with parallel_raises(dist.DistMismatchError, match="rank 0 has parameter '0.weight' with sha"):
        DDP(layers(3, 4 if dist.get_rank() == 0 else 5))


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ() -> None:
    with parallel_raises(dist.DistMismatchError, match="argument 'bucket_cap_mb' with value"):
        DDP(layers(3, 3), bucket_cap_mb=1 if last() else 2)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_builds_no_wrapper() -> None:
    group = hasty_group(1)
    if last():
        time.sleep(2)
    else:
        with pytest.raises(dist.DistTimeoutError, match="DistributedDataParallel"):
            DDP(layers(3, 3), process_group=group)
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"device_ids": [0]}, ValueError, "device_ids and output_device only work"),
        ({"output_device": 0}, ValueError, "device_ids and output_device only work"),
        ({"dim": 1}, ValueError, "dim=1: it means something only with several devices"),
        (
            {"delay_all_reduce_named_params": []},
            ValueError,
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the",
        ),
        ({"param_to_hook_all_reduce": torch.zeros(1)}, ValueError, "need to be set at the same"),
        ({"bucket_cap_mb_list": [1, -2]}, ValueError, "0 or more MiB, not -2"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DDP(layers(3, 3), **arguments)


def test_a_group_and_a_mesh() -> None:
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    DDP(layers(3, 3), device_mesh=mesh)
    with parallel_raises(RuntimeError, match="both process_group and device_mesh"):
        DDP(layers(3, 3), device_mesh=mesh, process_group=dist.group.WORLD)
    with parallel_raises(RuntimeError, match="Only 1D device mesh"):
        DDP(layers(3, 3), device_mesh=dist.init_device_mesh("cpu", (1, size)))


def test_arguments_without_effect() -> None:
    with pytest.warns(FutureWarning, match="check_reduction has no effect"):
        DDP(layers(3, 3), check_reduction=True)
    with pytest.warns(FutureWarning, match="broadcast_buffers is ignored"):
        model = DDP(layers(3, 3), broadcast_buffers=True, forward_sync_buffers=False)
    parallel_assert(not model.broadcast_buffers)


def test_modules_that_cannot_be_trained() -> None:
    with parallel_raises(TypeError, match="must be a torch.nn.Module, not function"):
        DDP(lambda x: x)  # type: ignore[arg-type]
    with parallel_raises(ValueError, match="no parameter that requires a gradient"):
        DDP(layers(3, 3).requires_grad_(False))
    with parallel_raises(ValueError, match=r"0\.weight has no shape yet"):
        DDP(nn.Sequential(nn.LazyLinear(3)))
    with parallel_raises(ValueError, match="bucket_cap_mb must be 0 or more"):
        DDP(layers(3, 3), bucket_cap_mb=-1)
    module = layers(3, 3)
    module.register_buffer("ones", torch.ones(1).expand(5))
    with parallel_raises(ValueError, match="ones is expanded"):
        DDP(module)
    module = layers(3, 3)
    module[0].bias.grad_dtype = torch.float64
    with parallel_raises(ValueError, match=r"0\.bias is torch.float32.*torch.float64"):
        DDP(module)


class Optional(nn.Module):
    """Leaves out its middle layer when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.end = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.first(x)
        return self.end(x if skip else self.middle(x))


@pytest.mark.parametrize("cap", [0, None])
def test_unused_parameters_are_named_and_training_can_go_on(cap: float | None) -> None:
    model, x = DDP(Optional(), bucket_cap_mb=cap), torch.ones(2, 3)
    for _ in range(2):
        with parallel_raises(
            dist.DistError,
            match="finished reduction in the prior iteration.* 2 of 6 .*middle.weight, middle.bias",
        ):
            model(x, skip=True).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        parallel_assert(model.module.middle.weight.grad is not None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cap", [0, None])
def test_parameters_unused_on_one_rank_stop_all(cap: float | None) -> None:
    model, x = DDP(Optional(), bucket_cap_mb=cap), torch.ones(2, 3)
    loss = model(x, skip=last()).sum()
    began = time.monotonic()
    expected, text = dist.DistMismatchError, "backward ended without all gradients"
    if last():
        expected, text = dist.DistError, r"middle\.weight, middle\.bias"
    with parallel_raises(expected, match=text):
        loss.backward()
    parallel_assert(time.monotonic() - began < at_most(2.0))
    with parallel_raises(dist.DistError, match="an earlier backward pass failed"):
        model(x)
    again = DDP(model.module)  # the way to go on that the message names
    again(x).sum().backward()


@pytest.mark.mpi(min_size=2)
def test_with_the_entry_check_off_an_incomplete_backward_cannot_be_wound_up() -> None:
    group = dist.new_group(pg_options=dist.MPIOptions(check="off"))
    model, x = DDP(Optional(), process_group=group), torch.ones(2, 3)
    with parallel_raises(dist.DistError, match=r"middle\.weight, middle\.bias"):
        model(x, skip=True).sum().backward()
    with parallel_raises(dist.DistError, match="no safe way to tell the other ranks"):
        model(x)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("cap", [0, None])
@pytest.mark.parametrize("layer", ["first", "middle", "end"])
def test_an_exception_in_backward_on_all_ranks_leaves_things_clean(
    layer: str, cap: float | None
) -> None:
    torch.manual_seed(0)
    model, x = DDP(Optional(), bucket_cap_mb=cap), torch.full((2, 3), dist.get_rank() + 1.0)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    handle = getattr(model.module, layer).weight.register_post_accumulate_grad_hook(explode)
    with parallel_raises(Boom):
        model(x).sum().backward()
    handle.remove()
    model.zero_grad()
    model(x).sum().backward()
    parallel_assert(
        all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cap", [0, None], ids=["buckets", "pieces"])
def test_an_exception_in_backward_on_one_rank_is_an_error_on_all(
    cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch, 1)
    model, x = DDP(Optional(), bucket_cap_mb=cap), torch.ones(2, 3)
    parallel_assert(len(model.reducer.buckets) > 3)
    if last():
        model.module.middle.weight.register_post_accumulate_grad_hook(explode)
    loss = model(x).sum()
    if last():
        with pytest.raises(Boom):
            loss.backward()
        with pytest.raises(dist.DistError, match="an earlier backward pass failed"):
            model(x)
    else:
        with pytest.raises(dist.DistMismatchError):
            loss.backward()
        with pytest.raises(dist.DistError, match="an earlier backward pass failed"):
            model(x)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("find", [False, True], ids=["all", "find_unused"])
def test_an_exception_in_backward_is_heard_at_once_and_all_stay_in_step(find: bool) -> None:
    """Also where the rank that caught it goes on with something else than a forward."""
    model, x = DDP(Optional(), bucket_cap_mb=0, find_unused_parameters=find), torch.ones(2, 3)
    model.module.middle.weight.register_hook(explode if last() else lambda grad: grad)
    loss = model(x).sum()
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(Boom if last() else dist.DistMismatchError):
        loss.backward()
    took = time.monotonic() - began
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        parallel_assert(float(total) == dist.get_world_size(), f"{total}")
    parallel_assert(took < 5, f"{took:.1f} s")


@pytest.mark.mpi(min_size=2)
def test_what_a_backward_left_behind_does_not_fail_the_next_wrapper() -> None:
    """Its buckets time out after the exception, and nobody waits for them any more."""
    group = dist.new_group()
    model, x = DDP(layers(4, 5, 6), process_group=group, bucket_cap_mb=0), torch.ones(2, 4)
    dist.barrier()
    group.timeout = timedelta(seconds=0.3)
    model.module[0].weight.register_hook(explode if last() else lambda grad: grad)
    time.sleep(0 if last() else 0.5)
    with pytest.raises(Boom if last() else dist.DistError):
        model(x).sum().backward()
    group.timeout = timedelta(seconds=10)
    DDP(layers(4, 5, 6), process_group=group)(x).sum().backward()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_never_comes_to_backward() -> None:
    group = dist.new_group()
    model, x = DDP(layers(3, 3, 3), process_group=group), torch.ones(2, 3)
    loss = model(x).sum()
    group.timeout = timedelta(seconds=1)
    if not last():
        began = time.monotonic()
        with pytest.raises(dist.DistTimeoutError, match=str(dist.get_world_size() - 1)):
            loss.backward()
        assert time.monotonic() - began < at_most(3)
        with pytest.raises(dist.DistError, match=r"earlier backward pass failed \(DistTimeoutErr"):
            model(x)
    dist.barrier()
    dist.destroy_process_group(group)


def test_gradients_of_gradients_are_refused() -> None:
    model, x = DDP(layers(3, 3)), torch.ones(2, 3)
    with parallel_raises(dist.DistError, match="create_graph=True"):
        model(x).square().sum().backward(create_graph=True)
    model.zero_grad()
    with model.no_sync():
        model(x).square().sum().backward(create_graph=True)
    model.zero_grad()
    model(x).square().sum().backward()


def test_a_parameter_that_is_ready_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    model = DDP(Twice())
    x = torch.ones(2, 3, requires_grad=True)
    with parallel_raises(dist.DistError, match=r"ready only once: parameter layer\.(weight|bias)"):
        model(x).sum().backward()


def test_frozen_parameters_that_change() -> None:
    module = layers(3, 3, 3)
    module[0].weight.requires_grad_(False)
    model, x = DDP(module), torch.ones(2, 3)
    model(x).sum().backward()
    module[0].weight.requires_grad_(True)
    with parallel_raises(ValueError, match=r"parameter 0\.weight requires a gradient now"):
        model(x)
    module[0].weight.requires_grad_(False)
    module[1].bias.requires_grad_(False)
    with parallel_raises(dist.DistError, match=r"1\.bias \(its requires_grad is now False\)"):
        model(x).sum().backward()


@pytest.mark.parametrize("delayed", [False, True])
def test_parameters_that_are_replaced(delayed: bool) -> None:
    module = layers(3, 3, 3)
    arguments: dict[str, Any] = {}
    if delayed:
        arguments["delay_all_reduce_named_params"] = list(module.named_parameters())
        arguments["param_to_hook_all_reduce"] = module[0].weight
    model, x = DDP(module, **arguments), torch.full((2, 3), dist.get_rank() + 1.0)
    model.load_state_dict(model.state_dict())
    model(x).sum().backward()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with parallel_raises(ValueError, match=r"parameter 0\.weight was replaced.*wrap.*again"):
        model(x)
    with model.no_sync():
        model(x)
    model = DDP(module)
    model(x).sum().backward()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, module[1].weight.grad.tolist())
    parallel_assert(all(each == found[0] for each in found))


def test_other_tensors_in_the_parameters_places_are_left_alone() -> None:
    model, x = DDP(layers(3, 3)), torch.ones(2, 3)
    given = {f"module.{n}": 2 * p for n, p in model.module.named_parameters()}
    out = torch.func.functional_call(model, given, (x,))
    parallel_assert(torch.allclose(out, 2 * model.module(x)))


@pytest.mark.mpi(min_size=2)
def test_passes_that_do_not_match_are_told_apart() -> None:
    """As where a rank's backward reached none of the parameters, and its averages were left out."""
    model = DDP(layers(4, 5))
    model.reducer.transfer.passes = 3 if last() else 2
    loss = model(torch.ones(2, 4)).sum()
    with parallel_raises(dist.DistMismatchError, match=r"backward pass [23]"):
        loss.backward()
