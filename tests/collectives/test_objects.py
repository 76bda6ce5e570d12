"""Object collectives: what arrives, everywhere and in groups."""

import os
import signal
import warnings

import pytest
import torch
from cases import Check, here
from object_cases import Unknown, arrays, equal, objects

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


def test_broadcast_object_list():
    check, (rank, size) = Check(), here()
    for root in range(size):
        want = [*objects(root), arrays(root)]
        held = [*objects(root), arrays(root)] if rank == root else [Unknown()] * len(want)
        before = list(held)
        assert dist.broadcast_object_list(held, root, device=torch.device("cpu")) is None
        check.that(equal(held, want), f"from {root}: {held}")
        if rank == root:
            check.that(all(a is b for a, b in zip(held, before, strict=True)), "the root's own")
    empty: list = []
    dist.broadcast_object_list(empty)
    check.that(empty == [], "an empty list")
    held = [rank]
    dist.broadcast_object_list(held, group_src=size - 1, device="cpu")
    check.that(held == [size - 1], "group_src")
    check.done()


def test_shared_objects_stay_shared():
    rank, size = here()
    inner = [0]
    held = [inner, {"x": inner}] if rank == 0 else [None, None]
    dist.broadcast_object_list(held)
    parallel_assert(held[0] is held[1]["x"])


def test_all_gather_object():
    check, (rank, size) = Check(), here()
    for number in range(len(objects(0))):
        held = [None] * size
        dist.all_gather_object(held, objects(rank)[number])
        want = [objects(r)[number] for r in range(size)]
        check.that(equal(held, want), f"object {number}: {held}")
    held = [None] * size
    dist.all_gather_object(held, arrays(rank))
    check.that(equal(held, [arrays(r) for r in range(size)]), "arrays")
    # what arrives is a copy also on the rank it came from
    mine = {"a": [rank]}
    held = [None] * size
    dist.all_gather_object(held, mine)
    check.that(held[rank] == mine and held[rank] is not mine, "a copy")
    # a list longer than the group keeps its tail
    held = ["tail"] * (size + 2)
    dist.all_gather_object(held, rank)
    check.that(held == [*range(size), "tail", "tail"], f"longer: {held}")
    check.done()


def test_gather_object():
    check, (rank, size) = Check(), here()
    for root in range(size):
        for number in range(len(objects(0))):
            held = [None] * size if rank == root else None
            dist.gather_object(objects(rank)[number], held, dst=root)
            want = [objects(r)[number] for r in range(size)] if rank == root else None
            check.that(equal(held, want), f"object {number} to {root}: {held}")
    held = [None] * size if rank == 0 else None
    dist.gather_object(arrays(rank), held)
    want = [arrays(r) for r in range(size)] if rank == 0 else None
    check.that(equal(held, want), "arrays, by default to 0")
    held = [None] * size if rank == size - 1 else None
    dist.gather_object(rank, held, group_dst=size - 1)
    check.that(held is None or held == list(range(size)), "group_dst")
    check.done()


def test_scatter_object_list():
    check, (rank, size) = Check(), here()
    for root in range(size):
        for number in range(len(objects(0))):
            inputs = [objects(r)[number] for r in range(size)] if rank == root else None
            held = [None, "kept"]
            dist.scatter_object_list(held, inputs, root)
            want = [objects(rank)[number], "kept"]
            check.that(equal(held, want), f"{number} from {root}: {held}")
    held = [None]
    # a list off the source is not looked at
    dist.scatter_object_list(held, [arrays(r) for r in range(size)] if rank == 0 else [Unknown()])
    check.that(equal(held, [arrays(rank)]), "arrays, by default from 0")
    inputs = list(range(size)) if rank == size - 1 else None
    dist.scatter_object_list(held, inputs, group_src=size - 1)
    check.that(held == [rank], "group_src")
    check.done()


def test_send_and_receive():
    check, (rank, size) = Check(), here()
    if size == 1:
        with pytest.raises(ValueError):
            dist.send_object_list([1], 0)
        return
    peer, source = (rank + 1) % size, (rank - 1) % size
    count = len(objects(0)) + 1
    for use_batch in (False, True):
        # even ranks send first, the others receive first; with odd sizes one pair meets later
        for turn in (0, 1):
            if rank % 2 == turn:
                dist.send_object_list([*objects(rank), arrays(rank)], peer, use_batch=use_batch)
            if source % 2 == turn:
                held = [None] * count
                got = dist.recv_object_list(held, source, use_batch=use_batch)
                check.that(got == source, f"sender {got}")
                check.that(equal(held, [*objects(source), arrays(source)]), f"{held}")
    # any source
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            held = [None]
            got = dist.recv_object_list(held)
            check.that(held == [{"from": got}], f"any source: {held} from {got}")
            senders.add(got)
        check.that(senders == set(range(1, size)), f"senders {senders}")
    else:
        dist.send_object_list([{"from": rank}], group_dst=0, device="cpu")
    check.done()


def test_messages_of_objects_and_tensors_do_not_meet():
    """A tensor that is sent first is not taken for an object's header."""
    check, (rank, size) = Check(), here()
    if size > 1 and rank == 0:
        dist.isend(torch.tensor([7, 8]), 1)
        dist.send_object_list(["x"], 1)
    if size > 1 and rank == 1:
        held = [None]
        dist.recv_object_list(held, 0)
        tensor = torch.zeros(2, dtype=torch.int64)
        dist.recv(tensor, 0)
        check.that(held == ["x"] and tensor.tolist() == [7, 8], f"{held} {tensor}")
    check.done()


def test_in_groups():
    """Ranks of the world and of the group, in a group in reverse order."""
    check, (rank, size) = Check(), here()
    members = list(range(size))[::-1]
    group = dist.new_group(members, sort_ranks=False)
    order = dist.get_process_group_ranks(group)
    held = [None] * size
    dist.all_gather_object(held, rank, group=group)
    check.that(held == order, f"all_gather_object: {held} for {order}")
    held = [rank]
    dist.broadcast_object_list(held, src=size - 1, group=group)
    check.that(held == [size - 1], "src is a rank of the world")
    held = [rank]
    dist.broadcast_object_list(held, group_src=0, group=group)
    check.that(held == [order[0]], "group_src is a rank of the group")
    held = [None]
    inputs = [f"for {r}" for r in order] if rank == order[0] else None
    dist.scatter_object_list(held, inputs, group_src=0, group=group)
    check.that(held == [f"for {rank}"], f"scatter_object_list: {held}")
    dist.destroy_process_group(group)
    check.done()


def test_outside_a_group():
    rank, size = here()
    group = dist.new_group([0])
    if rank != 0:
        held = ["kept"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [
                dist.broadcast_object_list(held, 0, group=group),
                dist.all_gather_object(held, 1, group=group),
                dist.gather_object(1, held, 0, group=group),
                dist.scatter_object_list(held, [1], 0, group=group),
                dist.send_object_list(held, 0, group=group),
                dist.recv_object_list(held, 0, group=group),
            ]
        assert results == [None] * 5 + [-1] and held == ["kept"]
        assert len(caught) == 6 and all("not in the given group" in str(w.message) for w in caught)
        assert all(w.filename == __file__ for w in caught)
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group(group)


class Own(BaseException):
    """No Exception."""


class Odd:
    """Its decode function raises what its encode function says."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def _raise(kind: str) -> None:
    raise {
        "own": Own, "exit": SystemExit, "keys": KeyboardInterrupt, "error": ZeroDivisionError
    }[kind]("odd")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "raised"),
    [("own", Own), ("exit", SystemExit), ("keys", KeyboardInterrupt), ("error", dist.CodecError)],
)
def test_what_a_decode_function_raises_consumes_the_message(kind, raised):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.register_object_type(Odd, lambda odd: odd.kind, _raise)
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        for sent in (Odd(kind), "next"):
            dist.send_object_list([sent], right)
        found, got = None, [None]
        try:
            dist.recv_object_list(got, left)
        except BaseException as error:
            found = error
        parallel_assert(type(found) is raised, repr(found))
        dist.recv_object_list(got, left)
        parallel_assert(got == ["next"], got)
    for call in (
        lambda: dist.all_gather_object([None] * size, Odd(kind)),
        lambda: dist.scatter_object_list([None], [Odd(kind)] * size if rank == 0 else None),
    ):
        found = None
        try:
            call()
        except BaseException as error:
            found = error
        parallel_assert(type(found) is raised, repr(found))
    parallel_assert(dist.all_gather_object(gathered := [None] * size, rank) is None)
    parallel_assert(gathered == list(range(size)))


class Loads:
    """Raises where its pickle is loaded."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple:
        return _raise, (self.kind,)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("kind", "raised"), [("own", Own), ("keys", KeyboardInterrupt), ("error", ZeroDivisionError)]
)
def test_what_loading_a_pickle_raises_consumes_the_message(kind, raised):
    rank, size = dist.get_rank(), dist.get_world_size()
    for sent in (Loads(kind), "next"):
        dist.send_object_list([sent], (rank + 1) % size, pickle=True)
    found, got = None, [None]
    try:
        dist.recv_object_list(got, (rank - 1) % size, pickle=True)
    except BaseException as error:
        found = error
    parallel_assert(type(found) is raised, repr(found))
    dist.recv_object_list(got, (rank - 1) % size, pickle=True)
    parallel_assert(got == ["next"], got)


class Mute(Exception):
    """Raises where its text is asked for."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Unsendable:
    def __reduce__(self) -> tuple:
        raise Mute


@pytest.mark.mpi(min_size=2)
def test_an_error_without_a_text_reaches_the_receiver():
    rank = dist.get_rank()
    found = None
    if rank < 2:
        try:
            if rank == 0:
                dist.send_object_list([Unsendable()], 1, pickle=True)
            else:
                dist.recv_object_list([None], 0, pickle=True)
        except Exception as error:
            found = type(error)
    parallel_assert(found is (Mute, dist.DistError, None)[min(rank, 2)], repr(found))


class _Interrupts:
    """Where it is decoded the first time, a signal comes."""


def test_what_a_handler_raises_while_decoding_keeps_the_message():
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    often = [0]

    def decode(state):
        often[0] += 1
        if often[0] == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(1000):
                pass
        return state

    def handler(number, frame):
        raise Own("handler")

    dist.register_object_type(_Interrupts, lambda obj: 5, decode)
    before = signal.signal(signal.SIGUSR1, handler)
    found, got = None, [None]
    try:
        dist.send_object_list([_Interrupts()], (rank + 1) % size)
        try:
            dist.recv_object_list(got, (rank - 1) % size)
        except Own as error:
            found = error
        dist.recv_object_list(got, (rank - 1) % size)
    finally:
        signal.signal(signal.SIGUSR1, before)
    parallel_assert(found is not None and got == [5], f"{found!r}, {got}")
