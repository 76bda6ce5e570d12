"""Each operation of a group of several backends goes to the one that serves its tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpcdist.backends.dispatch import Dispatch, combine

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


class Backend:
    """Says which one it is."""

    name = "world"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.timeout = 1.0

    def all_reduce(self, tensor: Any, *args: Any, **about: Any) -> Any:
        return self.kind, args, about

    def all_gather(self, outputs: Any, tensor: Any) -> str:
        return self.kind


class Elsewhere:
    """Something on a device."""

    def __init__(self, device: Any) -> None:
        self.device = device


class Unhashable:
    """A device that cannot be a key."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: str) -> None:
        self.type = kind


@pytest.fixture
def both() -> Dispatch:
    return Dispatch({"cpu": Backend("cpu"), "cuda": Backend("cuda")})


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(1), "cpu"),
        (np.ones(1), "cpu"),
        (bytearray(4), "cpu"),
        (Elsewhere(None), "cpu"),
        (Elsewhere(torch.device("cuda", 0)), "cuda"),
        (Elsewhere(torch.device("cuda", 7)), "cuda"),
        (Elsewhere(Unhashable("cuda")), "cuda"),
        ([[torch.ones(1)], [torch.ones(1)]], "cpu"),
        ([Elsewhere(torch.device("cuda", 1))], "cuda"),
        ([], "cpu"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_goes_where_the_tensor_is(both: Dispatch, tensor: Any, kind: str) -> None:
    for _ in range(3):  # the first time it is looked up, then remembered
        assert both.all_reduce(tensor, "SUM", async_op=True) == (kind, ("SUM",), {"async_op": True})
        assert both.all_gather([], tensor) == kind


def test_a_device_without_a_backend_is_refused_each_time(both: Dispatch) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="on 'xpu', and the group 'world' serves cpu"):
            both.all_reduce(Elsewhere(torch.device("xpu", 0)))
    assert both.all_reduce(torch.ones(1))[0] == "cpu"


def test_one_backend_stands_for_itself() -> None:
    backend = Backend("cuda")
    assert combine({"cpu": backend, "cuda": backend}) is backend
    assert isinstance(combine({"cpu": Backend("cpu"), "cuda": backend}), Dispatch)
