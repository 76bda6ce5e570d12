"""What a State copies of torch's FSDP2, and how that forgets a pass that has failed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as td
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from hpcdist import codec
from hpcdist.elastic import State
from hpcdist.elastic.parts import part_of
from hpcdist.errors import DistError

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


@pytest.fixture
def alone() -> Any:
    td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
    yield
    td.destroy_process_group()


def _sharded() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    for each in (model[0], model):
        fully_shard(each)
    return model


def _step(model: Any, optimizer: Any, after: Any = torch.sum) -> None:
    optimizer.zero_grad()
    after(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()


def _flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().to_local().flatten() for p in model.parameters()])


def _fail(*_: Any) -> None:
    raise ValueError("in forward")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_has_failed_is_repeated_to_the_last_bit(where: str) -> None:
    model = _sharded()
    optimizer = torch.optim.Adam(model.parameters())
    parts = [part_of(model, "model"), part_of(optimizer, "optimizer")]
    for _ in range(2):
        _step(model, optimizer)
    halves = [part.divide(part.take()) for part in parts]
    _step(model, optimizer)
    wanted = _flat(model)
    hook = model[1].register_forward_pre_hook(_fail) if where == "forward" else None
    with pytest.raises(ValueError, match=f"in {where}"):
        _step(model, optimizer, _Fails.apply)
    if hook is not None:
        hook.remove()
    for part, (shared, own) in zip(parts, halves, strict=True):
        assert not shared and own  # each rank has all of it alone
        part.restore(part.join(shared, copy.deepcopy(own)))
    _step(model, optimizer)
    assert torch.equal(_flat(model), wanted)


class _ByRow(torch.optim.SGD):
    """Keeps a number for each row (of a bias one, which is partial), and for each column."""

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            rows = torch.ones_like(p).sum(-1, keepdim=True)
            columns = distribute_tensor(torch.ones(1, p.shape[-1]), p.device_mesh, [Replicate()])
            self.state[p].update(rows=rows, columns=columns, whole=torch.ones_like(p))


@pytest.mark.usefixtures("alone")
def test_an_optimizers_shards_of_another_shape() -> None:
    """They came back with the shape and the placements of their parameters."""
    model = _sharded()
    optimizer = _ByRow(model.parameters())
    optimizer.step()

    def seen() -> list[Any]:
        return [
            (name, v.shape, v.stride(), v.placements, v.to_local().shape)
            for entries in optimizer.state.values()
            for name, v in entries.items()
        ]

    part, wanted = part_of(optimizer, "optimizer"), seen()
    assert {p for _, _, _, (p,), _ in wanted} == {Shard(0), Replicate(), Partial()}
    part.restore(codec.decode(codec.encode(part.take())))
    assert seen() == wanted


@pytest.mark.usefixtures("alone")
def test_a_commit_leaves_gradients_that_wait_to_be_reduced() -> None:
    found = []
    for commits in (False, True):
        torch.manual_seed(1)
        model = _sharded()
        part = part_of(model, "model")
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(torch.full((2, 4), 1.0 + last)).square().sum().backward()
            if commits:
                part.take()
        found.append([p.grad.to_local().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reduced", [True, False])
def test_a_repeated_step_adds_to_the_gradients_of_the_commit(reduced: bool) -> None:
    """It began with none. Of those that FSDP2 has not reduced there is no copy."""
    model = _sharded()
    part = part_of(model, "model")

    def step(last: bool) -> list[torch.Tensor]:
        model.set_requires_gradient_sync(last or reduced)
        model(torch.full((2, 4), 1.0 + last)).square().sum().backward()
        return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]

    step(False)
    taken = codec.decode(codec.encode(part.take()))
    wanted = step(True)
    if reduced:
        part.restore(taken)
        assert all(map(torch.equal, step(True), wanted))
    else:
        with pytest.raises(DistError, match="FSDP2 had not reduced"):
            part.restore(taken)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_kept_is_refused(tmp_path: Any) -> None:
    model = _sharded()
    with pytest.raises(ValueError, match="model has a shard on each rank, and folder= keeps"):
        State(model=model, folder=tmp_path)
    with pytest.raises(TypeError, match="weight is a DTensor"):
        State(weight=next(model.parameters()))


@pytest.mark.parametrize("held", [torch.ones(2), [3, 4], "text"])
def test_a_state_dict_may_be_anything(held: Any) -> None:
    class Holds:
        def state_dict(self) -> Any:
            return held

        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    thing = Holds()
    part = part_of(thing, "thing")
    shared, own = part.divide(part.take())
    part.restore(part.join(shared, own))
    assert own is None and str(thing.loaded) == str(held)
