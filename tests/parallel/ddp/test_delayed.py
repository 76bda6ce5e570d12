"""Delayed parameters in several backward passes, and after exceptions."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from ddp_cases import DDP, Boom, SpareNet, explode, grads
from torch import nn

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def delayed(everything: bool = False) -> DDP:
    """A module whose last layer's gradients wait for the first layer's; or all that DDP trains."""
    net = SpareNet()
    names = ("last.", "spare.") if everything else ("last.",)
    if everything:
        DDP._set_params_and_buffers_to_ignore_for_model(net, ["first.weight", "first.bias"])
    named = [(n, p) for n, p in net.named_parameters() if n.startswith(names)]
    return DDP(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.first.weight)


def input_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(3, 2, generator=generator)


def own(number: int) -> torch.Tensor:
    return input_of(dist.get_rank(), number)


def two_forwards_then_two_backwards(model: DDP) -> list[int]:
    one, two = model(own(0)), model(own(1))
    one.sum().backward()
    two.sum().backward()
    return [0, 1]


def two_backwards_through_one_forward(model: DDP) -> list[int]:
    loss = model(own(0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [0, 0]


def a_forward_under_no_sync_between(model: DDP) -> list[int]:
    one = model(own(0))
    with model.no_sync():
        model(own(1))
    one.sum().backward()
    return [0]


def a_gradient_by_itself_between(model: DDP) -> list[int]:
    one = model(own(0))
    torch.autograd.grad(one.sum(), model.module.spare.weight, retain_graph=True)
    one.sum().backward()
    return [0]


@pytest.mark.parametrize("everything", [False, True], ids=["some", "all"])
@pytest.mark.parametrize(
    "use",
    [
        two_forwards_then_two_backwards,
        two_backwards_through_one_forward,
        a_forward_under_no_sync_between,
        a_gradient_by_itself_between,
    ],
)
def test_each_backward_averages(use: Callable[[DDP], list[int]], everything: bool) -> None:
    model, alone = delayed(everything), SpareNet()
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        for number in use(model):
            for rank in range(dist.get_world_size()):
                (alone(input_of(rank, number)).sum() / dist.get_world_size()).backward()
        pairs = [
            (getattr(model.module, layer), getattr(alone, layer))
            for layer in (("last", "spare") if everything else ("first", "last", "spare"))
        ]
        for ours, expected in pairs:
            for a, b in zip(grads(ours), grads(expected), strict=True):
                parallel_assert(torch.allclose(a, b, atol=1e-6), f"{a}, not {b}")


@pytest.mark.parametrize("where", ["an unused parameter", "after the trigger", "before it"])
def test_an_exception_on_all_ranks_leaves_things_clean(where: str) -> None:
    model = delayed()
    for _ in range(2):
        if where == "an unused parameter":
            with parallel_raises(dist.DistError, match="spare"):
                model(own(0), False).sum().backward()
        else:
            layer = model.module.first if where == "after the trigger" else model.module.last
            edge = torch.autograd.graph.get_gradient_edge(layer.weight)
            # hooks of its node run behind those of the tensor, so DDP has seen the gradient
            hooked = edge.node.register_hook(explode)
            with parallel_raises(Boom):
                model(own(0)).sum().backward()
            hooked.remove()
        model.zero_grad()
        expected = delayed()
        for each in (model, expected):
            each(own(1)).sum().backward()
        for a, b in zip(grads(model), grads(expected), strict=True):
            parallel_assert(torch.equal(a, b), f"{a}, not {b}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layer", ["spare", "last", "first"])
def test_an_exception_on_one_rank_is_an_error_on_all_who_stay_in_step(layer: str) -> None:
    group = dist.new_group()
    net = SpareNet()
    named = [(n, p) for n, p in net.named_parameters() if n.startswith(("last.", "spare.w"))]
    model = DDP(
        net,
        process_group=group,
        delay_all_reduce_named_params=named,
        param_to_hook_all_reduce=net.first.weight,
    )
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        getattr(net, layer).bias.register_hook(explode)
    with pytest.raises(Boom if last else dist.DistMismatchError):
        model(own(0)).sum().backward()
    with pytest.raises(dist.DistError, match="an earlier backward pass failed"):
        model(own(0))
    parallel_assert(True)  # all are here, so the next call is the same on all
    dist.barrier(group)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_handlers_exception_in_the_forward_after() -> None:
    """The reduction that backward left behind is waited for by the next forward."""

    def handler(number: int, frame: object) -> None:
        raise Boom

    model, expected = delayed(everything=True), delayed(everything=True)
    dist.barrier()
    edge = torch.autograd.graph.get_gradient_edge(model.module.first.weight)
    hooked = edge.node.register_hook(explode)  # behind those of the tensor, which start it
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.9)  # the others' reductions are in flight until then
    before = signal.signal(signal.SIGALRM, handler)
    heard = False
    with suppress(Boom):
        model(own(0)).sum().backward()
    hooked.remove()
    signal.setitimer(signal.ITIMER_REAL, 0.0 if dist.get_rank() else 0.3)
    try:
        model(own(0))
    except Boom:
        heard = True
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    model.zero_grad()
    model(own(1)).sum().backward()
    parallel_assert(heard == (dist.get_rank() == 0), f"{heard}")
    expected(own(1)).sum().backward()
    for a, b in zip(grads(model), grads(expected), strict=True):
        parallel_assert(torch.allclose(a, b, atol=1e-6), f"{a}, not {b}")


@pytest.mark.parametrize("everything", [False, True], ids=["some", "all"])
def test_the_trigger_may_be_among_them(everything: bool) -> None:
    """Its own gradient is there when the reduction begins; also on top of an earlier one."""
    net, alone = SpareNet(), SpareNet()
    trigger = net.first.weight
    named = [(n, p) for n, p in net.named_parameters() if everything or p is trigger]
    if everything:  # those whose gradients come later than the trigger's cannot wait for it
        named = [(n, p) for n, p in named if p is not net.first.bias]
    model = DDP(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=trigger)
    for number in range(3):
        model.zero_grad(set_to_none=number == 2)
        alone.zero_grad()
        with model.no_sync():
            model(own(number)).sum().backward()
        model(own(number + 1)).sum().backward()
        for rank in range(dist.get_world_size()):
            for each in (number, number + 1):
                (alone(input_of(rank, each)).sum() / dist.get_world_size()).backward()
        for a, b in zip(grads(model), grads(alone), strict=True):
            parallel_assert(torch.allclose(a, b, atol=1e-6), lambda a=a, b=b: f"{a}, not {b}")


class Detour(nn.Module):
    """Four parameters of one size; the gradient of `side`, if it is used, is the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.waits, self.middle, self.side = (
            nn.Linear(2, 2, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        aside = self.side(x) if use else 0.0
        return self.middle(torch.tanh(self.waits(torch.tanh(self.first(x))))) + aside


@pytest.mark.parametrize("order", ["unused", "hook", "big"])
def test_they_begin_after_the_buckets_on_every_rank(order: str) -> None:
    """Whichever comes first on a rank: the trigger's gradient, or that of the last bucket."""
    net, alone = Detour(), Detour()
    if order == "big":  # the last bucket is reduced at the end of backward, or is not
        for each in (net, alone):
            torch.manual_seed(3)
            each.side = nn.Linear(2, 2)
    model = DDP(
        net,
        find_unused_parameters=True,
        bucket_cap_mb=25 if order == "big" else 0,
        delay_all_reduce_named_params=[("waits.weight", net.waits.weight)],
        param_to_hook_all_reduce=net.first.weight,
    )
    if order == "hook":
        model.register_comm_hook(
            None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        )
    size = dist.get_world_size()
    for number in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(own(number), dist.get_rank() == number % size).square().sum().backward()
        for rank in range(size):
            (alone(input_of(rank, number), rank == number % size).square().sum() / size).backward()
        for (name, a), b in zip(net.named_parameters(), grads(alone), strict=True):
            average = a.grad / (size if order == "hook" and name != "waits.weight" else 1)
            parallel_assert(torch.allclose(average, b, atol=1e-5), f"{name}: {average}, not {b}")


@pytest.mark.mpi(min_size=2)
def test_the_triggers_gradient_alone_on_one_rank() -> None:
    """A gradient by itself, for a log for example, begins nothing."""
    model, alone = delayed(everything=True), SpareNet()
    loss = model(own(0)).sum()
    if dist.get_rank() == 0:
        torch.autograd.grad(loss, model.module.first.weight, retain_graph=True)
    parallel_assert(model.module.last.weight.grad is None)
    loss.backward()
    for rank in range(dist.get_world_size()):
        (alone(input_of(rank, 0)).sum() / dist.get_world_size()).backward()
    for layer in ("last", "spare"):
        pairs = zip(grads(getattr(model.module, layer)), grads(getattr(alone, layer)), strict=True)
        parallel_assert(all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))
    with parallel_raises(dist.DistError, match="create_graph"):
        model(own(0)).sum().backward(create_graph=True)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_triggers() -> None:
    net = SpareNet()
    layer = net.last if dist.get_rank() else net.first
    with parallel_raises(dist.DistMismatchError, match="param_to_hook_all_reduce"):
        DDP(
            net,
            delay_all_reduce_named_params=[("spare.bias", net.spare.bias)],
            param_to_hook_all_reduce=layer.weight,
        )


@pytest.mark.parametrize("everything", [False, True], ids=["some", "all"])
def test_hooks_on_gradients_run_before_the_average(everything: bool) -> None:
    model, alone = delayed(everything), SpareNet()
    layers = ("last", "spare") if everything else ("first", "last", "spare")
    for step in range(2):
        for net in (model.module, alone):
            net.zero_grad()
            if not step:
                for p in net.parameters():
                    p.register_post_accumulate_grad_hook(clip)
        found = []
        for rank in range(dist.get_world_size()):
            alone.zero_grad()
            alone(input_of(rank, step)).sum().backward()
            found.append([p.grad for layer in layers for p in getattr(alone, layer).parameters()])
        model(own(step)).sum().backward()
        ours = [p.grad for layer in layers for p in getattr(model.module, layer).parameters()]
        for gradient, each in zip(ours, zip(*found, strict=True), strict=True):
            parallel_assert(torch.allclose(gradient, sum(each) / len(each)), str(gradient))


def clip(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-0.3, 0.3)


class Gated(nn.Module):
    """`gate`, whose gradient is waited for, may be left out, and so may `aside`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.gate, self.body, self.aside, self.head = (
            nn.Linear(2, 2, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, gate: bool, aside: bool) -> torch.Tensor:
        y = self.body(torch.tanh(self.gate(x)) if gate else x)
        return self.head(self.aside(y) if aside else y)


@pytest.mark.parametrize("opaque", [False, True], ids=["tensors", "an object"])
@pytest.mark.parametrize("everything", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {}], ids=["unused", ""])
def test_a_trigger_without_a_gradient(
    options: dict[str, bool], everything: bool, opaque: bool
) -> None:
    net, alone = Gated(), Gated()
    if everything:
        named = list(net.named_parameters())
    else:
        named = [(f"{name}.weight", getattr(net, name).weight) for name in ("body", "aside")]
        if not options:
            named.append(("gate.weight", net.gate.weight))
    model = DDP(
        Opaque(net) if opaque else net,
        delay_all_reduce_named_params=[("net." * opaque + n, p) for n, p in named],
        param_to_hook_all_reduce=net.gate.weight,
        **options,
    )
    size, me = dist.get_world_size(), dist.get_rank()

    def out(model: nn.Module, *args: object) -> torch.Tensor:
        found = model(*args)
        return found[0].value if isinstance(found, tuple) else found

    # on all ranks, on none, on one; `aside` never, under no_sync, on the last rank, on all
    gates = [lambda _: False, lambda _: True, lambda rank: rank == 0, lambda rank: rank != 0]
    asides = [lambda _: False, lambda _: False, lambda rank: rank == size - 1, lambda _: True]
    for step, (gate, aside) in enumerate(zip(gates, asides, strict=True)):
        model.zero_grad()
        alone.zero_grad()
        local = step == 1
        if local:
            with model.no_sync():
                out(model, own(8), True, True).square().sum().backward()
        loss = out(model, own(step), gate(me), aside(me)).square().sum()
        torch.autograd.grad(loss, net.head.weight, retain_graph=True)
        loss.backward()
        for rank in range(size):
            if local:
                (alone(input_of(rank, 8), True, True).square().sum() / size).backward()
            (alone(input_of(rank, step), gate(rank), aside(rank)).square().sum() / size).backward()
        for (name, p), other in zip(net.named_parameters(), alone.parameters(), strict=True):
            if other.grad is None:
                parallel_assert(p.grad is None, f"{step}, {name}: {p.grad}")
            else:
                parallel_assert(
                    torch.allclose(p.grad, other.grad, atol=1e-5),
                    f"{step}, {name}: {p.grad}, not {other.grad}",
                )


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {}], ids=["unused", ""])
def test_a_delayed_last_layer_of_an_opaque_output(options: dict[str, bool]) -> None:
    """Its gradient is the first one, so its end of backward comes before the reducer's."""
    net, alone, size = Tailed(), Tailed(), dist.get_world_size()
    model = DDP(
        Opaque(net),
        delay_all_reduce_named_params=[("net.head.weight", net.head.weight)],
        param_to_hook_all_reduce=net.head.weight,
        **options,
    )
    for step, head in enumerate([lambda rank: rank == 0, lambda _: True, lambda _: False] * 2):
        model.zero_grad()
        alone.zero_grad()
        model(own(step), head(dist.get_rank()))[0].value.square().sum().backward()
        for rank in range(size):
            (alone(input_of(rank, step), head(rank)).square().sum() / size).backward()
        for (name, p), other in zip(net.named_parameters(), alone.parameters(), strict=True):
            same = p.grad is other.grad is None or torch.allclose(p.grad, other.grad, atol=1e-5)
            parallel_assert(same, f"{step}, {name}: {p.grad}, not {other.grad}")


class Tailed(nn.Module):
    """`head` may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, head: bool) -> torch.Tensor:
        y = self.body(x)
        return self.head(y) if head else y


class Opaque(nn.Module):
    """Returns an object in which DDP finds no tensors."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: object) -> object:
        return (Box(self.net(*args)),)


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
