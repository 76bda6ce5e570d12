"""Mixed precision, autocast, and torch.compile."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ddp_cases import DDP, TorchDDP, distance, grads, mine, sgd
from gloo import gloo_world
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.parallel import MixedPrecision, comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Looks at the dtypes it is used with."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("mean", torch.full((8,), 1 / 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.reentrant = reentrant
        self.seen: set[torch.dtype] = set()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.seen |= {x.dtype, self.last.weight.dtype, self.tied.weight.dtype}
        return torch.tanh(self.last(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen |= {x.dtype, self.first.weight.dtype}
        x = torch.tanh(self.first(x))
        if self.reentrant is None:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.tied(x)


def batches(steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(12, 6, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_mixed_precision(reduce_dtype: torch.dtype | None, as_view: bool) -> None:
    low = torch.bfloat16
    settings = MixedPrecision(param_dtype=low, reduce_dtype=reduce_dtype, buffer_dtype=low)
    model = DDP(Net(), mixed_precision=settings, gradient_as_bucket_view=as_view)
    net = model.module
    parallel_assert(net.mean.dtype == low and net.steps.dtype == torch.int64)
    alone = Net()
    optimizers = [sgd(m.parameters()) for m in (model, alone)]
    for x in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(mine(x)).float().square().mean().backward()
        parallel_assert(net.seen == {low}, str(net.seen))
        # Outside everything is in full precision, and gradients are of the parameters themselves.
        parallel_assert(all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters()))
        parts = []
        for part in x.chunk(dist.get_world_size()):  # by hand: each rank's gradient, averaged
            for p in alone.parameters():
                p.grad = None
            copies = {n: p.to(low) for n, p in alone.named_parameters()}
            out = torch.func.functional_call(alone, copies, part.to(low))
            out.float().square().mean().backward()
            parts.append([p.grad.clone() for p in alone.parameters()])
        for p, *each in zip(alone.parameters(), *parts, strict=True):
            wire = reduce_dtype or low
            p.grad = (sum(g.to(wire).float() for g in each) / len(each)).to(wire).float()
        for ours, expected in zip(grads(model), grads(alone), strict=True):
            error = (ours - expected).abs().max() / expected.abs().max()
            parallel_assert(error <= (1e-6 if reduce_dtype == torch.float32 else 2**-7))
        for optimizer in optimizers:
            optimizer.step()
        alone.load_state_dict(net.state_dict())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.double().sum().item() for p in model.parameters()])
    parallel_assert(all(one == everyone[0] for one in everyone))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_again_in_low_precision(reentrant: bool) -> None:
    settings = MixedPrecision(param_dtype=torch.bfloat16)
    model = DDP(Net(reentrant), mixed_precision=settings, static_graph=reentrant)
    plain = DDP(Net(), mixed_precision=settings)
    for x in batches():
        for m in (model, plain):
            m.zero_grad()
            out = m(mine(x))
            torch.no_grad()(m)(mine(x))  # makes copies without a graph
            out.float().square().mean().backward()
        parallel_assert(model.module.seen == {torch.bfloat16}, str(model.module.seen))
        pairs = zip(grads(model), grads(plain), strict=True)
        parallel_assert(all(torch.allclose(a, b, rtol=2**-6, atol=1e-4) for a, b in pairs))
        parallel_assert(all(isinstance(p, nn.Parameter) for p in model.parameters()))


@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "checkpoint"])
def test_functional_call_replaces_the_parameters(reentrant: bool | None) -> None:
    model = DDP(Net(reentrant), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    own, other, x = list(model.parameters()), Net(), mine(batches()[0])
    given = {f"module.{n}": (3 * p).detach() for n, p in model.module.named_parameters()}
    other.load_state_dict(
        {n[7:]: p for n, p in given.items()} | {"tied.weight": given["module.last.weight"]},
        strict=False,
    )
    plain = DDP(other, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    for p in given.values():
        p.requires_grad_()
    with model.no_sync(), plain.no_sync():
        expected = plain(x)
        found = torch.func.functional_call(model, given, (x,))
        parallel_assert(torch.equal(found, expected))
        for output in (found, expected):
            output.float().square().mean().backward()
    pairs = zip(given.values(), grads(plain), strict=True)
    parallel_assert(all(torch.equal(p.grad, q) for p, q in pairs))
    parallel_assert(all(p is q for p, q in zip(own, model.parameters(), strict=True)))
    parallel_assert(all(p.grad is None for p in own) and model.module.seen == {torch.bfloat16})


@pytest.mark.parametrize("reentrant", [False, True])
def test_functional_call_in_backward_leaves_the_parameters(reentrant: bool) -> None:
    model = DDP(nn.Linear(6, 3), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    own, x = list(model.parameters()), mine(batches()[0]).requires_grad_()
    given = {n: (2 * p).detach().requires_grad_() for n, p in model.named_parameters()}

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, given, (x,))

    with model.no_sync():
        output = checkpoint(call, x, use_reentrant=reentrant)
        (output.float().square().sum() + model(x).float().sum()).backward()
        found = [p.grad.clone() for p in given.values()]
        alone = torch.autograd.grad(call(x).float().square().sum(), list(given.values()))
    parallel_assert(all(torch.equal(a, b) for a, b in zip(found, alone, strict=True)))
    parallel_assert(all(p is q for p, q in zip(own, model.parameters(), strict=True)))


def test_a_place_that_is_gone_stays_away() -> None:
    model = DDP(nn.Embedding(3, 2), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    prune.identity(model.module, "weight")  # now it is "weight_orig", the same parameter
    names = set(model.state_dict())
    rows = torch.tensor([dist.get_rank() % 3])
    for _ in range(2):
        model(rows).float().sum().backward()
        parallel_assert(set(model.state_dict()) == names, str(set(model.state_dict())))
    prune.remove(model.module, "weight")
    parallel_assert(model(rows).dtype == torch.bfloat16)
    parallel_assert(list(model.state_dict()) == ["module.weight"])


def test_optimizers_in_backward_step_in_full_precision() -> None:
    models = [DDP(Net(), mixed_precision=MixedPrecision(torch.bfloat16)) for _ in range(2)]
    state = comm_hooks.OptimizerInBackward(torch.optim.SGD, models[0].parameters(), lr=0.05)
    models[0].register_comm_hook(state, comm_hooks.optimizer_in_backward_hook)
    models[1].register_comm_hook(None, comm_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.05)
    x = mine(torch.randn(12, 6, generator=torch.Generator().manual_seed(1)))
    for _ in range(3):
        for model in models:
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        parallel_assert(distance(*models) <= 1e-6, f"off by {distance(*models)}")
        parallel_assert(all(p.dtype == torch.float32 for p in models[0].parameters()))


def test_gradients_accumulate_in_full_precision() -> None:
    settings = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = DDP(Net(), mixed_precision=settings)
    x, y = batches(2)
    with model.no_sync():
        model(mine(x)).float().square().mean().backward()
    once = [g.clone() for g in grads(model)]
    model(mine(y)).float().square().mean().backward()
    other = DDP(Net(), mixed_precision=settings)
    other(mine(y)).float().square().mean().backward()
    for total, first, second in zip(grads(model), once, grads(other), strict=True):
        dist.all_reduce(first, dist.ReduceOp.AVG)
        parallel_assert(torch.allclose(total, first + second, atol=1e-6))


@dataclass
class Batch:
    x: torch.Tensor
    label: torch.Tensor


def test_inputs_of_all_kinds_are_converted() -> None:
    class Look(nn.Linear):
        def forward(self, batch: Batch, *, more: Any) -> torch.Tensor:  # type: ignore[override]
            found.extend([batch.x.dtype, batch.label.dtype, more["a"][0].dtype])
            return super().forward(batch.x)

    found: list[torch.dtype] = []
    model = DDP(Look(2, 2), mixed_precision=MixedPrecision(param_dtype=torch.float16))
    out = model(
        Batch(torch.ones(1, 2), torch.ones(1, dtype=torch.int64)), more={"a": [torch.ones(1)]}
    )
    parallel_assert(found == [torch.float16, torch.int64, torch.float16] and out.dtype == found[0])


class Named(dict):
    """Its constructor takes no pairs."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(items)
        self.name = name


class Attributes(dict):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Pair(collections.namedtuple("Pair", "x y")):
    def __new__(cls, x: Any) -> Pair:
        return super().__new__(cls, x, 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: collections.defaultdict(list, x=x),
        lambda x: collections.OrderedDict(x=x),
        lambda x: collections.Counter(x=x),
        lambda x: Named("one", x=x),
        lambda x: Attributes(x=x),
        Pair,
    ],
    ids=["defaultdict", "OrderedDict", "Counter", "own constructor", "attributes", "namedtuple"],
)
def test_containers_are_converted_whatever_their_constructor_takes(
    build: Callable[[torch.Tensor], Any],
) -> None:
    class Look(nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            found.append(batch)
            x = batch.x if hasattr(batch, "x") else batch["x"]
            return super().forward(x)

    found: list[Any] = []
    model = DDP(Look(2, 1), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    given = build(torch.ones(1, 2))
    parallel_assert(model(given).dtype == torch.bfloat16)
    (seen,) = found
    parallel_assert(type(seen) is type(given) and len(seen) == len(given))
    parallel_assert(next(iter(getattr(given, "values", given.__iter__)())).dtype == torch.float32)
    if isinstance(given, collections.defaultdict):
        parallel_assert(seen["missing"] == [] and "missing" not in given)
    if isinstance(given, Named):
        parallel_assert(seen.name == "one")


def test_settings_of_torch_are_accepted() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    model = DDP(Net(), mixed_precision=_MixedPrecision(reduce_dtype=torch.bfloat16))
    model(mine(batches()[0])).square().mean().backward()
    parallel_assert(model.reducer.buckets[0].buffer.dtype == torch.bfloat16)
    parallel_assert(model.module.seen == {torch.float32})


def test_autocast() -> None:
    gloo_world()
    models = [DDP(Net()), TorchDDP(Net())]
    for x in batches():
        for model in models:
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(mine(x)).float().square().mean()
            loss.backward()
        pairs = zip(*(grads(m) for m in models), strict=True)
        parallel_assert(all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(
            nn.Linear(6, 600),
            nn.Tanh(),
            *(nn.Linear(600, 600) for _ in range(3)),
            nn.Linear(600, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train_compiled(outside: bool, group: dist.ProcessGroup, theirs: Any) -> tuple[float, int]:
    """How far parameters and losses of two steps are from those of an ordinary module, and of
    torch's DDP on a group of its own, compiled in the same way; and how many graphs there were.
    """
    compiled = 0

    def backend(graph: Any, example: Any) -> Any:
        nonlocal compiled
        compiled += 1
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, example)

    def train(wrap: Any, batches: list[torch.Tensor]) -> tuple[nn.Module, torch.Tensor]:
        torch._dynamo.reset()
        module: nn.Module = Plain()
        if wrap is None:
            model = called = module
        elif outside:
            model = wrap(module)
            called = torch.compile(model, backend=backend)
        else:
            model = called = wrap(torch.compile(module, backend=backend))
        optimizer = sgd(model.parameters())
        losses = []
        for x in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(called(x), torch.zeros(len(x), 3))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        torch._dynamo.reset()
        return model, torch.tensor(losses)

    whole = batches(2)
    own = [x.chunk(group.size())[group.rank()] for x in whole]
    options: dict[str, Any] = {"bucket_cap_mb": 1}
    model, losses = train(lambda m: DDP(m, process_group=group, **options), own)
    graphs = compiled
    off = 0.0
    if theirs is not None:
        other, others = train(lambda m: TorchDDP(m, process_group=theirs, **options), own)
        off = max(distance(model, other), (losses - others).abs().max().item())
    dist.all_reduce(losses, dist.ReduceOp.AVG, group=group)
    alone, expected = train(None, whole)
    off = max(off, distance(model, alone), (losses - expected).abs().max().item())
    return off, graphs


@pytest.mark.once
@pytest.mark.parametrize("outside", [True, False], ids=["of-the-wrapper", "of-the-module"])
@pytest.mark.deadline(120)
def test_compiled(outside: bool) -> None:
    """The backend "aot_eager" traces forward and backward, and leaves code generation out."""
    few = list(range(min(2, dist.get_world_size())))  # tracing takes long where cores are short
    group, theirs = dist.new_group(few), None
    if dist.get_world_size() == 2:  # more ranks would do the same again
        gloo_world()
        theirs = torch.distributed.group.WORLD
    found = (0.0, 2)
    if dist.get_rank() in few:
        found = train_compiled(outside, group, theirs)
        dist.destroy_process_group(group)
    parallel_assert(found[0] <= 1e-6, f"off by {found[0]}")
    # torch divides the graph where buckets end, so that their reductions overlap.
    parallel_assert(found[1] >= 2, f"{found[1]} graphs")


def test_complex_parameters_and_other_numbers_are_not_converted() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex128))
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
            for dtype in (torch.complex64, torch.int64, torch.bool, torch.float64):
                self.register_buffer(str(dtype)[6:], torch.ones(2, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.phase * (1 - 2j) * x.double()).sum().real + (self.scale * x).sum()

    for low in (torch.bfloat16, torch.float16):
        model = DDP(Mixture(), mixed_precision=MixedPrecision(low, None, low))
        model(torch.full((3,), dist.get_rank() + 1.0)).backward()
        mean = (dist.get_world_size() + 1) / 2
        parallel_assert(model.module.phase.grad.tolist() == [mean * (1 + 2j)] * 3)
        parallel_assert(model.module.scale.grad.tolist() == [mean] * 3)
        found = {name: str(buffer.dtype)[6:] for name, buffer in model.module.named_buffers()}
        kept = {name: name for name in found} | {"float64": str(low)[6:]}
        parallel_assert(found == kept, str(found))
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        for wrong in (torch.complex64, torch.int64):
            with parallel_raises(ValueError, match=f"{name} of mixed_precision must be"):
                DDP(Mixture(), mixed_precision=MixedPrecision(**{name: wrong}))


def fail(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_after_an_exception_in_backward_the_module_has_its_parameters() -> None:
    model = DDP(Net(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    net, x = model.module, mine(batches(1)[0])
    good = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    for kind in ("hook", "graph"):
        output = model(x).float().sum()
        handle = net.first.weight.register_hook(fail) if kind == "hook" else None
        with parallel_raises((ZeroDivisionError, dist.DistError, RuntimeError)):
            output.backward(create_graph=kind == "graph")
        if handle is not None:
            handle.remove()
        parallel_assert(all(p.dtype == torch.float32 for p in model.parameters()))
        parallel_assert(all(isinstance(p, nn.Parameter) for p in model.parameters()))
        model.load_state_dict(good)
        model.zero_grad()
        model(x).float().sum().backward()
        parallel_assert(all(bool((p == 3).all()) for p in model.parameters()))
