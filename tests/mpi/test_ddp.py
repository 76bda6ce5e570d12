"""DistributedDataParallel on real processes: it trains what one process would train."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.mpi

DDP = dist.DistributedDataParallel
BATCH = 24  # divides by 1, 2, 3 and 4 ranks


def network(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 20), nn.Tanh(), nn.Linear(20, 5)
    ).to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float64) -> list[tuple]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(BATCH, 1, 8, 8, generator=generator, dtype=dtype),
            torch.randint(5, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def assert_equal_everywhere(tensors: list[torch.Tensor]) -> None:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hexdigest())
    parallel_assert(len(set(everyone)) == 1, f"ranks differ: {everyone}")


def averages(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """What DDP should make of these, by the plain collective."""
    copies = [g.clone() for g in gradients]
    for copy in copies:
        dist.all_reduce(copy, op=dist.ReduceOp.AVG)
    return copies


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters()]


def all_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("cap", [None, 0, 0.005])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_trains_what_one_process_trains(
    dtype: torch.dtype, tolerance: float, cap: float | None, as_view: bool
) -> None:
    alone = network(0, dtype)
    model = DDP(network(dist.get_rank(), dtype), bucket_cap_mb=cap, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(batches(4, dtype)):
        reference.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        reference.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        F.cross_entropy(model(mine(x)), mine(y)).backward()
        optimizer.step()
    parallel_assert(distance(model, alone) <= tolerance, lambda: f"off by {distance(model, alone)}")
    assert_equal_everywhere(list(model.parameters()))


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_no_sync_accumulates_and_the_next_backward_averages_the_sum(as_view: bool) -> None:
    model = DDP(network(0), gradient_as_bucket_view=as_view)
    alone = network(0)
    for x, y in batches(3):
        model.zero_grad()
        alone.zero_grad()
        for x_part, y_part in zip(x.split(BATCH // 2), y.split(BATCH // 2), strict=True):
            F.cross_entropy(alone(x_part), y_part).backward()
        (x1, x2), (y1, y2) = x.split(BATCH // 2), y.split(BATCH // 2)
        with model.no_sync():
            F.cross_entropy(model(mine(x1)), mine(y1)).backward()
        local = [g.clone() for g in grads(model)]
        parallel_assert(
            dist.get_world_size() == 1 or not all_close(local, averages(local)),
            "gradients were averaged under no_sync",
        )
        F.cross_entropy(model(mine(x2)), mine(y2)).backward()
        parallel_assert(all_close(grads(model), grads(alone)))
    assert_equal_everywhere(grads(model))


def test_no_sync_goes_by_where_forward_ran() -> None:
    model, x = DDP(network(dist.get_rank())), mine(batches(1)[0][0])
    with model.no_sync():
        inside = model(x).square().sum()
    inside.backward()
    local = [g.clone() for g in grads(model)]
    expected = network(0)
    expected(x).square().sum().backward()
    parallel_assert(all_close(local, grads(expected)))
    model.zero_grad()
    outside = model(x).square().sum()
    with model.no_sync():
        outside.backward()
    wanted = averages(local)
    parallel_assert(all_close(grads(model), wanted))
    parallel_assert(model.require_backward_grad_sync)


def test_two_forwards_before_one_backward_and_before_two() -> None:
    model, x = DDP(network(0)), mine(batches(1)[0][0])
    alone = network(0)
    (alone(x).square().sum() + alone(2 * x).square().sum()).backward()
    expected = averages(grads(alone))
    (model(x).square().sum() + model(2 * x).square().sum()).backward()
    parallel_assert(all_close(grads(model), expected))
    model.zero_grad()
    first, second = model(x).square().sum(), model(2 * x).square().sum()
    first.backward()
    second.backward()
    parallel_assert(all_close(grads(model), expected))


def test_backward_twice_through_one_forward() -> None:
    model, x = DDP(network(0)), mine(batches(1)[0][0])
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    once = [g.clone() for g in grads(model)]
    loss.backward()
    parallel_assert(all_close(grads(model), [2 * g for g in once]))


def test_the_bare_module_stays_local() -> None:
    model, x = DDP(network(0)), mine(batches(1)[0][0])
    model(x).square().sum().backward()
    model.zero_grad()
    # One rank alone: if this communicated, it would wait for ever.
    if dist.get_rank() == 0:
        model.module(x).square().sum().backward()
    parallel_assert((model.module[0].weight.grad is not None) == (dist.get_rank() == 0))
    model.zero_grad()
    model(x).square().sum().backward()
    assert_equal_everywhere(grads(model))


def test_outputs_that_are_not_tensors_or_are_parameters() -> None:
    class Hidden:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, wrap: bool) -> Hidden | tuple:
            # Neither shows the reducer a tensor that leads to the loss.
            loss = (dist.get_rank() + 1) * self.weight.sum()
            return Hidden(loss) if wrap else (self.weight, None, 3)

    model = DDP(Odd())
    average = torch.full((3,), (dist.get_world_size() + 1) / 2)
    model(True).loss.backward()
    parallel_assert(torch.equal(model.module.weight.grad, average))
    model.zero_grad()
    weight, _, _ = model(False)
    ((dist.get_rank() + 1) * weight.sum()).backward()
    parallel_assert(torch.equal(model.module.weight.grad, average))
    parallel_assert(not model.module.weight._backward_hooks, "a hook stays on the parameter")


def test_autograd_grad_leaves_the_reducer_alone() -> None:
    model = DDP(network(0))
    x = mine(batches(1)[0][0]).clone().requires_grad_()
    # A gradient penalty: differentiates with respect to the input, then through that.
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).square().sum() + slope.square().sum()).backward()
    alone = network(0)
    (slope,) = torch.autograd.grad(alone(x).sum(), x, create_graph=True)
    (alone(x).square().sum() + slope.square().sum()).backward()
    parallel_assert(all_close(grads(model), averages(grads(alone))))


class Branches(nn.Module):
    """Uses its two layers in an order that depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        first, second = self.one, self.two
        if dist.get_rank() % 2:
            first, second = second, first
        return {"nested": [second(torch.tanh(first(x)))]}


@pytest.mark.parametrize("cap", [0, None])
def test_ranks_may_produce_gradients_in_different_orders(cap: float | None) -> None:
    torch.manual_seed(0)
    model = DDP(Branches(), bucket_cap_mb=cap)
    x = torch.full((2, 6), float(dist.get_rank() + 1))
    with model.no_sync():
        model(x)["nested"][0].square().sum().backward()
    expected = averages(grads(model))
    model.zero_grad()
    model(x)["nested"][0].square().sum().backward()
    parallel_assert(all_close(grads(model), expected))


def test_buckets_start_while_backward_runs() -> None:
    model = DDP(network(0), bucket_cap_mb=0)
    started: list[int] = []

    def look(_grad: torch.Tensor) -> None:
        started.append(sum(bucket.work is not None for bucket in model.reducer.buckets))

    first = model.module[0].weight.register_hook(look)
    model(mine(batches(1)[0][0])).square().sum().backward()
    first.remove()
    # The gradient of the first layer comes last; those of the two linear layers are on their way.
    parallel_assert(started and started[0] >= 4, lambda: f"only {started} buckets were started")
    parallel_assert(all(bucket.work is None for bucket in model.reducer.buckets))
    parallel_assert(model.communication_seconds > 0)


def test_default_buckets_begin_and_end_small() -> None:
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each
    members = [bucket.members for bucket in DDP(layers).reducer.buckets]
    # And end small: none is larger than half of what was left.
    parallel_assert(members == [[7], [6, 5, 4, 3], [2, 1], [0]], str(members))
    members = [bucket.members for bucket in DDP(layers, bucket_cap_mb=3).reducer.buckets]
    parallel_assert(members == [[7, 6, 5], [4, 3, 2], [1, 0]], str(members))


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_are_views_of_the_buckets(set_to_none: bool) -> None:
    model, x = DDP(network(0), gradient_as_bucket_view=True), mine(batches(1)[0][0])
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        model(x).square().sum().backward()
        (bucket,) = model.reducer.buckets
        storage = bucket.buffer.untyped_storage().data_ptr()
        parallel_assert(all(g.untyped_storage().data_ptr() == storage for g in grads(model)))
    alone = network(0)
    alone(x).square().sum().backward()
    parallel_assert(all_close(grads(model), averages(grads(alone))))


class Mixture(nn.Module):
    """Parameters of many kinds in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.of_float32 = nn.Parameter(torch.randn(3))
        self.of_float64 = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.of_bfloat16 = nn.Parameter(torch.randn(4).to(torch.bfloat16))
        self.of_complex64 = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 2).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.large = nn.Parameter(torch.randn(600_000))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("steps", torch.randint(100, ()))
        self.register_buffer("strided", torch.rand(4, 6)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.expand(1, 2, 4, 4)
        parts = [p.abs().square().sum() for p in self.parameters() if p.requires_grad]
        return sum(part.double() for part in parts) * x + self.conv(image).square().sum()


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_parameters_of_many_kinds(as_view: bool) -> None:
    torch.manual_seed(100 + dist.get_rank())
    model = DDP(Mixture(), gradient_as_bucket_view=as_view)
    assert_equal_everywhere([*model.parameters(), *model.buffers()])
    torch.manual_seed(100)
    first = Mixture().state_dict()
    parallel_assert(all(torch.equal(v, first[k]) for k, v in model.module.state_dict().items()))
    x = torch.tensor(dist.get_rank() + 1.0)
    with model.no_sync():
        model(x).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = averages([p.grad for p in trained])
    model.zero_grad()
    model(x).backward()
    assert_equal_everywhere([p.grad for p in trained])
    parallel_assert(all_close([p.grad for p in trained], expected))
    parallel_assert(model.module.frozen.grad is None)
    parallel_assert(len(model.reducer.buckets) >= 5)


def test_construction_copies_the_sign_of_zero() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias.fill_(-0.0 if dist.get_rank() == 0 else 0.0)
    model = DDP(layer)
    parallel_assert(bool(torch.signbit(model.module.bias).all()))


def test_without_init_sync_nothing_is_copied() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(dist.get_rank())
    model = DDP(layer, init_sync=False)
    parallel_assert(bool((model.module.weight == dist.get_rank()).all()))


class Shared(nn.Module):
    """One layer used twice, and a weight that is two parameters' worth of module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(5, 5), nn.Linear(5, 5)
        self.out.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=self.reentrant)
        return self.layers[2](torch.tanh(x))


@pytest.mark.parametrize("cap", [0, None])
@pytest.mark.parametrize(
    "build",
    [Shared, lambda: Checkpointed(True), lambda: Checkpointed(False)],
    ids=["shared", "reentrant-checkpoint", "checkpoint"],
)
def test_unusual_graphs(build: Callable[[], nn.Module], cap: float | None) -> None:
    torch.manual_seed(0)
    model = DDP(build(), bucket_cap_mb=cap)
    x = torch.full((2, 5), float(dist.get_rank() + 1))
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(x).square().sum().backward()
        expected = averages(grads(model))
        model.zero_grad()
        model(x).square().sum().backward()
        parallel_assert(all_close(grads(model), expected))


class NoGradient(torch.autograd.Function):
    """Passes its input on; the gradient is undefined on odd ranks."""

    @staticmethod
    def forward(ctx, x):  # noqa: ANN001, ANN205
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        return None if dist.get_rank() % 2 else grad


def test_an_undefined_gradient_counts_as_zeros() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return (NoGradient.apply(self.a) + self.b).sum()

    model = DDP(Half())
    model().backward()
    size = dist.get_world_size()
    share = (size + 1) // 2 / size
    parallel_assert(torch.allclose(model.module.a.grad, torch.full((3,), share)))
    parallel_assert(torch.equal(model.module.b.grad, torch.ones(3)))


class Counting(nn.Module):
    """Counts its own training forwards, per rank, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += dist.get_rank() + 1
            self.replaced = self.replaced + dist.get_rank() + 1  # another tensor each time
        return self.layer(x)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_follow_rank_0(broadcast_buffers: bool) -> None:
    model, x = DDP(Counting(), broadcast_buffers=broadcast_buffers), torch.ones(1, 2)
    rank = dist.get_rank()
    for step in range(3):
        model(x).sum().backward()
        # What rank 0 had before this forward, and this rank's own addition.
        expected = step + (rank + 1) if broadcast_buffers else (step + 1) * (rank + 1)
        parallel_assert(model.module.seen.item() == expected, str(model.module.seen))
        parallel_assert(model.module.replaced.item() == expected)
    model.eval()
    with torch.no_grad():
        model(x)
        expected = 3 if broadcast_buffers else 3 * (rank + 1)
        parallel_assert(model.module.seen.item() == expected)
        # Nothing has changed them since, so evaluation may be uneven.
        for _ in range(rank):
            model(x)
    dist.barrier()


def test_batch_norm_trains_and_evaluates_alike_on_all_ranks() -> None:
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
    model.eval()
    first, second = model(torch.ones(2, 4)), model(torch.ones(2, 4))  # not modified in between
    (first.sum() + second.sum()).backward()
    assert_equal_everywhere([first, *model.buffers()])


def test_state_dict_names_and_modes() -> None:
    model = DDP(network(0))
    parallel_assert(all(name.startswith("module.") for name in model.state_dict()))
    bare = {f"module.{k}": v for k, v in network(1).state_dict().items()}
    model.load_state_dict(bare)
    parallel_assert(torch.equal(model.module[0].weight, network(1)[0].weight))
    model.eval()
    parallel_assert(not model.module.training and not model.module[0].training)
    parallel_assert(model.train() is model and model.module[0].training)


def test_a_new_wrapper_takes_over_the_module() -> None:
    module, x = network(0), mine(batches(1)[0][0])
    before = DDP(module)
    reducer = before.reducer
    del before
    model = DDP(module)
    model(x).square().sum().backward()
    parallel_assert(reducer is not model.reducer and not reducer._running)
    assert_equal_everywhere(grads(model))
    del reducer, model
    if dist.get_rank() == 0:  # nobody listens any more
        module(x).square().sum().backward()
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_group_of_some_ranks() -> None:
    size = dist.get_world_size()
    members = list(range(1, size))
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(ValueError, match="not in the given group"):
            DDP(network(0), process_group=group)
    else:
        model = DDP(network(rank), process_group=group)
        first = network(1)
        assert distance(model, first) == 0
        x = mine(batches(1)[0][0])
        model(x).square().sum().backward()
        first(x).square().sum().backward()
        expected = grads(first)
        for gradient in expected:
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)
        assert all_close(grads(model), expected)
        dist.destroy_process_group(group)
    dist.barrier()


def test_a_group_of_one() -> None:
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    model = DDP(network(dist.get_rank()), process_group=groups[dist.get_rank()])
    alone = network(dist.get_rank())
    x = mine(batches(1)[0][0])
    model(x).square().sum().backward()
    alone(x).square().sum().backward()
    parallel_assert(distance(model, alone) == 0 and all_close(grads(model), grads(alone)))
    dist.destroy_process_group(groups[dist.get_rank()])
