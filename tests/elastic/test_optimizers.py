"""The state of an optimizer is what it was, also where torch would cast it to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hpcdist as dist
from hpcdist.elastic.parts import part_of
from hpcdist.elastic.shards import Shards
from hpcdist.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from hpcdist.parallel.averaging import PeriodicModelAverager
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.once]


class Master(torch.optim.Optimizer):
    """Keeps weights in float32, and a count and other things in its own containers."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            own = self.state[p]
            if not own:
                own["weight"], own["count"] = p.float(), torch.zeros((), dtype=torch.int64)
                own["more"] = {"last": [p.double()], "name": None}
            own["weight"] -= self.param_groups[0]["lr"] * p.grad.float()
            own["count"] += 1
            own["more"]["last"][0] = own["weight"].double() / 3
            p.copy_(own["weight"])


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (dict, list)):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(each)


def _content(optimizer: Any) -> list[tuple[str, list[Any]]]:
    return [(str(t.dtype), t.flatten().tolist()) for t in _tensors(dict(optimizer.state))]


def _averaging(parameters: Any) -> Any:
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    return PostLocalSGDOptimizer(torch.optim.NAdam(parameters), averager)


def _parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(n, 3).to(dtype)) for n in (4, 2)]


def _step(optimizer: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = p.detach().clone()
    optimizer.step()


KINDS = [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adam, Master]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, _averaging], ids=lambda kind: kind.__name__)
def test_each_tensor_keeps_its_dtype(kind: Callable[..., Any], dtype: torch.dtype) -> None:
    """NAdam's product of momenta lost 16 of its 24 bits in a rollback."""
    optimizer = kind(_parameters(dtype))
    part = part_of(optimizer, "optimizer")
    for _ in range(3):
        _step(optimizer)
    taken, wanted = part.take(), _content(optimizer)
    for _ in range(2):  # the copy stays as it is
        _step(optimizer)
        part.restore(taken)
        parallel_assert(_content(optimizer) == wanted, f"{_content(optimizer)} != {wanted}")


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "divided anew"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_so_does_each_of_a_shard(kind: Callable[..., Any], whole: bool) -> None:
    parameters = [p for _ in range(dist.get_world_size()) for p in _parameters(torch.bfloat16)]
    zero = ZeroRedundancyOptimizer(parameters, kind)
    shards = Shards(zero, 1)
    for _ in range(3):
        _step(zero)
    taken, wanted = shards.take(), _content(zero.optim)
    _step(zero)
    problem = shards.restore(taken, whole=whole)
    right = not problem and _content(zero.optim) == wanted
    parallel_assert(right, f"{problem} {_content(zero.optim)} != {wanted}")


def test_a_group_that_the_failed_step_has_added_goes() -> None:
    """It was an error in the recovery."""
    first, second = _parameters(torch.float32)
    optimizer = torch.optim.Adam([first])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    parts = [part_of(thing, "thing") for thing in (optimizer, scheduler)]

    def step() -> list[float]:
        optimizer.add_param_group({"params": [second], "lr": 0.5})
        _step(optimizer)
        return [group["lr"] for group in optimizer.param_groups]

    _step(optimizer)
    taken = [part.take() for part in parts]
    found = []
    for _ in range(3):
        found.append(step())
        for part, copy in zip(parts, taken, strict=True):
            part.restore(copy)
        left = len(optimizer.param_groups), [p is first for p in optimizer.state]
        parallel_assert(left == (1, [True]), f"{left}")
    parallel_assert(found == [[1e-3, 0.5]] * 3, f"{found}")
    step()
    with pytest.raises(ValueError, match="number of parameter groups"):  # of an earlier start
        part_of(optimizer, "optimizer").restore(taken[0])


@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize("whole", [False, True], ids=["alone", "divided anew"])
def test_so_does_one_of_shards(whole: bool, views: bool) -> None:
    first, second = (_parameters(torch.float32) for _ in range(2))
    zero = ZeroRedundancyOptimizer(first, torch.optim.Adam, parameters_as_bucket_view=views, lr=0.1)
    shards = Shards(zero, 1)
    _step(zero)
    taken, wanted, loads = shards.take(), _content(zero.optim), list(zero._loads)
    for _ in range(2):
        zero.add_param_group({"params": second})
        _step(zero)
        problem = shards.restore(taken, whole=whole)
        right = not problem and _content(zero.optim) == wanted and zero._loads == loads
        right = right and len(zero.param_groups) == 1
        parallel_assert(right, f"{problem} {_content(zero.optim)} != {wanted}")
    _step(zero)


def test_what_an_optimizer_makes_of_its_own_state_stays() -> None:
    """It saves less than it has, and says so in hooks."""
    optimizer = Master(_parameters(torch.bfloat16))

    def short(_: Any, state: dict[str, Any]) -> None:
        for each in state["state"].values():
            each["weight"] = each["weight"].to(torch.float16)

    optimizer.register_state_dict_post_hook(short)
    part = part_of(optimizer, "optimizer")
    _step(optimizer)
    part.restore(part.take())
    kinds = {own["weight"].dtype for own in optimizer.state.values()}
    parallel_assert(kinds == {torch.bfloat16}, f"{kinds}")
