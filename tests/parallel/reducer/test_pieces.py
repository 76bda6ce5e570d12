"""Large buckets are reduced in pieces, unless a hook is to see them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_cases import DDP, grads, in_pieces, mine
from ddp_network import all_close, averages, batches, network
from torch import nn

import hpcdist as dist
from hpcdist.parallel.reducer import schedule
from hpcdist.parallel.reducer.bucket import wholes
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every gradient but the smallest be a piece."""
    in_pieces(monkeypatch, 64)


def backward(model: nn.Module) -> None:
    model(mine(batches(1)[0][0])).square().sum().backward()


def expected() -> list[torch.Tensor]:
    alone = network(0)
    backward(alone)
    return averages(grads(alone))


def blocks(model: DDP) -> list[set[int]]:
    """For each bucket where the memory of its pieces begins."""
    return [
        {piece.buffer.untyped_storage().data_ptr() for piece in whole}
        for whole in wholes(model.reducer.buckets)
    ]


def test_the_size_grows_with_the_ranks() -> None:
    parallel_assert(schedule.piece_size(1) is None)
    parallel_assert(schedule.piece_size(2) == schedule.piece_size(32) == 2 << 20)
    parallel_assert(schedule.piece_size(1000) == 1000 << 16)


@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_piece_starts_before_its_bucket_is_full(tiny: None, as_view: bool) -> None:
    model = DDP(network(0), gradient_as_bucket_view=as_view)
    (pieces,) = wholes(model.reducer.buckets)
    started: list[list[bool]] = []
    model.module[0].weight.register_hook(
        lambda _gradient: started.append([piece.work is not None for piece in pieces])
    )
    backward(model)
    # the first layer's gradients come last: those behind it are on their way
    first = set(map(id, model.module[0].parameters()))
    behind = [first.isdisjoint(map(id, piece.parameters)) for piece in pieces]
    parallel_assert(len(pieces) > 2 and started[0] == behind, f"{started[0]}, {behind}")
    parallel_assert(all_close(grads(model), expected()))
    long = sum(piece.single for piece in pieces)
    short = len(pieces) - long
    parallel_assert(len(blocks(model)[0]) == long + min(short, 1), "short pieces lie apart")
    data = model._get_ddp_logging_data()
    size = sum(p.numel() * p.itemsize for p in model.parameters())
    parallel_assert(data["bucket_sizes"] == str(size), str(data))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_hook_gets_whole_buckets(tiny: None, steps: int) -> None:
    model = DDP(network(0), gradient_as_bucket_view=True)
    wanted = [gradient * (steps + 1) for gradient in expected()]
    for _ in range(steps):  # without zero_grad: what is there moves with the memory
        backward(model)
    seen: list[tuple[int, bool, int]] = []

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel()))
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group, async_op=True)
        return work.get_future()

    model.register_comm_hook(None, hook)
    backward(model)
    backward(model)
    numel = sum(p.numel() for p in model.parameters())
    parallel_assert(seen == [(0, True, numel)] * 2, str(seen))
    (start,) = blocks(model)[0]
    parallel_assert(all(g.untyped_storage().data_ptr() == start for g in grads(model)))
    wanted = [a + b for a, b in zip(wanted, expected(), strict=True)]
    parallel_assert(all_close(grads(model), wanted))


def test_a_hook_in_the_middle_of_backward_is_refused(tiny: None) -> None:
    model = DDP(network(0))
    found: list[str] = []

    def register(_gradient: torch.Tensor) -> None:
        try:
            model.register_comm_hook(None, lambda state, bucket: None)
        except RuntimeError as error:
            found.append(str(error))

    model.module[0].weight.register_hook(register)
    backward(model)
    parallel_assert(found == ["register_comm_hook cannot be called during backward"], str(found))
    parallel_assert(all_close(grads(model), expected()))
