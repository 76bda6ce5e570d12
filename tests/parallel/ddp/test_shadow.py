"""Uneven inputs: ranks that have run out shadow those that train on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import DDP, TorchDDP, distance, sgd
from gloo import gloo_world
from torch import nn

import hpcdist as dist
from hpcdist.parallel import Join, comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.spare = nn.Linear(4, 6), nn.Linear(4, 6)
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        layer = self.spare if spare else self.first
        return self.last(torch.tanh(self.norm(layer(x))))


def inputs(rank: int) -> list[torch.Tensor]:
    """Rank r has 2 + 2r batches."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 4, generator=generator) for _ in range(2 + 2 * rank)]


class Both(Net):
    """Uses every parameter."""

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        return super().forward(x) + super().forward(x, True)


class Masked(nn.Module):
    """Uses the weight in odd steps, and the bias in even ones and in every third."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, step: int) -> torch.Tensor:
        loss = self.layer.weight.sum() if step % 2 else self.layer.bias.sum()
        return loss + self.layer.bias.sum() if step % 3 == 0 else loss


def one_process(kind: type, initial: bool) -> tuple[nn.Module, list[float]]:
    """What the ranks do together, in one process, and this rank's losses."""
    size = dist.get_world_size()
    alone = kind()
    optimizer = sgd(alone.parameters())
    losses: list[float] = []
    for step in range(2 * size):
        present = [rank for rank in range(size) if step < len(inputs(rank))]
        before = {name: buffer.clone() for name, buffer in alone.named_buffers()}
        optimizer.zero_grad()
        for rank in present:  # the last one's buffers go on to the next step
            for name, buffer in alone.named_buffers():
                buffer.copy_(before[name])
            loss = alone(inputs(rank)[step], step % 2 == 1).square().mean()
            if rank == dist.get_rank():
                losses.append(loss.item())
            (loss / (size if initial else len(present))).backward()
        optimizer.step()
    return alone, losses


@pytest.mark.parametrize("initial", [True, False], ids=["initial-size", "present-size"])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
        {"forward_sync_buffers": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=lambda flags: "-".join(flags) or "default",
)
def test_as_one_process_and_as_torch(flags: dict, initial: bool) -> None:
    gloo_world()
    find = "find_unused_parameters" in flags
    kind = Net if find else Both

    def run(wrap: Any) -> Any:
        model, losses = wrap(kind(), **flags), []
        optimizer = sgd(model.parameters())
        with model.join(divide_by_initial_world_size=initial):
            for step, x in enumerate(inputs(dist.get_rank())):
                optimizer.zero_grad()
                loss = model(x, step % 2 == 1).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return model, losses

    (ours, losses), (alone, expected) = run(DDP), one_process(kind, initial)
    parallel_assert(distance(ours, alone) <= 1e-6, f"off by {distance(ours, alone)}")
    parallel_assert(losses == pytest.approx(expected, abs=1e-5), f"{losses}, {expected}")
    if not find:  # there torch takes parameters for used that no rank uses, once a rank is done
        theirs, expected = run(TorchDDP)
        parallel_assert(losses == pytest.approx(expected, abs=1e-5), f"{losses}, {expected}")
        parallel_assert(distance(ours, theirs) <= 1e-6, f"off by {distance(ours, theirs)}")
        pairs = zip(ours.buffers(), theirs.buffers(), strict=True)
        parallel_assert(all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))
    # Afterwards it is an ordinary module again.
    ours(inputs(0)[0], False).square().mean().backward()


def test_a_rank_without_any_input_and_steps_under_no_sync() -> None:
    model = DDP(Both())
    expected = DDP(Both())
    optimizers = [sgd(m.parameters()) for m in (model, expected)]
    own = [] if dist.get_rank() == 0 and dist.get_world_size() > 1 else inputs(0) * 2
    with model.join():
        for step, x in enumerate(own):
            if step % 2 == 0:
                with model.no_sync():
                    model(x).square().mean().backward()
                continue
            model(x).square().mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    parallel_assert(not bool(torch.isnan(model.module.last.weight).any()))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, model.module.last.weight.sum().item())
    parallel_assert(len(set(everyone)) == 1, str(everyone))
    parallel_assert(distance(model, expected) > 0)


def test_with_a_communication_hook() -> None:
    def average(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    models = [DDP(Both()), DDP(Both())]
    models[0].register_comm_hook(None, average)
    for model in models:
        optimizer = sgd(model.parameters())
        with model.join():
            for x in inputs(dist.get_rank()):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    parallel_assert(distance(*models) == 0)


def test_with_optimizers_in_backward() -> None:
    """A rank that is done is not in backward; the others step there."""
    models = [DDP(Both()), DDP(Both())]
    state = comm_hooks.OptimizerInBackward(torch.optim.SGD, models[0].parameters(), lr=0.05)
    models[0].register_comm_hook(state, comm_hooks.optimizer_in_backward_hook)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.05)
    for model in models:
        with model.join():
            for x in inputs(dist.get_rank()):
                model(x).square().mean().backward()
                if model is models[1]:
                    optimizer.step()
                    optimizer.zero_grad()
        parallel_assert(all(p.grad is None for p in model.parameters()))
    parallel_assert(distance(*models) <= 1e-6, f"off by {distance(*models)}")


def test_sparse_gradients() -> None:
    models = [DDP(nn.Embedding(9, 3, sparse=flag)) for flag in (True, False)]
    models[1].module.load_state_dict(models[0].module.state_dict())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(1 + dist.get_rank()):
                optimizer.zero_grad()
                model(torch.arange(step + 1)).square().mean().backward()
                optimizer.step()
    parallel_assert(distance(*models) <= 1e-7)


def test_disabled_it_does_nothing() -> None:
    model = DDP(Both())
    before = dist.group.WORLD.carrier.seq
    with model.join(enable=False):
        pass
    parallel_assert(dist.group.WORLD.carrier.seq == before)


@pytest.mark.parametrize("other", ["disabled, inside", "never entered"])
def test_what_another_one_divides_by_does_not_count(other: str) -> None:
    layer = nn.Linear(1, 1, bias=False)
    model = DDP(layer)
    block = model.join(divide_by_initial_world_size=False)
    if other == "never entered":
        model.join()
    found = []
    with block:
        for _ in range(1 + 2 * dist.get_rank()):
            if other == "disabled, inside":
                with model.join(enable=False):
                    pass
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            found.append(layer.weight.grad.item())
    parallel_assert(found == [1.0] * (1 + 2 * dist.get_rank()), lambda: f"{found}")


@pytest.mark.mpi(min_size=2)
def test_ending_early() -> None:
    model = DDP(Both())
    steps = 0
    with (
        parallel_raises(RuntimeError, match="exhausted"),
        model.join(throw_on_early_termination=True),
    ):
        for x in inputs(dist.get_rank()):
            model(x).square().mean().backward()
            steps += 1
    parallel_assert(steps == 2)


@pytest.mark.mpi(min_size=2)
def test_a_static_graph_that_a_rank_has_not_seen() -> None:
    model = DDP(Both(), static_graph=True)
    own = inputs(0) if dist.get_rank() else []
    with parallel_raises(RuntimeError, match="give every rank at least one batch"), model.join():
        for x in own:
            model(x).square().mean().backward()


def test_what_it_does_not_shadow_is_refused() -> None:
    net = Both()
    named = [("last.bias", net.last.bias)]
    model = DDP(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.first.weight)
    with parallel_raises(ValueError, match="shadows neither delay_all_reduce_named_params nor"):
        model.join()
    model = DDP(Both())
    model._register_buffer_comm_hook(None, lambda _state, _buffers: None)
    with parallel_raises(ValueError, match="nor buffer hooks"):
        model.join()


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_others_gradients_do_not_stay(set_to_none: bool, as_view: bool) -> None:
    """What a rank that ran out has in .grad is of its own last step, as in torch."""
    size, rank = dist.get_world_size(), dist.get_rank()
    layer = nn.Linear(1, 1, bias=False)
    model = DDP(layer, gradient_as_bucket_view=as_view)
    x = torch.full((1, 1), 10.0)
    for zero_first in (True, False):
        model.zero_grad(set_to_none)
        with model.join():
            for _ in range(1 + rank):
                if zero_first:
                    model.zero_grad(set_to_none)
                model(x).sum().backward()
                if not zero_first:
                    own = layer.weight.grad.item()
                    model.zero_grad(set_to_none)
        if zero_first:
            # in step k all ranks from k on take part; each rank keeps its own last step's
            parallel_assert(layer.weight.grad.item() == pytest.approx(10 * (size - rank) / size))
        else:
            parallel_assert(own == pytest.approx(10 * (size - rank) / size))
            left = layer.weight.grad
            parallel_assert(left is None if set_to_none else left.item() == 0, f"{left}")
    model(x).sum().backward()
    parallel_assert(layer.weight.grad.item() == pytest.approx(10.0), f"{layer.weight.grad}")


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("flag", ["find_unused_parameters", "static_graph"])
def test_with_unused_parameters_that_are_skipped_elsewhere(flag: str, as_view: bool) -> None:
    """The ranks that are done do not know which ones the others leave unused."""

    class Part(Net):
        def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
            return self.last(torch.tanh(self.spare(x) if spare else self.first(x)))

    models = [
        DDP(
            Part(),
            skip_all_reduce_unused_params=skip,
            bucket_cap_mb=0.0001,
            gradient_as_bucket_view=as_view,
            **{flag: True},
        )
        for skip in (True, False)
    ]
    for model in models:
        zero = dist.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(2):  # the second time after steps without join
            with Join([model, zero]):
                for x in inputs(dist.get_rank()):
                    model.zero_grad()
                    model(x, flag == "find_unused_parameters" and x[0, 0] > 0).sum().backward()
                    zero.step()
            model(inputs(0)[0]).sum().backward()
            zero.step()
    parallel_assert(distance(*models) == 0, f"off by {distance(*models)}")
    zeros = [p for n, p in models[0].module.named_parameters() if "norm" in n]
    parallel_assert(all(p.grad is None for p in zeros))


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_share_is_not_stepped_with_gradients_of_an_earlier_step(as_view: bool) -> None:
    """The others leave a parameter unused, so that nobody has a gradient for it in that step."""
    size = dist.get_world_size()
    net, alone = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    with torch.no_grad():
        for parameter in (*net.parameters(), *alone.parameters()):
            parameter.fill_(1)
    model = DDP(Masked(net), find_unused_parameters=True, gradient_as_bucket_view=as_view)
    zero = dist.optim.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
    )
    with Join([model, zero]):
        for step in range(2 + 4 * dist.get_rank()):
            zero.zero_grad()
            model(step).backward()
            zero.step()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4 * size - 2):
        optimizer.zero_grad()
        present = sum(step < 2 + 4 * rank for rank in range(size))
        (Masked(alone)(step) * present / size).backward()
        optimizer.step()
    off = distance(net, alone)
    parallel_assert(off <= 1e-12, f"off by {off}")


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("initial", [True, False], ids=["initial-size", "present-size"])
def test_averages_of_float16_whose_sum_is_infinite(initial: bool, as_view: bool) -> None:
    model = DDP(nn.Linear(1, 1, bias=False).half(), gradient_as_bucket_view=as_view)
    with model.join(divide_by_initial_world_size=initial):
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 1), 40000.0).half()).sum().backward()
            found = model.module.weight.grad.item()
            parallel_assert(found == pytest.approx(40000, rel=2**-9), f"{found}")
