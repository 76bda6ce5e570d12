"""Wrong arguments: the right exception with the fix in it, before any data are sent.

Every rank makes the same mistakes here, and afterwards the group must be in step: each has told the
others as often, and waited for nobody. Mistakes of some ranks only are in backends/test_refusal.py.
"""

from datetime import timedelta

import numpy as np
import pytest
import torch
from cases import Check, here
from torch._subclasses.fake_tensor import FakeTensorMode

import hpcdist as dist
from hpcdist import ReduceOp
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

GOOD = (4, 6)


def bad_tensors():
    """Kind -> tensor, exception, what the text must say, whether it is bad as an input too."""
    base = torch.zeros(8, 12)
    return {
        "columns": (base[:4, :6], ValueError, "contiguous()", True),
        "every second": (torch.zeros(8, 6)[::2], ValueError, "contiguous()", True),
        "expanded": (torch.zeros(1, 6).expand(4, 6), ValueError, "contiguous()", True),
        "overlapping": (torch.zeros(40).as_strided(GOOD, (3, 1)), ValueError, "contiguous()", True),
        "sparse COO": (torch.zeros(GOOD).to_sparse(), TypeError, "to_dense()", True),
        "sparse CSR": (torch.zeros(GOOD).to_sparse_csr(), TypeError, "to_dense()", True),
        "meta": (torch.zeros(GOOD, device="meta"), TypeError, "no data", True),
        "conjugate": (torch.zeros(GOOD, dtype=torch.cfloat).conj(), ValueError, "resolve", True),
        "None": (None, TypeError, "NoneType", True),
        "list of numbers": ([1.0] * 24, TypeError, "list", True),
        "text": ("x" * 24, TypeError, "str", True),
        "parts of bytes": (
            torch.zeros(GOOD, dtype=torch.int8).view(torch.int4), TypeError, "int4", True,
        ),
        "object array": (np.zeros(GOOD, object), TypeError, "does not move", True),
        "read-only": (read_only(), ValueError, "read-only", False),
        "freed": (freed(GOOD), TypeError, "storage was freed", True),
        "a view of freed memory": (freed((8, 6), 4), TypeError, "storage was freed", True),
        "fake": (fake(GOOD), TypeError, "FakeTensor", True),
        "zeros without memory": (torch._efficientzerotensor(GOOD), TypeError, "clone()", True),
        "functionalized": (
            torch._to_functional_tensor(torch.zeros(GOOD)), TypeError, "functionalized", True,
        ),
        "a wrapper": (Wrapper(torch.zeros(GOOD)), TypeError, "__torch_dispatch__", True),
        "nested": (torch.nested.nested_tensor([torch.zeros(6)] * 4), TypeError, "nested", True),
        "NumPy with a mask": (np.ma.zeros(GOOD), TypeError, "filled(", True),
        "NumPy with a step": (np.zeros((8, 6), "f4")[::2], ValueError, "ascontiguousarray", True),
    }  # fmt: skip


def freed(shape, first=0):
    """Its storage is resized to 0, as FSDP does with parameters it does not need."""
    tensor = torch.zeros(shape)[first:]
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(shape):
    """A tensor as in tracing."""
    with FakeTensorMode():
        return torch.zeros(shape)


class Wrapper(torch.Tensor):
    """Stands for another tensor, as DTensor and MaskedTensor do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


def read_only():
    array = np.zeros(GOOD, np.float32)
    array.flags.writeable = False
    return array


def places(rank: int, size: int):
    """Each place where an operation takes a tensor -> call with one there, whether it writes."""
    peer = (rank + 1) % size

    def good():
        return torch.zeros(GOOD)

    def each(bad, at=0):
        return [bad if i == at else good() for i in range(size)]

    whole = torch.zeros(4 * size, 6)
    found = {
        "all_reduce": (lambda t: dist.all_reduce(t), True),
        "all_reduce, async": (lambda t: dist.all_reduce(t, async_op=True), True),
        "all_reduce_coalesced": (lambda t: dist.all_reduce_coalesced([good(), t]), True),
        "broadcast": (lambda t: dist.broadcast(t, rank), False),
        "broadcast elsewhere": (lambda t: dist.broadcast(t, peer), size > 1),
        "reduce": (lambda t: dist.reduce(t, rank), True),
        "all_gather input": (lambda t: dist.all_gather(each(good()), t), False),
        "all_gather output": (lambda t: dist.all_gather(each(t), good()), True),
        "all_gather_into_tensor input": (lambda t: dist.all_gather_into_tensor(whole, t), False),
        "all_gather_into_tensor output": (lambda t: dist.all_gather_into_tensor(t, good()), True),
        "all_gather_coalesced input": (
            lambda t: dist.all_gather_coalesced([[good()] for _ in range(size)], [t]), False,
        ),
        "all_gather_coalesced output": (
            lambda t: dist.all_gather_coalesced([[t] for _ in range(size)], [good()]), True,
        ),
        "gather input": (lambda t: dist.gather(t, each(good()), rank), False),
        "gather output": (lambda t: dist.gather(good(), each(t), rank), True),
        "scatter output": (lambda t: dist.scatter(t, each(good()), rank), True),
        "scatter input": (lambda t: dist.scatter(good(), each(t), rank), False),
        "reduce_scatter output": (lambda t: dist.reduce_scatter(t, each(good())), True),
        "reduce_scatter input": (lambda t: dist.reduce_scatter(good(), each(t)), False),
        "reduce_scatter_tensor output": (lambda t: dist.reduce_scatter_tensor(t, whole), True),
        "reduce_scatter_tensor input": (lambda t: dist.reduce_scatter_tensor(good(), t), False),
        "all_to_all output": (lambda t: dist.all_to_all(each(t), each(good())), True),
        "all_to_all input": (lambda t: dist.all_to_all(each(good()), each(t)), False),
        "all_to_all_single output": (lambda t: dist.all_to_all_single(t, good()), True),
        "all_to_all_single input": (lambda t: dist.all_to_all_single(good(), t), False),
        "isend": (lambda t: dist.isend(t, peer), False),
        "irecv": (lambda t: dist.irecv(t, peer), True),
    }  # fmt: skip
    if size > 1:
        found["send"] = (lambda t: dist.send(t, peer), False)
        found["recv"] = (lambda t: dist.recv(t, peer), True)
        found["batch"] = (
            lambda t: dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, peer)]), True,
        )  # fmt: skip
    return found


def refused(check, label, call, expected, says):
    """Note what is wrong with how a call is refused."""
    try:
        call()
    except expected as error:
        check.that(says in str(error), f"{label}: {says!r} is not in: {error}")
    except Exception as error:
        check.that(False, f"{label}: {type(error).__name__}: {error}")
    else:
        check.that(False, f"{label}: no error")


def in_step(check):
    """All ranks are where they were: an operation in the default group works."""
    rank, size = here()
    total = torch.full((3,), rank + 1.0)
    dist.all_reduce(total)
    check.that(total.tolist() == [size * (size + 1) / 2] * 3, f"out of step: {total}")


def test_bad_tensors_in_every_place(count):
    check, (rank, size) = Check(), here()
    cases = 0
    for where, (call, writes) in places(rank, size).items():
        for kind, (tensor, expected, says, as_input) in bad_tensors().items():
            if not writes and not as_input:
                continue
            if kind == "sparse COO" and where in ("all_reduce", "all_reduce, async"):
                continue  # it takes them: test_reduce.py
            refused(check, f"{where}, {kind}", lambda: call(tensor), expected, says)  # noqa: B023
            cases += 1
    told = [None] * size
    dist.all_gather_object(told, dist.group.WORLD.carrier.seq)
    check.that(len(set(told)) == 1, f"the ranks have told each other of {told} refusals")
    in_step(check)
    count(cases)
    check.done()


def test_tensors_whose_elements_lie_in_another_order():
    """Dense, but not in the order of the place they go to: moving memory would mix them up."""
    check, (rank, size) = Check(), here()
    turned, plain = torch.zeros(6, 4).t(), torch.zeros(GOOD)
    each = [torch.zeros(GOOD) for _ in range(size)]
    whole, turned_whole = torch.zeros(4 * size, 6), torch.zeros(6, 4 * size).t()
    for label, call in {
        "all_gather": lambda: dist.all_gather(each, turned),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[t] for t in each], [turned]),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, turned),
        "all_gather_into_tensor output": lambda: dist.all_gather_into_tensor(turned_whole, plain),
        "reduce_scatter": lambda: dist.reduce_scatter(turned, each),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(turned, whole),
        "reduce_scatter_tensor input": lambda: dist.reduce_scatter_tensor(plain, turned_whole),
        "all_to_all_single": lambda: dist.all_to_all_single(turned, plain),
    }.items():
        refused(check, label, call, ValueError, "contiguous")
    for label, call in {
        "gather": lambda: dist.gather(turned, each if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(turned, each if rank == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all([torch.zeros(6, 4).t() for _ in each], each),
    }.items():
        if size > 1:
            refused(check, label, call, dist.DistMismatchError, "other strides")
    in_step(check)
    check.done()


@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "one rank"])
def test_tensors_of_another_shape_than_their_place(alone):
    """As many elements, which would come out in other rows and columns."""
    check, (rank, size) = Check(), here()
    odd = not alone or rank == size - 1
    tall = torch.arange(24.0).reshape(GOOD[::-1] if odd else GOOD)
    each = [torch.zeros(GOOD) for _ in range(size)]
    for label, call in {
        "all_gather": lambda: dist.all_gather(each, tall),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[t] for t in each], [tall]),
        "reduce_scatter": lambda: dist.reduce_scatter(tall, each),
    }.items():
        kind = ValueError if odd else dist.DistMismatchError
        refused(check, label, call, kind, "different shapes")
    for label, call in {
        "gather": lambda: dist.gather(tall, each if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(tall, each if rank == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all([tall.clone() for _ in each], each),
    }.items():
        if size > 1:
            refused(check, label, call, dist.DistMismatchError, "another shape")
        else:
            refused(check, label, call, ValueError, "different shapes")
    check.that(not any(t.any() for t in each), "a tensor has changed")
    found = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(found, torch.tensor(rank + 1.0))  # one number is the same in any shape
    check.that([t.item() for t in found] == list(range(1, size + 1)), f"{found}")
    in_step(check)
    check.done()


def bad_places(rank: int, size: int) -> list:
    """Ranks, roots and tags: label, call, the error and what it says."""
    t, huge = torch.zeros(4), dist.group.WORLD.carrier.size + 5
    peer = (rank + 1) % size
    V, T = ValueError, TypeError
    return [
        ("root too large", lambda: dist.broadcast(t, huge), V, "not in the group"),
        ("root negative", lambda: dist.broadcast(t, -1), V, "not in the group"),
        ("group root too large", lambda: dist.reduce(t, group_dst=huge), V, "ranks in it are 0 to"),
        ("both roots", lambda: dist.broadcast(t, 0, group_src=0), V, "not both"),
        ("no root", lambda: dist.broadcast(t), V, "must be given"),
        ("root as text", lambda: dist.broadcast(t, "0"), (V, T), "0"),
        ("send to nobody", lambda: dist.isend(t, huge), V, "not in the group"),
        ("receive from nobody", lambda: dist.irecv(t, huge), V, "not in the group"),
        ("send without a rank", lambda: dist.isend(t), V, "must be given"),
        ("send to itself", lambda: dist.send(t, rank), V, "isend"),
        ("receive from itself", lambda: dist.recv(t, rank), V, "irecv"),
        ("gather root", lambda: dist.gather(t, None, huge), V, "not in the group"),
        ("object root", lambda: dist.broadcast_object_list([1], huge), V, "not in the group"),
        ("tag negative", lambda: dist.isend(t, peer, tag=-1), V, "outside 0.."),
        ("tag too large", lambda: dist.irecv(t, peer, tag=1 << 30), V, "outside 0.."),
        ("tag beyond an int", lambda: dist.irecv(t, peer, tag=1 << 40), V, "outside 0.."),
        ("tag as text", lambda: dist.irecv(t, peer, tag="x"), T, "tag must be a whole number"),
    ]  # fmt: skip


def bad_lists(rank: int, size: int) -> list:
    """Lists and counts."""
    t, peer = torch.zeros(4), (rank + 1) % size
    each = [torch.zeros(4) for _ in range(size)]
    V, T = ValueError, TypeError
    return [
        ("list too long", lambda: dist.all_gather([*each, t], t), V, "the group has"),
        ("list too short", lambda: dist.all_gather(each[1:], t), V, "the group has"),
        ("empty list", lambda: dist.all_reduce_coalesced([]), V, "empty"),
        ("no gather_list", lambda: dist.gather(t, None, rank), V, "destination rank"),
        ("gather_list elsewhere", lambda: dist.gather(t, each, peer), V, "destination rank only"),
        ("no scatter_list", lambda: dist.scatter(t, None, rank), V, "source rank"),
        ("dtypes in a list", lambda: dist.all_reduce_coalesced([t, t.double()]), T, "float64"),
        ("dtypes of the two", lambda: dist.all_gather(each, t.double()), T, "float64"),
        ("sizes of the two", lambda: dist.all_gather(each, torch.zeros(5)), V, "has 5 elements"),
        ("sizes of output", lambda: dist.all_gather_into_tensor(t, torch.zeros(5)), V, "elements"),
        ("output overlaps", lambda: dist.all_to_all_single(t, t), V, "overlap"),
        ("objects: no list", lambda: dist.all_gather_object((1,), 1), T, "list"),
        ("objects: list too short", lambda: dist.all_gather_object([], 1), V, "items for the"),
        ("negative split", lambda: dist.all_to_all_single(
            torch.zeros(size), torch.zeros(size), [-1] + [1] * (size - 1)), V, "negative"),
        ("splits too few", lambda: dist.all_to_all_single(
            torch.zeros(size), torch.zeros(size), [1] * (size + 1)), V, "entries"),
        ("splits add up", lambda: dist.all_to_all_single(
            torch.zeros(size), torch.zeros(size), [2] * size), V, "add up"),
        ("splits beyond 64 bits", lambda: dist.all_to_all_single(torch.zeros(size), torch.zeros(
            size), ([2**63 - 1, 2**63 - 1, size + 2] + [0] * size)[:size]), V, "add up"),
        ("splits as floats", lambda: dist.all_to_all_single(
            torch.zeros(size), torch.zeros(size), [1.5] * size), T, "whole numbers"),
    ]  # fmt: skip


def bad_settings(rank: int, size: int) -> list:
    """Operations, groups and Works."""
    t, huge = torch.zeros(4), dist.group.WORLD.carrier.size + 5
    dead = dist.new_group([rank])
    dist.destroy_process_group(dead)
    V, T = ValueError, TypeError
    return [
        ("reduce-op on bool", lambda: dist.all_reduce(torch.ones(2) > 0, ReduceOp.AVG), T, "AVG"),
        ("bits of floats", lambda: dist.all_reduce(t, ReduceOp.BXOR), T, "BXOR"),
        ("MAX of complex", lambda: dist.all_reduce(
            torch.zeros(2, dtype=torch.cfloat), ReduceOp.MAX), T, "complex"),
        ("reduce-op unknown", lambda: dist.all_reduce(t, "MEDIAN"), (V, T), "MEDIAN"),
        ("reduce-op None", lambda: dist.all_reduce(t, None), T, "None"),
        ("duplicate ranks", lambda: dist.new_group([0, 0]), V, "named twice"),
        ("rank outside", lambda: dist.new_group([0, huge]), V, "outside the world"),
        ("negative rank", lambda: dist.new_group([-1]), V, "outside the world"),
        ("ranks no list", lambda: dist.new_group(3), T, "list"),
        ("ranks of floats", lambda: dist.new_group([0.5]), T, "whole numbers"),
        ("timeout no timedelta", lambda: dist.new_group([0], timeout=3), T, "timedelta"),
        ("negative timeout", lambda: dist.new_group(
            [rank], timeout=timedelta(seconds=-1)), V, "positive"),
        ("closed group", lambda: dist.all_reduce(t, group=dead), V, "destroyed"),
        ("closed group, send", lambda: dist.isend(t, rank, group=dead), V, "destroyed"),
        ("closed group again", lambda: dist.destroy_process_group(dead), V, "destroyed"),
        ("no group", lambda: dist.all_reduce(t, group=17), T, "process group"),
        ("double init", lambda: dist.init_process_group(), V, "exists already"),
        ("subgroups do not divide", lambda: dist.new_subgroups(size + 1), V, "does not divide"),
        ("subgroups overlap", lambda: dist.new_subgroups_by_enumeration([[0], [0]]), V, "in both"),
        ("batch of others", lambda: dist.batch_isend_irecv([1]), V, "P2POp"),
        ("P2POp of a collective", lambda: dist.P2POp(dist.all_reduce, t, 0), V, "isend"),
    ]  # fmt: skip


def test_bad_arguments(count):
    check, (rank, size) = Check(), here()
    cases = [*bad_places(rank, size), *bad_lists(rank, size), *bad_settings(rank, size)]
    lone = {"gather_list elsewhere", "send to itself"} if size == 1 else set()
    chosen = [case for case in cases if case[0] not in lone]
    for label, call, expected, says in chosen:
        refused(check, label, call, expected, says)
    in_step(check)
    count(len(chosen))
    check.done()


@pytest.mark.mpi(min_size=2)
def test_messages_of_other_sizes_than_expected(count):
    """A receive that is smaller or larger than what comes: told, and the group goes on."""
    check, (rank, size) = Check(), here()
    peer, source = (rank + 1) % size, (rank - 1) % size
    for sent, expected in ((3, 5), (5, 3), (0, 1), (1, 0), (100_000, 10), (10, 100_000)):
        for blocking in (True, False):
            work = dist.isend(torch.full((sent,), 1.0), peer, tag=sent % 1000)
            into = torch.full((expected,), -1.0)
            label = f"{sent} sent, {expected} expected, blocking {blocking}"

            def receive(into=into, tag=sent % 1000, blocking=blocking):
                if blocking:
                    dist.recv(into, source, tag=tag)
                else:
                    dist.irecv(into, source, tag=tag).wait()

            refused(check, label, receive, dist.DistMismatchError, f"rank {source}")
            work.wait()
    in_step(check)
    count(12)
    check.done()


@pytest.mark.mpi(min_size=2)
def test_the_work_of_another_group(count):
    """A Work does not care which group is the caller's: it waits for its own, also a closed one."""
    check, size = Check(), dist.get_world_size()
    group = dist.new_group()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    dist.barrier()
    work.wait()
    dist.destroy_process_group(group)
    check.that(work.wait() and work.is_success() and tensor.tolist() == [size] * 3, repr(work))
    in_step(check)
    count(1)
    check.done()


@pytest.mark.mpi(min_size=2)
def test_destroying_with_operations_that_nobody_joins(count):
    """The group goes in time with an error; the operation keeps its tensor, others go on."""
    rank, _ = here()
    group = dist.new_group()
    group.carrier.timeout = 0.5
    text = ""
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        try:
            dist.destroy_process_group(group)
        except dist.DistTimeoutError as error:
            text = str(error)
        try:
            work.wait()
            text = "the operation cannot have ended well"
        except dist.DistError as error:
            text = text or f"Work: {error}"
    dist.barrier()
    if rank != 0:
        try:
            dist.destroy_process_group(group)
        except dist.DistTimeoutError as error:
            text = f"elsewhere: {error}"
    good = "Work: " in text or "did not end within" in text if rank == 0 else not text
    parallel_assert(good, text)
    count(1)
    check = Check()
    in_step(check)
    check.done()
