"""Batches of messages that cannot be begun: nothing of them stays behind; and derived P2POps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases import ring

import hpcdist as dist
from hpcdist import profiler_events
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

TAG = 9


class Interrupted(BaseException):
    """Of a signal handler, for example."""


class Third:
    """Calls a function, and raises at its third call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        result = self.function(*args)
        if self.calls == 3:
            raise Interrupted
        return result


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    made = dist.new_group(timeout=timedelta(seconds=10))
    yield made
    dist.destroy_process_group(made)


def receives(group: dist.ProcessGroup, count: int = 4) -> tuple[list[torch.Tensor], list[Any]]:
    """Tensors, and operations that receive into them."""
    _, _, before, _ = ring()
    tensors = [torch.full((3,), -1.0) for _ in range(count)]
    return tensors, [dist.P2POp(dist.irecv, each, before, group, TAG) for each in tensors]


def nothing_is_posted(group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> None:
    """The next messages are received by the next receives."""
    rank, _, before, after = ring()
    for number in range(len(tensors)):
        work = dist.isend(torch.full((3,), 10.0 * rank + number), after, group, TAG)
        got = torch.zeros(3)
        dist.recv(got, before, group, TAG)
        work.wait()
        parallel_assert(bool((got == 10.0 * before + number).all()), lambda got=got: f"{got}")
    parallel_assert(all(bool((each == -1).all()) for each in tensors), lambda: f"{tensors}")


@pytest.mark.parametrize("place", ["begin_own", "end"])
def test_a_batch_that_is_interrupted_receives_nothing(
    place: str, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch's profiler Python code runs between the messages, and signal handlers with it."""
    tensors, batch = receives(group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        dist.barrier(group)
        monkeypatch.setattr(profiler_events, place, Third(getattr(profiler_events, place)))
        with parallel_raises(Interrupted):
            dist.batch_isend_irecv(batch)
        monkeypatch.undo()
    nothing_is_posted(group, tensors)


def test_a_hook_that_raises_after_a_batch_leaves_no_receive(group: dist.ProcessGroup) -> None:
    tensors, batch = receives(group)
    group.register_post_hook(0, Third(lambda _seen: None))
    with parallel_raises(Interrupted):
        dist.batch_isend_irecv(batch)
    group.unregister_post_hook(0)
    nothing_is_posted(group, tensors)


class Made(dist.P2POp):
    """Its tensor and tag are computed, as when a buffer is taken at the last moment."""

    reads = 0

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        self.reads += 1
        return torch.full((3,), 4.0 + dist.get_rank())

    @property
    def tag(self) -> int:  # type: ignore[override]
        return TAG + 1


def test_properties_of_derived_operations_are_read(group: dist.ProcessGroup) -> None:
    _, _, before, after = ring()
    one = Made(dist.isend, torch.zeros(3), after, group, TAG)
    got = torch.zeros(3)
    batch = [one, dist.P2POp(dist.irecv, got, before, group, TAG + 1)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    parallel_assert(bool((got == 4.0 + before).all()) and one.reads == 1, lambda: f"{got}")


class Bad(dist.P2POp):
    """It has no tensor, or it is no operation."""

    @property
    def op(self) -> Any:  # type: ignore[override]
        return dist.all_reduce


class Without(dist.P2POp):
    @property
    def tensor(self) -> Any:  # type: ignore[override]
        raise Interrupted


@pytest.mark.parametrize(("kind", "error"), [(Bad, ValueError), (Without, Interrupted)])
def test_a_bad_derived_operation_is_refused_before_anything_is_posted(
    kind: type[dist.P2POp], error: type[BaseException], group: dist.ProcessGroup
) -> None:
    _, _, _, after = ring()
    tensors, batch = receives(group)
    batch.append(kind(dist.isend, torch.zeros(3), after, group, TAG))
    with parallel_raises(error):
        dist.batch_isend_irecv(batch)
    nothing_is_posted(group, tensors)
