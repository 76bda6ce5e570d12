"""Messages that are refused, do not fit, or do not arrive."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from cases import ring

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

two = pytest.mark.mpi(min_size=2)


def test_refuses_itself():
    rank, *_ = ring()
    for call in (dist.send, dist.recv):
        with parallel_raises(ValueError, match="this process itself"):
            call(torch.zeros(1), rank)
    with parallel_raises(ValueError, match="this process itself"):
        dist.send(torch.zeros(1), group_dst=rank)


@pytest.mark.parametrize("call", [dist.send, dist.isend, dist.recv, dist.irecv])
def test_refuses_ranks_outside(call):
    size = dist.get_world_size()
    what = "dst" if call in (dist.send, dist.isend) else "src"
    with parallel_raises(ValueError, match=rf"{what}={size} .* of size {size}"):
        call(torch.zeros(1), size)
    with parallel_raises(ValueError, match=rf"{what}=-1 .* of size {size}"):
        call(torch.zeros(1), -1)
    with parallel_raises(ValueError, match=rf"group_{what}={size} .* of size {size}"):
        call(torch.zeros(1), **{f"group_{what}": size})
    with parallel_raises(ValueError, match="not both"):
        call(torch.zeros(1), 0, **{f"group_{what}": 0})


def test_send_needs_a_destination():
    with parallel_raises(ValueError, match="dst .* or group_dst must be given"):
        dist.send(torch.zeros(1))
    with parallel_raises(ValueError, match="dst .* or group_dst must be given"):
        dist.isend(torch.zeros(1))


@two
def test_refuses_what_cannot_be_sent():
    _, _, before, after = ring()
    with parallel_raises(TypeError):
        dist.send("text", after)
    with parallel_raises(ValueError, match="(?i)dense|contiguous"):
        dist.send(torch.zeros(4, 4)[:, ::2], after)
    with parallel_raises(ValueError, match="tag"):
        dist.isend(torch.zeros(1), after, tag=-1)
    with parallel_raises((TypeError, ValueError)):
        dist.irecv(torch.zeros(1, device="meta"), before)


@two
def test_the_order_of_elements_must_be_known():
    """A message has no strides: a transposed tensor would arrive permuted."""
    *_, before, after = ring()
    for tensor in (torch.zeros(2, 3).t(), np.zeros((2, 3), np.float32).T):
        for call, other in ((dist.send, after), (dist.isend, after)):
            with parallel_raises(ValueError, match=r"not C-contiguous.*send tensor\.contiguous"):
                call(tensor, other)
        for call, other in ((dist.recv, before), (dist.irecv, before)):
            with parallel_raises(ValueError, match="not C-contiguous.*receive into a contiguous"):
                call(tensor, other)
    # one row or one column: there is but one order
    got = torch.zeros(1, 3).t()
    works = [dist.irecv(got, before), dist.isend(torch.arange(3.0).reshape(1, 3).t(), after)]
    for work in works:
        work.wait()
    parallel_assert(got.flatten().tolist() == [0, 1, 2], f"{got}")


@two
def test_another_size_is_an_error_for_the_receiver():
    rank, _, before, after = ring()
    work = dist.isend(torch.ones(3), after, tag=9)
    got = torch.zeros(5)
    with parallel_raises(dist.DistMismatchError, match="3"):
        dist.recv(got, before, tag=9)
    work.wait()
    dist.barrier()


@two
def test_timeout_of_a_receive_leaves_the_group_usable():
    rank, _, before, after = ring()
    work = dist.irecv(torch.zeros(1), before, tag=11)
    with parallel_raises(dist.DistTimeoutError):
        work.wait(timedelta(seconds=0.1))
    dist.isend(torch.ones(1), after, tag=11).wait()
    parallel_assert(work.wait() is True and work.is_completed())


@pytest.mark.parametrize("count", [2, 130])
@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_a_batch_whose_tensors_share_memory_is_refused(count, make):
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    memory = make(8 * count)

    def batch(kinds, places):
        tensors = [memory[at : at + 8] for at in places]
        return [
            dist.P2POp(kind, each, after if kind is dist.isend else before)
            for kind, each in zip(kinds, tensors, strict=True)
        ]

    apart = [8 * i for i in range(count)]
    for places, kinds, match in (
        ([*apart[1:], apart[-1] - 3], [dist.irecv] * count, "both are written to"),
        ([apart[0], *apart[:-1]], [dist.irecv] * count, "both are written to"),
        ([0, *apart[:-1]], [dist.isend] + [dist.irecv] * (count - 1), "before it has been read"),
        ([*apart[1:], 9], [dist.irecv] * (count - 1) + [dist.isend], "before it has been read"),
    ):
        with parallel_raises(ValueError, match=match):
            dist.batch_isend_irecv(batch(kinds, places))
    # the same memory may be sent twice, and neighbours may be received into
    half = count // 2
    sent, got = make(4) + rank, [memory[at : at + 4] for at in apart[: 2 * half]]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, each, before) for each in reversed(got)]
        + [dist.P2POp(dist.isend, sent, after) for _ in got]
        + [dist.P2POp(dist.irecv, memory[:0], before), dist.P2POp(dist.isend, memory[:0], after)]
    )
    for work in works:
        work.wait()
    parallel_assert(all((each == before).all() for each in got))
