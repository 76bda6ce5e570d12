"""The flight recorder: every operation with its line, state and times, as others read it."""

from __future__ import annotations

import os
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import here
from worlds import between_nodes

import hpcdist as dist
from hpcdist import _engine
from hpcdist.recordings import Operation, Recording, find, folder_of_user, read
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

#: Bytes for names, groups and lines: HD_REC_LOG in the engine.
ROOM = 256 << 10
#: How often each rank reads its recorder while operations are noted.
READS = 20


def recorded() -> Recording:
    return read(_engine.recorder_path())


def last(n: int) -> list[Operation]:
    return recorded().operations[-n:]


def failed() -> list[Operation]:
    return [one for one in recorded().operations if one.state == "failed"]


def test_the_process_and_its_group():
    rank, size = here()
    dist.barrier()
    one = recorded()
    parallel_assert((one.rank, one.size, one.pid) == (rank, size, os.getpid()))
    parallel_assert(one.alive and not one.left and "pytest" in one.program)
    parallel_assert(abs(one.seen / 1e9 - time.time()) < 5)
    world = one.operations[-1].group
    parallel_assert(world in one.groups)
    parallel_assert((world.name, world.rank, world.ranks) == ("world", rank, tuple(range(size))))
    status = os.stat(_engine.recorder_path())
    parallel_assert(status.st_mode & 0o777 == 0o600 and status.st_uid == os.geteuid())
    parallel_assert(folder_of_user().stat().st_mode & 0o777 == 0o700)
    jobs: list[str] = [""] * size
    dist.all_gather_object(jobs, one.job)
    parallel_assert(len(set(jobs)) == 1)
    parallel_assert(Path(_engine.recorder_path()) in find(folder_of_user()))


def test_operations_are_noted_in_order():
    rank, size = here()
    before = time.time_ns()
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(2, 5, dtype=torch.float64), src=size - 1)
    dist.barrier()
    dist.all_gather_into_tensor(torch.empty(4 * size), torch.ones(4))
    dist.all_reduce(torch.ones(100_000))
    dist.all_reduce(np.ones(7, np.int16), async_op=True).wait()
    after = time.time_ns()
    maximum, cast, barrier, gathered, much, later = last(6)
    parallel_assert((maximum.name, maximum.kind, maximum.op) == ("all_reduce", "all_reduce", "MAX"))
    parallel_assert((maximum.dtype, maximum.shape, maximum.bytes) == ("float32", (3,), 12))
    parallel_assert((cast.name, cast.peer, cast.op) == ("broadcast", size - 1, ""))
    parallel_assert((cast.dtype, cast.shape, cast.bytes) == ("float64", (2, 5), 80))
    parallel_assert((barrier.name, barrier.dtype, barrier.bytes) == ("barrier", "", 0))
    parallel_assert((gathered.inputs, gathered.outputs) == (4, 4 * size))
    parallel_assert((later.dtype, later.shape, later.queued) == ("int16", (7,), True))
    parallel_assert(not maximum.queued and later.started is not None)
    numbers = [one.seq for one in (maximum, cast, barrier, gathered, much, later)]
    parallel_assert(numbers == list(range(numbers[0], numbers[0] + 6)))
    for one in (maximum, cast, barrier, gathered, much, later):
        parallel_assert(one.state == "done" and one.finished and not one.failure)
        parallel_assert(
            one.site is not None and one.site.function == "test_operations_are_noted_in_order"
        )
        parallel_assert(one.site is not None and one.site.file == __file__)
        parallel_assert(before - 1_000_000 < one.called < after + 1_000_000)
        if one.ended is not None:
            parallel_assert(one.called <= one.ended < after + 1_000_000)
        else:
            parallel_assert(one in (maximum, cast, barrier, gathered) or size == 1)
    lines = [one.site.line for one in (maximum, cast, barrier, gathered, much, later) if one.site]
    parallel_assert(lines == list(range(lines[0], lines[0] + 6)))
    parallel_assert(size == 1 or much.agreed is not None)
    parallel_assert(size == 1 or much.called <= (much.agreed or 0) <= (much.ended or 0))


def test_short_calls_between_nodes_have_times():
    group = between_nodes()
    dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
    dist.barrier(group)
    summed, later, barrier = last(3)
    dist.destroy_process_group(group)
    if dist.get_world_size() == 1:
        return
    for one in (summed, later, barrier):
        parallel_assert(one.ended is not None and one.called <= one.ended, f"{one}")
    parallel_assert(later.agreed is not None and later.agreed <= later.ended, f"{later}")


def test_calls_from_many_depths_have_their_own_lines():
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        else:
            dist.barrier()

    for n in (0, 3, 0, 30, 3):
        deep(n)
    lines = {one.site for one in last(5)}
    parallel_assert(
        len(lines) == 1 and {one.site.function for one in last(5) if one.site} == {"deep"}
    )
    made = [
        compile(f"def f():\n{chr(10) * n}    dist.barrier()", f"made{n}.py", "exec")
        for n in range(40)
    ]
    for code in made:
        names = {"dist": dist}
        exec(code, names)
        names["f"]()  # type: ignore[operator]
        del names
    found = [(one.site.file, one.site.line) for one in last(40) if one.site]
    parallel_assert(found == [(f"made{n}.py", n + 2) for n in range(40)])


def test_more_lines_than_there_is_room_for():
    """Two tables full: the log drops lines that the ring has lost, and the table starts anew."""
    rank, size = here()

    def called() -> None:
        dist.barrier()

    for turn in range(2):
        first = 10_000 * turn + 1
        for line in range(first, first + 4_000):
            code = called.__code__.replace(co_firstlineno=line)
            types.FunctionType(code, called.__globals__)()
        dist.barrier()
        lines = [one.site.line for one in last(500)[:-1] if one.site]
        parallel_assert(lines == list(range(first + 3_502, first + 4_001)))
        parallel_assert(last(1)[0].site is not None and last(1)[0].site.file == __file__)
    parallel_assert(all(one.site for one in recorded().operations))
    group = dist.new_group()
    dist.barrier(group)
    parallel_assert(last(1)[0].group is not None and last(1)[0].site is not None)
    if size > 1:
        with parallel_raises(dist.DistMismatchError, match="test_read.py"):
            dist.all_reduce(torch.ones(2 + rank))


@pytest.mark.mpi(min_size=2)
def test_messages():
    rank, size = here()
    if rank == 0:
        dist.send(torch.ones(4), 1, tag=7)
        dist.isend(torch.ones(2, 2), 1, tag=8).wait()
    elif rank == 1:
        dist.recv(torch.ones(4), 0, tag=7)
        dist.recv(torch.ones(4), tag=8)
    dist.barrier()
    one, two, _ = last(3)
    kind = ["send", "recv"][min(rank, 1)]
    parallel_assert(rank > 1 or (one.kind, one.peer, one.tag) == (kind, 1 - rank, 7))
    # from any rank: noted is the sender
    parallel_assert(rank > 1 or (two.kind, two.peer, two.tag) == (kind, 1 - rank, 8))
    parallel_assert(rank > 1 or (one.message and one.state == two.state == "done"))
    parallel_assert(rank > 1 or (one.site is not None and one.bytes == 16))


@pytest.mark.mpi(min_size=2)
def test_operations_that_fail():
    rank, _ = here()
    with parallel_raises(dist.DistMismatchError):
        dist.all_reduce(torch.ones(2 + rank))
    one = failed()[-1]
    parallel_assert((one.state, one.failure, one.ended is not None) == ("failed", "mismatch", True))
    with parallel_raises((dist.DistMismatchError, ValueError)):
        dist.all_reduce(torch.ones(4)[::2] if rank == 0 else torch.ones(2))
    other = failed()[-1]
    parallel_assert(other.number > one.number and other.failure == "mismatch")


def test_the_ring_wraps_and_a_reader_meanwhile_sees_whole_records():
    """Another thread reads while operations are noted; each record that it sees is one of them."""
    seen: list[list[Operation]] = []
    stop = threading.Event()

    def reader() -> None:
        while not stop.is_set():
            seen.append(recorded().operations[::50])
            time.sleep(0.01)

    one = torch.ones(11)
    for _ in range(1100):  # from here on each operation takes the place of another one
        dist.all_reduce(one, dist.ReduceOp.MIN)
    thread = threading.Thread(target=reader)
    thread.start()
    try:
        while one[0] <= READS:  # on all ranks
            dist.all_reduce(one.fill_(len(seen)), dist.ReduceOp.MIN)
    finally:
        stop.set()
        thread.join()
    now = recorded().operations
    parallel_assert(len(now) in (1023, 1024))
    numbers = [each.number for each in now]
    parallel_assert(numbers == list(range(numbers[0], numbers[0] + len(numbers))))
    mine = {each.number: each for each in now}
    good = [one for each in seen for one in each if one.shape == (11,)]
    parallel_assert(len(good) > 10 * READS)
    parallel_assert(all(each.dtype == "float32" and each.op == "MIN" for each in good))
    parallel_assert(all(mine[each.number].seq == each.seq for each in good if each.number in mine))


@pytest.mark.once
def test_freed_groups_leave_room_for_others():
    """Their names are longer than all the room for names; the lines and the world stay."""
    rank, size = here()
    dist.barrier()
    before = last(1)[0]

    def make(number: int) -> str:
        """Alone: a recorder is a process's own. Names of groups have at most 63 bytes."""
        name = f"{number}".ljust(60, "-")
        dist.group.WORLD.carrier.create_group([rank], name, 20.0).free()
        return name

    first = make(0)
    parallel_assert(first in {one.name for one in recorded().groups})
    for number in range(1, ROOM // 60 + 1):
        make(number)
    parallel_assert(first not in {one.name for one in recorded().groups})
    group = dist.new_group()
    dist.barrier(group)
    one = last(1)[0]
    parallel_assert(one.group is not None and one.group.ranks == tuple(range(size)))
    parallel_assert(one.group.name != "world" and one.site is not None)
    dist.barrier()
    other = last(1)[0]
    parallel_assert(other.group == before.group and other.site is not None)


def test_a_copy(tmp_path):
    dist.barrier()
    path = tmp_path / "copy"
    parallel_assert(_engine.dump_recorder(path))
    one = read(path)
    parallel_assert(not one.alive and one.operations[-1].name == "barrier")
    parallel_assert(path.stat().st_mode & 0o777 == 0o600)
    parallel_assert(not _engine.dump_recorder())  # no folder is named
    with parallel_raises(OSError):
        _engine.dump_recorder(tmp_path / "none" / "copy")


def test_what_is_no_recorder_is_refused(tmp_path):
    whole = Path(_engine.recorder_path()).read_bytes()
    other, ranks = bytearray(whole), bytearray(whole)
    other[8] += 1
    ranks[44:48] = (1 << 30).to_bytes(4, "little")
    for name, data in {
        "empty": b"",
        "text": b"hello" * 100,
        "cut": whole[:5000],
        "other": other,
        "ranks": ranks,
    }.items():
        (tmp_path / name).write_bytes(data)
        with parallel_raises(ValueError):
            read(tmp_path / name)
    parallel_assert(sorted(path.name for path in find(tmp_path)) == ["cut", "other", "ranks"])


@pytest.mark.once
def test_damaged_files_never_crash_the_reader(rng, tmp_path):
    """The ranks deal the rounds among themselves."""
    rank, size = here()
    whole = np.frombuffer(Path(_engine.recorder_path()).read_bytes(), np.uint8)
    head = 4096 + 2048
    for round_ in range(60):
        places, values = rng.integers(12, head, 20), rng.integers(0, 256, 20)
        if round_ % size != rank:
            continue
        data = whole.copy()
        data[places] = values
        (tmp_path / "damaged").write_bytes(data.tobytes())
        try:
            read(tmp_path / "damaged", (None, 7)[round_ % 2])
        except (ValueError, OverflowError, MemoryError):
            pass
    parallel_assert(True)


def test_the_form_of_torchfrtrace(tmp_path):
    import pickle

    from hpcdist.recordings import as_frtrace

    _, size = here()
    dist.all_reduce(torch.ones(2, 3))
    dump = as_frtrace(recorded())
    last_one = dump["entries"][-1]
    parallel_assert(last_one["profiling_name"] == "gloo:all_reduce" and last_one["retired"])
    parallel_assert(last_one["input_sizes"] == [[2, 3]] == last_one["output_sizes"])
    parallel_assert(last_one["frames"][0]["filename"] == __file__)
    parallel_assert(dump["pg_config"]["world"]["ranks"] == str(list(range(size))))
    parallel_assert(pickle.loads(pickle.dumps(dump)) == dump)


def test_the_newest_operations_alone():
    for _ in range(20):
        dist.barrier()
    whole = read(_engine.recorder_path())
    some = read(_engine.recorder_path(), newest=5)
    parallel_assert(
        [str(one) for one in some.operations] == [str(o) for o in whole.operations[-5:]]
    )
    parallel_assert(some.groups == whole.groups and some.rank == whole.rank)
    parallel_assert(len(read(_engine.recorder_path(), 10_000).operations) == len(whole.operations))
