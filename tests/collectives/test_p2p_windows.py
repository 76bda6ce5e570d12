"""Many messages at once: windows, batches, handles that are used again."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from breaking import interrupting
from cases import ring
from patience import hasty_group

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

two = pytest.mark.mpi(min_size=2)

#: Bytes: about an envelope, about what MPI sends at once, and long.
LENGTHS = (0, 1, 12, 13, 14, 127, 2047, 2048, 2049, 4095, 4096, 4097, 70_000, 1 << 20)


def content(length: int, number: int) -> Any:
    """Return what the message of that number has."""
    return (np.arange(length, dtype=np.int64) * 7 + number).astype(np.uint8)


def test_windows_of_mixed_lengths() -> None:
    """Posted in one order, sent in another, waited for in a third; and again in old memory."""
    *_, before, after = ring()
    wrong = []
    for turn in range(4):
        numbers = list(range(len(LENGTHS)))
        boxes = [np.zeros(n, np.uint8) for n in LENGTHS]
        receives = [dist.irecv(boxes[i], before, tag=i) for i in numbers[::-1]]
        sends = [dist.isend(content(LENGTHS[i], i + turn), after, tag=i) for i in numbers]
        if turn % 2:
            del sends  # the messages go on
        for work in receives[turn:] + receives[:turn]:
            work.wait()
        wrong += [
            (turn, LENGTHS[i])
            for i in numbers
            if not (boxes[i] == content(LENGTHS[i], i + turn)).all()
        ]
    parallel_assert(not wrong, f"{wrong}")


@pytest.mark.parametrize("together", [False, True], ids=["calls", "batch"])
def test_lengths_of_one_tag_stay_in_order(together: bool) -> None:
    """A message that goes in two does not overtake a short one, nor the other way round."""
    *_, before, after = ring()
    lengths = [n for pair in zip(LENGTHS, LENGTHS[::-1], strict=True) for n in pair]
    boxes = [np.zeros(n, np.uint8) for n in lengths]
    data = [content(n, i) for i, n in enumerate(lengths)]
    if together:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, each, after, tag=3) for each in data]
            + [dist.P2POp(dist.irecv, box, before, tag=3) for box in boxes]
        )
    else:
        works = [dist.irecv(box, before, tag=3) for box in boxes]
        works += [dist.isend(each, after, tag=3) for each in data]
    for work in works:
        work.wait()
    wrong = [n for box, each, n in zip(boxes, data, lengths, strict=True) if (box != each).any()]
    parallel_assert(not wrong, f"{wrong}")


def test_a_batch_that_is_refused_posts_nothing() -> None:
    rank, size, before, after = ring()
    got, untouched = torch.zeros(3), torch.full((3,), -1.0)
    good = [
        dist.P2POp(dist.irecv, untouched, before, tag=4),
        dist.P2POp(dist.isend, torch.full((3,), 1.0), after, tag=4),
    ]
    bad = {
        "not C-contiguous": dist.P2POp(dist.isend, torch.zeros(2, 3).t(), after, tag=4),
        "receive into a contiguous": dist.P2POp(dist.irecv, torch.zeros(2, 3).t(), before),
        "tag -1": dist.P2POp(dist.isend, torch.zeros(1), after, tag=-1),
    }
    for why, part in bad.items():
        with parallel_raises(ValueError, match=why):
            dist.batch_isend_irecv([*good, part])
    works = [dist.irecv(got, before, tag=4), dist.isend(torch.full((3,), 2.0), after, tag=4)]
    for work in works:
        work.wait()
    parallel_assert(bool((got == 2).all() and (untouched == -1).all()), f"{got}, {untouched}")
    with parallel_raises(TypeError):
        dist.batch_isend_irecv([*good, dist.P2POp(dist.isend, object(), after)])
    dist.barrier()


@two
def test_a_batch_says_which_message_does_not_fit() -> None:
    *_, before, after = ring()
    box = np.full(8 + 64, 1, np.uint8)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, box[:8], before, tag=1),
            dist.P2POp(dist.irecv, box[8:16], before, tag=2),
            dist.P2POp(dist.isend, content(5000, 0), after, tag=1),
            dist.P2POp(dist.isend, content(8, 5), after, tag=2),
        ]
    )
    with parallel_raises(dist.DistMismatchError, match=f"rank {before} sent"):
        works[0].wait()
    for work in works[1:]:
        work.wait()
    parallel_assert(bool((box[8:16] == content(8, 5)).all() and (box[16:] == 1).all()), f"{box}")


def test_futures_of_messages() -> None:
    """Each is completed once, whoever ends the message: the caller, the poller, or neither yet."""
    *_, before, after = ring()
    wrong = []
    for turn in range(60):
        length = LENGTHS[turn % len(LENGTHS)]
        box = np.zeros(length, np.uint8)
        receive = dist.irecv(box, before, tag=5)
        future = receive.get_future()
        send = dist.isend(content(length, turn), after, tag=5)
        sent = send.get_future()
        if turn % 2:
            receive.wait()
        values = future.wait(), sent.wait()
        if values[0][0] is not box or not (box == content(length, turn)).all():
            wrong.append(turn)
    parallel_assert(not wrong, f"{wrong}")


@two
def test_a_receive_that_nobody_waits_for_times_out() -> None:
    group = hasty_group(0.3)
    *_, before, _ = ring()
    work = dist.irecv(np.zeros(3), before, group=group, tag=6)
    for _ in range(6000):
        if work.is_completed():
            break
        time.sleep(0.01)
    error = work.exception()
    parallel_assert(isinstance(error, dist.DistTimeoutError), f"{error!r}")
    dist.destroy_process_group(group)


@two
def test_waits_that_a_handler_breaks_can_be_repeated() -> None:
    """The messages arrive whole, in whatever instruction of the wait the handler raises."""
    *_, before, after = ring()
    wrong, broken = [], 0
    with interrupting() as interrupted:
        for turn in range(30):
            boxes = [np.zeros(n, np.uint8) for n in LENGTHS]
            works = [dist.irecv(box, before, tag=7) for box in boxes]
            works += [dist.isend(content(n, turn), after, tag=7) for n in LENGTHS]
            left = list(works)
            while left:
                if interrupted(left[-1].wait, 0.0002 + turn * 1e-5):
                    broken += 1
                else:
                    left.pop()
            wrong += [
                turn for b, n in zip(boxes, LENGTHS, strict=True) if (b != content(n, turn)).any()
            ]
    parallel_assert(not wrong, f"{wrong}, {broken} waits were broken")
