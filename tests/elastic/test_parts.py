"""What a State copies of each thing, and puts back."""

from __future__ import annotations

import pytest
import torch

from hpcdist.elastic.parts import part_of
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("dies", ["after unscale_", "in the step"])
def test_a_scaler_whose_step_did_not_end_unscales_again(dies, monkeypatch):
    """The repeated step took gradients 65,536 times too large."""
    model = torch.nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    parts = [part_of(thing, "thing") for thing in (model, sgd, scaler)]

    def step(stop: str) -> None:
        sgd.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if dies == "after unscale_":
            scaler.unscale_(sgd)
            if stop:
                return
        with monkeypatch.context() as patched:
            if stop:
                patched.setattr(sgd, "step", lambda *_: 1 / 0)
            scaler.step(sgd)
        scaler.update()

    before = model.weight.detach().clone()
    step("")
    taken = [part.take() for part in parts]
    if dies == "in the step":
        with pytest.raises(ZeroDivisionError):
            step("stop")
    else:
        step("stop")
    for part, copy in zip(parts, taken, strict=True):
        part.restore(copy)
    step("")
    moved = (before - model.weight).tolist()[0]
    parallel_assert(moved == pytest.approx([2e-3] * 2, rel=1e-3), f"{moved}")
