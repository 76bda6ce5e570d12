"""From one rank to another: tags, any source, batches."""

from __future__ import annotations

import inspect
import struct
import threading
import warnings

import numpy as np
import pytest
import torch
from cases import ring

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

two = pytest.mark.mpi(min_size=2)


@two
@pytest.mark.parametrize("count", [0, 1, 17, 1 << 20])
def test_send_and_receive(count):
    rank, size, before, after = ring()
    data = torch.arange(count, dtype=torch.float32) + rank
    got = torch.full((count,), -1.0)
    # the last rank receives first, so that even sends that wait for their receive get through
    if rank == size - 1:
        sender = dist.recv(got, before)
        result = dist.send(data, after)
    else:
        result = dist.send(data, after)
        sender = dist.recv(got, before)
    parallel_assert(result is None and sender == before, f"send {result}, recv from {sender}")
    parallel_assert(torch.equal(got, torch.arange(count, dtype=torch.float32) + before))


@two
def test_numpy_and_buffers():
    rank, _, before, after = ring()
    data, got = np.full((3, 2), rank, np.int16), np.zeros((3, 2), np.int16)
    works = [dist.irecv(got, before), dist.isend(data, after)]
    raw = bytearray(4)
    works += [dist.irecv(raw, before, tag=1), dist.isend(bytes([rank] * 4), after, tag=1)]
    for work in works:
        work.wait()
    parallel_assert((got == before).all() and raw == bytes([before] * 4), f"{got} {raw!r}")


@two
def test_tags_tell_messages_apart():
    rank, _, before, after = ring()
    sends = [dist.isend(torch.tensor([10 * rank + tag]), after, tag=tag) for tag in (1, 2, 3)]
    got = {tag: torch.zeros(1, dtype=torch.int64) for tag in (3, 1, 2)}
    for tag, tensor in got.items():
        dist.recv(tensor, before, tag=tag)
    for work in sends:
        work.wait()
    parallel_assert({tag: int(t) for tag, t in got.items()} == {t: 10 * before + t for t in got})


@two
def test_messages_of_one_tag_stay_in_order():
    rank, _, before, after = ring()
    sends = [dist.isend(torch.tensor([100 * rank + i]), after, tag=5) for i in range(20)]
    seen = []
    for _ in range(20):
        tensor = torch.zeros(1, dtype=torch.int64)
        dist.recv(tensor, before, tag=5)
        seen.append(int(tensor) - 100 * before)
    for work in sends:
        work.wait()
    parallel_assert(seen == list(range(20)), f"{seen}")


@two
def test_any_source():
    rank, size, *_ = ring()
    if rank == 0:
        seen = {}
        for _ in range(size - 1):
            tensor = torch.zeros(2, dtype=torch.int64)
            sender = dist.recv(tensor, tag=7)
            seen[sender] = tensor.tolist()
        parallel_assert(seen == {r: [r, r * r] for r in range(1, size)}, f"{seen}")
    else:
        dist.send(torch.tensor([rank, rank * rank]), 0, tag=7)
        parallel_assert(True)


@two
def test_any_source_of_a_work():
    rank, size, *_ = ring()
    if rank == 0:
        tensors = [torch.zeros(1, dtype=torch.int64) for _ in range(size - 1)]
        works = [dist.irecv(tensor, tag=8) for tensor in tensors]
        for work in works:
            work.wait()
        sources = [work.source_rank() for work in works]
        parallel_assert(
            sorted(sources) == list(range(1, size)) and [int(t) for t in tensors] == sources,
            f"sources {sources}, data {tensors}",
        )
    else:
        dist.isend(torch.tensor([rank]), 0, tag=8).wait()
        parallel_assert(True)


@two
def test_ranks_of_a_group():
    """dst and src are ranks of the world, group_dst and group_src ranks of the group."""
    rank, size, *_ = ring()
    backwards = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    data, got = torch.tensor([rank]), torch.zeros(1, dtype=torch.int64)
    parallel_assert(dist.get_rank(backwards) == size - 1 - rank)
    # group rank 0 is the last rank of the world
    if rank == size - 1:
        sender = dist.recv(got, group_src=size - 1, group=backwards)
        ok = sender == 0 and int(got) == 0
        dist.send(data, 0, group=backwards)
    elif rank == 0:
        dist.send(data, group_dst=0, group=backwards)
        sender = dist.recv(got, group=backwards)
        ok = sender == size - 1 and int(got) == size - 1
    else:
        ok = True
    parallel_assert(ok, f"got {got}")
    dist.destroy_process_group(backwards)


def test_to_itself():
    rank, *_ = ring()
    got = torch.zeros(3)
    works = [dist.irecv(got, rank), dist.isend(torch.full((3,), 4.0), rank)]
    for work in works:
        work.wait()
    parallel_assert(torch.equal(got, torch.full((3,), 4.0)), f"{got}")


@two
@pytest.mark.parametrize("count", [1, 1 << 18])
@pytest.mark.parametrize("sends_first", [True, False])
def test_batch_ring_cannot_deadlock(count, sends_first):
    """A megabyte is beyond what MPI sends without a receive: sends must not come first."""
    rank, _, before, after = ring()
    got = torch.zeros(count)
    operations = [
        dist.P2POp(dist.isend, torch.full((count,), float(rank)), after),
        dist.P2POp(dist.irecv, got, before),
    ]
    if not sends_first:
        operations.reverse()
    works = dist.batch_isend_irecv(operations)
    parallel_assert(len(works) == 2)
    for work in works:
        work.wait()
    parallel_assert(bool((got == before).all()), f"{got[:3]}")


@two
def test_batch_with_everyone_and_several_messages():
    rank, size, *_ = ring()
    operations, boxes = [], {}
    for other in range(size):
        for tag in (0, 1):
            boxes[other, tag] = torch.full((5,), -1, dtype=torch.int32)
            data = torch.full((5,), 100 * rank + tag, dtype=torch.int32)
            operations.append(dist.P2POp(dist.isend, data, other, tag=tag))
            operations.append(dist.P2POp(dist.irecv, boxes[other, tag], group_peer=other, tag=tag))
    works = dist.batch_isend_irecv(operations)
    for work in reversed(works):
        work.wait()
    wrong = {k: v.tolist() for k, v in boxes.items() if not (v == 100 * k[0] + k[1]).all()}
    parallel_assert(not wrong, f"{wrong}")


@two
def test_batch_keeps_the_order_of_its_list():
    rank, _, before, after = ring()
    boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(6)]
    operations = []
    for i, box in enumerate(boxes):
        operations.append(dist.P2POp(dist.isend, torch.tensor([10 * rank + i]), after))
        operations.append(dist.P2POp(dist.irecv, box, before))
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    parallel_assert([int(box) for box in boxes] == [10 * before + i for i in range(6)], f"{boxes}")
    # the handle at a receive's place is that receive
    parallel_assert(all(works[2 * i + 1].result()[0] is box for i, box in enumerate(boxes)))


def test_batch_refuses():
    rank, size, *_ = ring()
    tensor = torch.zeros(1)
    with parallel_raises(ValueError, match="isend or hpcdist.irecv"):
        dist.P2POp(dist.broadcast, tensor, rank)
    with parallel_raises(TypeError, match="must be a tensor or an array, not list"):
        dist.P2POp(dist.isend, [1.0], rank)
    with parallel_raises(ValueError, match="peer .* must be given"):
        dist.P2POp(dist.isend, tensor)
    with parallel_raises(ValueError, match="not both"):
        dist.P2POp(dist.isend, tensor, rank, group_peer=rank)
    with parallel_raises(ValueError, match=rf"peer={size} .* of size {size}"):
        dist.P2POp(dist.irecv, tensor, size)
    with parallel_raises(ValueError, match="list of hpcdist.P2POp"):
        dist.batch_isend_irecv([dist.isend])
    other = dist.new_group()
    mixed = [
        dist.P2POp(dist.isend, tensor, rank),
        dist.P2POp(dist.irecv, tensor, rank, group=other),
    ]
    with parallel_raises(ValueError, match="one group"):
        dist.batch_isend_irecv(mixed)
    dist.destroy_process_group(other)
    parallel_assert(dist.batch_isend_irecv([]) == [])


def test_p2pop_of_usual_and_other_arguments():
    """The native way and the Python one make the same of a peer."""
    rank, size, _, after = ring()
    tensor, pair = torch.zeros(1), dist.new_group(list(range(size)))
    found = []
    for peer in (after, np.int64(after)):  # only a plain int is usual
        for group in (None, dist.group.WORLD, pair):
            op = dist.P2POp(dist.isend, tensor, peer, group, 3)
            own = group or dist.group.WORLD
            found.append((op.peer, op.group_peer, op.tag) == (after, after, 3) and op.group is own)
            found.append(op.tensor is tensor and op.op is dist.isend)
    by_place = dist.P2POp(dist.irecv, tensor, group=pair, group_peer=rank)
    found.append((by_place.peer, by_place.group_peer, by_place.tag) == (rank, rank, 0))
    parallel_assert(all(found), f"{found}")
    names = list(inspect.signature(dist.P2POp).parameters)
    parallel_assert(names == ["op", "tensor", "peer", "group", "tag", "group_peer"], f"{names}")
    dist.destroy_process_group(pair)


@two
@pytest.mark.parametrize("count", [0, 1, 13, 64, 1024, 2047, 2048, 2049, 4096, 70_000])
def test_batch_of_any_length(count):
    """As a list, which is usual, or a tuple; with a tag that has changed since, and from any."""
    rank, _, before, after = ring()
    for kind in (list, tuple):
        data = np.random.default_rng(rank + count).integers(0, 256, (3, count), dtype=np.uint8)
        boxes = np.full((3, count), 7, np.uint8)
        operations = [dist.P2POp(dist.isend, row, after, tag=i) for i, row in enumerate(data)]
        operations += [dist.P2POp(dist.irecv, row, before) for row in boxes]
        for i, each in enumerate(operations[3:]):
            each.tag = i
        for work in dist.batch_isend_irecv(kind(operations)):
            work.wait()
        sent = np.random.default_rng(before + count).integers(0, 256, (3, count), dtype=np.uint8)
        parallel_assert(np.array_equal(boxes, sent), f"{kind.__name__} of {count}")


@two
@pytest.mark.parametrize("count", [64, 1024, 70_000])
def test_either_message_of_an_exchange_is_waited_for_first(count):
    """The rest of a long receive must come while this thread waits for its send."""
    rank, _, before, after = ring()
    for turn in range(20):
        data, got = torch.full((count,), rank + 10.0 * turn), torch.zeros(count)
        operations = [dist.P2POp(dist.isend, data, after), dist.P2POp(dist.irecv, got, before)]
        works = dist.batch_isend_irecv(operations)
        for work in works if turn % 2 else reversed(works):
            work.wait()
        parallel_assert(bool((got == before + 10.0 * turn).all()), f"{count} in turn {turn}")


def test_batch_sends_nothing_if_one_is_wrong():
    rank, *_ = ring()
    got, data = torch.zeros(2), torch.ones(2)
    operations = [
        dist.P2POp(dist.irecv, got, rank),
        dist.P2POp(dist.isend, data, rank),
        dist.P2POp(dist.isend, torch.ones(4, 2).t(), rank),
    ]
    with parallel_raises(ValueError, match="not C-contiguous"):
        dist.batch_isend_irecv(operations)
    operations[2].tensor, operations[2].tag = data, -1
    with parallel_raises(ValueError, match="tag -1"):
        dist.batch_isend_irecv(operations)
    with parallel_raises(ValueError, match="list of hpcdist.P2POp"):
        dist.batch_isend_irecv([*operations[:2], None])
    for work in dist.batch_isend_irecv(operations[:2]):
        work.wait()  # the first message between them is this one
    parallel_assert(torch.equal(got, data), f"{got}")


def test_p2pop_says_what_it_is():
    rank, *_ = ring()
    text = repr(dist.P2POp(dist.isend, torch.zeros(2, 3), rank, tag=4))
    parallel_assert(
        all(part in text for part in ("isend", f"group_dst={rank}", "tag=4", "float32", "[2, 3]")),
        text,
    )


def test_what_a_message_holds_does_not_matter():
    """Lengths around that of Open MPI's envelope, and bytes as hpcdist writes them there."""
    rank, _, before, after = ring()
    likes = [
        struct.pack("<QQqII", 0x9D8F3A41C7E25B06, 0x5BE0CD19A54FF53A, 17 << 30, 0, 0),
        struct.pack("<qIB", 17 << 30, 0, 0),
        struct.pack("<qIB", -1, 1, 0),
    ]
    rounds = [*likes, *(bytes([n % 251] * n) for n in (*range(41), 2047, 2048, 2049, 4096))]
    wrong = []
    for data in rounds:
        got = bytearray(len(data))
        works = [dist.irecv(got, before, tag=6), dist.isend(data, after, tag=6)]
        for work in works:
            work.wait()
        if bytes(got) != data:
            wrong.append((data, bytes(got)))
    parallel_assert(not wrong, f"{wrong[:3]}")


@two
@pytest.mark.parametrize("sent", [8, 13, 14, 2048, 10_000])
def test_messages_of_another_length(sent):
    rank, _, before, after = ring()
    for expected in (0, 8, 13, 14, 2048, 10_000):
        if expected == sent:
            continue
        work = dist.isend(np.full(sent, 7, np.uint8), after, tag=9)
        got = np.full(expected + 64, 1, np.uint8)
        with parallel_raises(dist.DistMismatchError, match=f"(?s)rank {before} sent.* {expected}"):
            dist.recv(got[:expected], before, tag=9)
        work.wait()
        parallel_assert(bool((got[expected:] == 1).all()), "written past the end")
    dist.barrier()


@two
def test_messages_of_several_threads():
    """Long messages have numbers, and each thread's must be its own."""
    rank, _, before, after = ring()
    wrong = []

    def exchange(tag: int) -> None:
        for number in range(30):
            data = np.full(3000, 1000 * tag + number, np.int64)
            got = np.zeros_like(data)
            works = [dist.irecv(got, before, tag=tag), dist.isend(data, after, tag=tag)]
            for work in works:
                work.wait()
            if not (got == data).all():
                wrong.append((tag, number, got[0]))

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parallel_assert(not wrong, f"{wrong[:3]}")


@two
def test_object_style():
    rank, size, before, after = ring()
    got = torch.zeros(1, dtype=torch.int64)
    works = [
        dist.irecv(got, group_src=before),
        dist.isend(torch.tensor([rank]), group_dst=after),
    ]
    for work in works:
        work.wait()
    parallel_assert(int(got) == before)
    with parallel_raises(ValueError, match="this process itself"):
        dist.send(got, group_dst=rank)
    with parallel_raises(ValueError, match=f"of size {size}"):
        dist.isend(got, group_dst=size)
    sender = None
    if size > 1 and rank == 0:
        dist.send(torch.tensor([5]), group_dst=1, tag=3)
    elif rank == 1:
        sender = dist.recv(got, tag=3)
    parallel_assert(rank != 1 or (sender == 0 and int(got) == 5), f"{got} from {sender}")


@two
def test_outside_the_group_nothing_happens():
    rank = dist.get_rank()
    group = dist.new_group([0])
    tensor = torch.full((1,), 3.0)
    results, said = [], []
    if rank != 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(dist.isend(tensor, 0, group=group))
            results.append(dist.irecv(tensor, 0, group=group))
            results.append(dist.send(tensor, 0, group=group))
            results.append(dist.recv(tensor, 0, group=group))
            results.append(dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 0, group=group)]))
        said = [str(each.message).split()[0] for each in caught]
        where = {each.filename for each in caught}
    parallel_assert(rank == 0 or results == [None, None, None, -1, []], f"{results}")
    parallel_assert(rank == 0 or said == ["isend", "irecv", "send", "recv", "isend"], f"{said}")
    parallel_assert(rank == 0 or __file__ in where, "the warning does not point at its caller")
    parallel_assert(float(tensor) == 3.0)
    dist.destroy_process_group(group)
