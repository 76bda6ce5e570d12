"""Object collectives that fail: who raises what, and that nothing executes."""

import dataclasses
import os

import pytest
from cases import here
from object_cases import Unknown, equal, objects, still_in_step

import hpcdist as dist
from hpcdist import CodecError, DistMismatchError
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


class Evil:
    """Creates a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_lists_of_different_lengths():
    rank, size = here()
    if size == 1:
        return
    length = 3 if rank == 0 else 2
    with parallel_raises(DistMismatchError, match="broadcast_object_list"):
        dist.broadcast_object_list([rank] * length)
    with parallel_raises(DistMismatchError, match="all_gather_object"):
        dist.all_gather_object([None] * (size + length), rank)
    if rank == 0:
        dist.send_object_list([1, 2, 3], 1)
    error = None
    if rank == 1:
        try:
            dist.recv_object_list([None, None], 0)
        except DistMismatchError as exc:
            error = str(exc)
    parallel_assert(rank != 1 or (error and "3" in error and "2" in error), lambda: str(error))
    still_in_step()


def test_different_roots():
    rank, size = here()
    if size == 1:
        return
    root = 0 if rank == 0 else 1
    with parallel_raises(DistMismatchError):
        dist.broadcast_object_list([rank], root)
    with parallel_raises(DistMismatchError):
        dist.gather_object(rank, [None] * size if rank == root else None, root)
    with parallel_raises(DistMismatchError):
        dist.scatter_object_list([None], [1] * size if rank == root else None, root)
    still_in_step()


def test_a_rank_that_cannot_encode():
    """All ranks raise the same at once; the message names rank, type and place."""
    rank, size = here()
    for bad in range(size):
        obj = {"a": [0, 1, 2, Unknown() if rank == bad else 3]}
        pattern = rf"rank {bad}: .*obj\['a'\]\[3\].*Unknown.*pickle=True"
        with parallel_raises(TypeError, match="all_gather_object, " + pattern) as caught:
            dist.all_gather_object([None] * size, obj)
        # the rank itself sees where it came from
        assert (caught.value.__cause__ is not None) == (rank == bad)
        with parallel_raises(TypeError, match="gather_object, " + pattern):
            dist.gather_object(obj, [None] * size if rank == 0 else None)
        pattern = rf"rank {bad}: .*obj\[0\]\['a'\]\[3\].*Unknown"
        with parallel_raises(TypeError, match="broadcast_object_list, " + pattern):
            dist.broadcast_object_list([obj], bad)
        pattern = rf"scatter_object_list, rank {bad}: the object for rank 0: .*obj\['a'\]\[3\]"
        with parallel_raises(TypeError, match=pattern):
            dist.scatter_object_list([None], [obj] * size if rank == bad else None, bad)
        still_in_step()
    everybody = "(?s)" + ".*".join(f"rank {bad}: " for bad in range(size))
    with parallel_raises(TypeError, match=everybody):
        dist.all_gather_object([None] * size, Unknown())
    loop: list = []
    loop.append(loop)
    with parallel_raises(ValueError, match="contains itself"):
        dist.all_gather_object([None] * size, loop if rank == 0 else 1)
    if size > 1:
        text = None
        try:
            if rank == 0:
                dist.send_object_list([1, Unknown()], 1)
            elif rank == 1:
                dist.recv_object_list([None, None], 0)
        except TypeError as exc:
            text = str(exc)
        ok = rank > 1 or (text is not None and "rank 0" in text and "obj[1]" in text)
        parallel_assert(ok, lambda: str(text))
    still_in_step()


class Sticks:
    pass


def test_any_failure_of_an_encode_function():
    rank, size = here()

    def encode(obj):
        raise OSError("the disk is gone")

    dist.register_object_type(Sticks, encode, lambda value: Sticks())
    with parallel_raises(TypeError, match="the disk is gone"):
        dist.all_gather_object([None] * size, Sticks() if rank == size - 1 else None)
    still_in_step()


def test_wrong_arguments():
    """A wrong list on one rank is an error on all, also where only that rank can see it."""
    rank, size = here()
    for call in (
        lambda: dist.broadcast_object_list((1, 2)),
        lambda: dist.all_gather_object("text", 1),
        lambda: dist.broadcast_object_list(None),
    ):
        with parallel_raises(TypeError):
            call()
    for call in (
        lambda: dist.broadcast_object_list([1], size),
        lambda: dist.broadcast_object_list([1], 0, group_src=0),
        lambda: dist.gather_object(1, [None] * size, size),
        lambda: dist.scatter_object_list([None], None, size),
        lambda: dist.send_object_list([1], rank),
        lambda: dist.send_object_list([1], size),
        lambda: dist.send_object_list([1]),
        lambda: dist.recv_object_list([1], rank),
    ):
        with parallel_raises(ValueError):
            call()
    with parallel_raises(ValueError, match="rank 0.*object_gather_list"):
        dist.gather_object(rank, None)
    with parallel_raises(ValueError, match="rank 0.*object_gather_list"):
        dist.gather_object(rank, [None] * (size - 1) if rank == 0 else None)
    if size > 1:
        with parallel_raises(ValueError, match="rank 1.*None on every rank but"):
            dist.gather_object(rank, [None] * size if rank < 2 else None)
        with parallel_raises(ValueError, match="items for the"):
            dist.all_gather_object([None] * (size - 1), rank)
    with parallel_raises(ValueError, match="rank 0.*scatter_object_input_list"):
        dist.scatter_object_list([None], None)
    with parallel_raises(ValueError, match="rank 0.*one for each rank"):
        dist.scatter_object_list([None], [1] * (size + 1))
    error = None
    try:
        out: list = [] if rank == size - 1 else [None]
        dist.scatter_object_list(out, [1] * size if rank == 0 else None)
    except ValueError as exc:
        error = exc
    parallel_assert((error is not None) == (rank == size - 1))
    still_in_step()


def test_pickle_is_refused_without_a_choice(tmp_path):
    """An evil pickle from rank 0 runs nowhere, whichever operation brings it."""
    rank, size = here()
    path = str(tmp_path / f"ran on {rank}")
    evil = Evil(path)
    last = size - 1

    def refused(call):
        """Run a call that sends from rank 0; say what happened on this rank."""
        try:
            call()
        except CodecError as exc:
            return "pickle" in str(exc) and "rank 0" in str(exc) and "nothing in it ran" in str(exc)
        except TypeError:
            return False
        return None

    held = [evil] if rank == 0 else [None]
    outcome = refused(lambda: dist.broadcast_object_list(held, pickle=rank == 0))
    parallel_assert(outcome is (None if rank == 0 else True), lambda: f"broadcast {outcome}")
    got = [None] * size
    mine = evil if rank == 0 else 1
    # rank 0 allows it, and would load its own; the others refuse
    if rank != 0:
        outcome = refused(lambda: dist.all_gather_object(got, mine))
        assert outcome is True and got == [None] * size
    else:
        dist.all_gather_object(got, Unknown(), pickle=True)
    parallel_assert(rank != 0 or type(got[0]) is Unknown)
    got = [None] * size if rank == last else None
    outcome = refused(lambda: dist.gather_object(mine, got, last, pickle=rank == 0 and size > 1))
    if size > 1:
        parallel_assert(outcome is (True if rank == last else None), lambda: f"gather {outcome}")
    inputs = [1] * last + [evil] if rank == 0 else None
    outcome = refused(
        lambda: dist.scatter_object_list([None], inputs, pickle=rank == 0 and size > 1)
    )
    if size > 1:
        parallel_assert(outcome is (True if rank == last else None), lambda: f"scatter {outcome}")
        outcome = None
        if rank == 0:
            dist.send_object_list([evil], 1, pickle=True)
        elif rank == 1:
            outcome = refused(lambda: dist.recv_object_list([None], 0))
        parallel_assert(outcome is (True if rank == 1 else None), lambda: f"recv {outcome}")
    parallel_assert(not os.path.exists(path), "the pickle ran")
    still_in_step()


def test_pickle_by_choice(monkeypatch):
    rank, size = here()
    monkeypatch.delenv("HPCDIST_ALLOW_PICKLE", raising=False)

    def everything(**kwargs):
        held = [Unknown(), rank] if rank == 0 else [None, None]
        dist.broadcast_object_list(held, **kwargs)
        parallel_assert(type(held[0]) is Unknown and held[1] == 0)
        held = [None] * size
        dist.all_gather_object(held, {rank: Unknown()}, **kwargs)
        parallel_assert(all(type(held[r][r]) is Unknown for r in range(size)))
        held = [None] * size if rank == 0 else None
        dist.gather_object(Unknown(), held, **kwargs)
        parallel_assert(rank != 0 or all(type(obj) is Unknown for obj in held))
        held = [None]
        dist.scatter_object_list(held, [Unknown()] * size if rank == 0 else None, **kwargs)
        parallel_assert(type(held[0]) is Unknown)
        held = [None]
        if size > 1 and rank == 0:
            dist.send_object_list([Unknown()], 1, **kwargs)
        if size > 1 and rank == 1:
            dist.recv_object_list(held, 0, **kwargs)
        parallel_assert(rank != 1 or type(held[0]) is Unknown)

    everything(pickle=True)
    with dist.allow_pickle():
        everything()
    with parallel_raises(TypeError):
        dist.all_gather_object([None] * size, Unknown())
    monkeypatch.setenv("HPCDIST_ALLOW_PICKLE", "1")
    everything()
    with parallel_raises(TypeError):
        dist.all_gather_object([None] * size, Unknown(), pickle=False)


def test_weights_only_refuses_pickle():
    """In each of the seven, also where it is allowed; what the codec carries passes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    mine = [None] * size if rank == last else None

    def calls(item, **how):
        inputs = [item] * size if rank == 0 else None
        yield lambda: dist.broadcast_object_list([item], weights_only=True, **how)
        yield lambda: dist.all_gather_object([None] * size, item, None, True, **how)
        yield lambda: dist.gather_object(item, mine, last, weights_only=True, **how)
        yield lambda: dist.scatter_object_list([None], inputs, weights_only=True, **how)

    for call in calls({"step": 3, "loss": 0.5}):
        call()
    with dist.allow_pickle():
        for how in ({}, {"pickle": True}):
            for call in calls(Unknown(), **how):
                with parallel_raises(TypeError, match="does not carry"):
                    call()
        if size > 1:
            outcome = "sent"
            try:
                if rank == 0:
                    dist.send_object_list([Unknown()], 1)
                elif rank == 1:
                    dist.recv_object_list([None], 0, weights_only=True)
            except dist.CodecError as error:
                outcome = str(error)
            parallel_assert((rank == 1) == ("nothing in it ran" in outcome), outcome)


def test_a_type_registered_on_the_sender_only():
    rank, size = here()
    if rank == 0:
        cls = dataclasses.make_dataclass("OnlyHere", ["x"])
        dist.register_object_type(cls)
        held = [cls(1)]
    else:
        held = [None]
    error = None
    try:
        dist.broadcast_object_list(held)
    except CodecError as exc:
        error = str(exc)
    ok = rank == 0 or (error is not None and "OnlyHere" in error and "rank 0" in error)
    parallel_assert(ok, lambda: str(error))
    parallel_assert(rank == 0 or held == [None])
    still_in_step()


@pytest.mark.mpi(min_size=2)
def test_a_hook_that_raises_between_the_parts_of_a_message_loses_no_later_one():
    rank, _ = here()
    seen = []

    def second_one(_seen):
        seen.append(True)
        if len(seen) == 2:
            raise ValueError("no")

    group = dist.new_group()
    if rank == 0:
        group.register_pre_hook(1, second_one)
    got = []
    for i in range(3):
        into = [None]
        if rank == 0:
            try:
                dist.send_object_list([i], 1, group)
            except ValueError:
                assert i == 0
        elif rank == 1:
            dist.recv_object_list(into, 0, group)
            got += into
    parallel_assert(rank != 1 or got == [0, 1, 2], f"{got}")
    dist.destroy_process_group(group)


def test_without_the_entry_check():
    """With the check off, lengths that differ are still noticed where they are seen.

    On one node all ranks see them: their few bytes travel with the check even then.
    """
    rank, size = here()
    carried = dist.group.WORLD.carrier.checks_through == "shared memory"
    comm = dist.group.WORLD.carrier
    level = comm.check
    dist.barrier()
    comm.check = 0
    try:
        held = [None] * size
        dist.all_gather_object(held, objects(rank))
        fine = equal(held, [objects(r) for r in range(size)])
        error = None
        try:
            dist.broadcast_object_list([1, 2, 3] if rank == 0 else [None, None])
        except DistMismatchError as exc:
            error = exc
    finally:
        comm.check = level
    parallel_assert(fine)
    unseen = rank == 0 and (size == 1 or not carried)
    parallel_assert((error is None) == unseen, lambda: repr(error))
