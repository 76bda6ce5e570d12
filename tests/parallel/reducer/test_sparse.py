"""Sparse gradients: other rows, and other numbers of rows, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import DDP, distance, mine, side_by_side
from torch import nn

import hpcdist as dist
from hpcdist.parallel import MixedPrecision
from hpcdist.parallel.reducer.sparse import all_reduce_sparse
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


class Words(nn.Module):
    def __init__(self, kind: type = nn.Embedding, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.words = kind(20, 4, sparse=sparse)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x)
        return self.last(torch.tanh(self.first(y)))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(20, (24, 3), generator=generator) for _ in range(4)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0}, {"find_unused_parameters": True}],
    ids=lambda a: "-".join(a) or "default",
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_as_one_process_and_as_torch(kind: type, arguments: dict) -> None:
    model = side_by_side(lambda: Words(kind), squares, batches(), optimizer=sgd, **arguments)
    gradient = model.module.words.weight.grad
    parallel_assert(gradient.is_sparse and gradient.shape == (20, 4))
    alone = [bucket.members for bucket in model.reducer.buckets if bucket.sparse]
    parallel_assert(alone == [[2]], str(alone))


def test_rows_that_differ_in_number_down_to_none() -> None:
    class Maybe(Words):
        def forward(self, x: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
            start = torch.ones(1, 4) if x is None else self.words(x)
            return self.last(torch.tanh(self.first(start)))

    # torch's DDP waits for ever here: a rank without the parameter sends something dense.
    def rows(step: int, rank: int) -> torch.Tensor | None:
        return None if (rank + step) % 2 else torch.arange(rank * 5 + 1) % 20

    size = dist.get_world_size()
    model, alone = DDP(Maybe(), find_unused_parameters=True), Maybe()
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(rows(step, dist.get_rank())).square().sum().backward()
        (sum(alone(rows(step, r)).square().sum() for r in range(size)) / size).backward()
        ours, expected = model.module.words.weight.grad, alone.words.weight.grad
        parallel_assert((ours is None) == (expected is None), f"step {step}")
        same = ours is None or torch.allclose(ours.to_dense(), expected.to_dense(), atol=1e-6)
        parallel_assert(same, f"step {step}")


def test_accumulated_under_no_sync() -> None:
    model, alone = DDP(Words()), Words()
    x, y = batches()[:2]
    with model.no_sync():
        squares(model, mine(x)).backward()
    squares(model, mine(y)).backward()
    (squares(alone, x) + squares(alone, y)).backward()
    ours, expected = model.module.words.weight.grad, alone.words.weight.grad
    parallel_assert(torch.allclose(ours.to_dense(), expected.to_dense(), atol=1e-6))


def test_a_weight_that_is_also_used_densely() -> None:
    class Tied(Words):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ self.last.weight @ self.words.weight.t()

    side_by_side(Tied, squares, batches()[:2], optimizer=sgd, torch_too=False)


def test_sparse_adam_takes_the_gradients() -> None:
    model = DDP(Words())
    optimizer = torch.optim.SparseAdam([model.module.words.weight])
    for x in batches():
        squares(model, mine(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, model.module.words.weight.detach().sum().item())
    parallel_assert(len(set(everyone)) == 1)


def test_a_hook_gets_the_sparse_tensor() -> None:
    seen = []

    def hook(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        tensor = bucket.buffer()
        if tensor.is_sparse:
            seen.append(bucket.gradients()[0] is tensor)
            tensor = all_reduce_sparse(tensor, dist.group.WORLD)
        else:
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
        future.set_result(tensor)
        return future

    model, plain = DDP(Words()), DDP(Words())
    model.register_comm_hook(None, hook)
    for either in (model, plain):
        squares(either, mine(batches()[0])).backward()
    ours, expected = (m.module.words.weight.grad.to_dense() for m in (model, plain))
    parallel_assert(seen == [True] and torch.equal(ours, expected))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_with_mixed_precision(kind: type) -> None:
    settings = MixedPrecision(torch.bfloat16, torch.float32)
    models = [DDP(Words(kind, flag), mixed_precision=settings) for flag in (True, False)]
    for x in batches():
        found = []
        for model in models:
            model.zero_grad()
            out = model(mine(x))
            out.float().square().mean().backward()
            found.append(model.module.words.weight.grad)
        parallel_assert(out.dtype == torch.bfloat16)
        parallel_assert(found[0].is_sparse and found[0].dtype == torch.float32)
        off = (found[0].to_dense() - found[1]).abs().max() / found[1].abs().max()
        parallel_assert(off <= 2**-6, f"off by {off}")  # dense ones are added up in bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_hook_may_return_another_dtype(dtype: torch.dtype) -> None:
    def hook(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        future.set_result(bucket.buffer().to(dtype))
        return future

    model = DDP(nn.Embedding(4, 2, sparse=True))
    model.register_comm_hook(None, hook)
    for passes in (1, 2):
        model(torch.tensor([1, 2])).sum().backward()
        found = model.module.weight.grad
        parallel_assert(found.is_sparse and found.dtype == torch.float32)
        parallel_assert(found.to_dense()[:, 0].tolist() == [0, passes, passes, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sum_against_a_dense_one(dtype: torch.dtype, rng: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = []
    for r in range(size):
        rows = torch.from_numpy(rng.integers(0, 7, size=2 * r))
        values = torch.from_numpy(rng.integers(-8, 8, size=(2 * r, 3))).to(dtype)
        tensors.append(torch.sparse_coo_tensor(rows[None], values, (7, 3), check_invariants=True))
    total = sum(t.to_dense().double() for t in tensors)
    found = all_reduce_sparse(tensors[rank], dist.group.WORLD, average=False)
    parallel_assert(found.is_coalesced() and found.dtype == dtype)
    parallel_assert(torch.equal(found.to_dense().double(), total))


def test_parameters_stay_equal() -> None:
    model = DDP(Words())
    optimizer = sgd(model.parameters())
    for x in batches():
        optimizer.zero_grad()
        squares(model, mine(x)).backward()
        optimizer.step()
    first = Words()
    first.load_state_dict(model.module.state_dict())
    for p in first.parameters():
        dist.broadcast(p.detach(), 0)
    parallel_assert(distance(first, model) == 0)
