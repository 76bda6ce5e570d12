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


class Messages(Backend):
    """Takes batches, and perhaps refuses them."""

    def __init__(self, kind: str, begun: list[str], looks: bool) -> None:
        super().__init__(kind)
        self.begun = begun
        if looks:
            self.look_at_batch = self._look

    def _look(self, operations: Any) -> None:
        if any(peer > 5 for _, _, peer, _ in operations):
            raise ValueError(f"no such rank of {self.kind}")

    def batch_isend_irecv(self, operations: Any) -> list[str]:
        self._look(operations)
        self.begun.append(self.kind)
        return [self.kind] * len(operations)


@pytest.mark.parametrize(("looks", "begins"), [(True, []), (False, ["cpu"])])
def test_no_part_of_a_batch_begins_if_another_backend_refuses_its_part(
    looks: bool, begins: list[str]
) -> None:
    begun: list[str] = []
    kinds = ("cpu", "cuda")
    group = Dispatch({kind: Messages(kind, begun, looks) for kind in kinds})
    far = Elsewhere(torch.device("cuda", 0))
    assert group.batch_isend_irecv(
        [(True, far, 1, 0), (False, torch.ones(1), 2, 0), (False, far, 3, 0)]
    ) == ["cuda", "cpu", "cuda"]
    assert begun == ["cpu", "cuda"]
    begun.clear()
    with pytest.raises(ValueError, match="no such rank of cuda"):
        group.batch_isend_irecv([(False, torch.ones(1), 2, 0), (True, far, 9, 0)])
    assert begun == begins
