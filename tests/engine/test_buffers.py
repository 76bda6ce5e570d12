"""What may be passed as a tensor, which layouts, and sizes beyond 2^31."""

import array
import ctypes
import os
from datetime import timedelta

import exporters
import numpy as np
import pytest
import torch
from cases import MOVED, Check, draw, finish, here, poison

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

HUGE = 2**31 + 17


def test_dense_layouts(rng):
    """Dense tensors with the same strides on all ranks, whatever the order of dimensions."""
    check, (rank, size) = Check(), here()
    shape = (3, 4, 5, 2)
    views = {
        "transposed": lambda t: t.transpose(0, 3),
        "permuted": lambda t: t.permute(2, 0, 3, 1),
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "one long dimension": lambda t: t.reshape(1, 120, 1).transpose(0, 1),
        "a slice of rows": lambda t: t[1:],
        "unsqueezed": lambda t: t.unsqueeze(2).transpose(0, 1),
    }
    for name, view in views.items():
        parts = [view(draw(rng, torch.float64, shape)) for _ in range(size)]
        tensor = torch.empty_like(parts[rank]).copy_(parts[rank])
        mine = view(poison(torch.float64, shape)).copy_(parts[rank])
        for held in (tensor, mine):
            dist.all_reduce(held)
            want = torch.stack([part.contiguous() for part in parts]).sum(0)
            check.that(bool((held - want).abs().max() < 1e-12), f"all_reduce {name}")
    check.done()


def test_layouts_that_differ_between_ranks(rng):
    """The same count with other strides would mix elements up: an error on all ranks."""
    rank, size = here()
    if size == 1:
        return
    tensor = torch.zeros(4, 6)
    if rank == size - 1:
        tensor = torch.zeros(6, 4).T
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
    ):
        with parallel_raises(dist.DistMismatchError):
            call()


@pytest.mark.once  # torch imports much for them
def test_tensors_inside_a_transform_are_named():
    """torch.vmap and torch.func hand out tensors that stand for others."""
    check = Check()

    def inside(says):
        def call(x):
            try:
                dist.all_reduce(x.detach())
            except TypeError as error:
                check.that(says in str(error), f"{says}: {error}")
                # which is no way out: torch refuses autograd.Function in transforms
                check.that("nn.functional" not in str(error), f"{says}: {error}")
            else:
                check.that(False, f"{says}: no error")
            return x.sum()

        return call

    torch.vmap(inside("torch.vmap"))(torch.ones(3, 2))
    torch.func.grad(inside("torch.func"))(torch.ones(3))
    jagged = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
    inside("nested tensor")(jagged)
    check.done()


def test_a_plain_subclass_is_a_tensor():
    """Without __torch_dispatch__ a subclass has memory like any other."""

    class Plain(torch.Tensor):
        pass

    tensor = torch.ones(3).as_subclass(Plain)
    dist.all_reduce(tensor)
    parallel_assert(tensor.tolist() == [dist.get_world_size()] * 3)


def test_read_only_memory_behind_dlpack():
    """DLPack 1.0 says so."""

    class Shown:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    array = np.ones(3)
    dist.all_reduce(Shown(array))
    parallel_assert(array.tolist() == [dist.get_world_size()] * 3)
    array.flags.writeable = False
    with parallel_raises(ValueError, match="read-only"):
        dist.all_reduce(Shown(array))


def test_gaps_and_overlaps_are_refused():
    rank, size = here()
    base = torch.zeros(6, 6)
    bad = {
        "columns": base[:, :3],
        "every second": base[::2],
        "expanded": torch.zeros(1, 3).expand(4, 3),
        "overlapping": torch.zeros(10).as_strided((4, 4), (2, 1)),
        "diagonal": base.diagonal(),
        "NumPy step": np.zeros(10)[::2],
        "NumPy reversed": np.zeros(10)[::-1],
        "NumPy columns": np.zeros((4, 4))[:, 1:3],
        "NumPy broadcast": np.broadcast_to(np.zeros(1), (4,)),
    }
    before = dist.all_reduce  # the same group must go on afterwards
    for name, tensor in bad.items():
        for async_op in (False, True):
            error = None
            try:
                before(tensor, async_op=async_op)
            except (ValueError, TypeError) as exc:
                error = exc
            assert error is not None, name
            if isinstance(tensor, torch.Tensor):
                assert type(error) is ValueError and "contiguous" in str(error), (name, error)
    parallel_assert(float(base.sum()) == 0)
    dist.barrier()


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a plain tensor"])
def test_lazy_views_are_refused(warm):
    """Lazy conjugates and negations are not what lies in memory."""
    if warm:
        dist.all_reduce(torch.zeros(1))
    plain = torch.tensor([1 + 1j, 2 - 3j])
    lazy = [plain.conj(), plain.conj().imag.clone(), torch._neg_view(torch.ones(3))]
    assert lazy[0].is_conj() and lazy[2].is_neg()
    for tensor in (lazy[0], lazy[2]):
        with parallel_raises((TypeError, ValueError), match="resolve"):
            dist.all_reduce(tensor)
        with parallel_raises((TypeError, ValueError), match="resolve"):
            dist.broadcast(tensor, 0)
    dist.all_reduce(lazy[1])  # a clone of one is plain again


class Negated(torch.Tensor):
    """A class that says itself that its elements are negated."""

    def is_neg(self) -> bool:
        return True


def test_each_class_is_asked_whether_it_is_negated():
    """The native method is called directly; a class that has another one is asked by that."""
    lazy = torch.as_strided(torch.zeros(4, dtype=torch.complex64).conj().imag, (4,), (1,))
    derived = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    for tensor in (lazy, torch.ones(3).as_subclass(Negated), torch._neg_view(derived)):
        dist.all_reduce(derived)
        with parallel_raises((TypeError, ValueError), match="resolve"):
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(3))
        with parallel_raises((TypeError, ValueError), match="resolve"):
            dist.isend(tensor, here()[0])


def test_python_buffers():
    """Anything with the buffer protocol, of a dtype that hpcdist knows."""
    check, (rank, size) = Check(), here()
    for code in "bBhHiIqQfd":
        data = array.array(code, [rank + 1] * 5)
        dist.all_reduce(data)
        check.that(data.tolist() == [sum(range(1, size + 1))] * 5, f"array {code}: {data}")
    c = (ctypes.c_double * 4)(*[float(rank)] * 4)
    dist.all_reduce(c)
    check.that(list(c) == [float(sum(range(size)))] * 4, f"ctypes: {list(c)}")
    view = memoryview(array.array("i", [rank] * 6)).cast("B").cast("i", (2, 3))
    dist.all_reduce(view)
    check.that(view.tolist() == [[sum(range(size))] * 3] * 2, "memoryview of two dimensions")
    half = np.full(3, rank, np.float16)
    dist.all_reduce(half)
    check.that(half.tolist() == [sum(range(size))] * 3, "float16")
    check.done()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_buffer_that_is_made_anew_each_time(async_op):
    """The memory of one was kept, that of another was sent."""
    check, (rank, size) = Check(), here()
    source = exporters.exporter()
    for _ in range(3):
        before = len(exporters.made)
        out = np.zeros((size, exporters.BYTES), np.uint8)
        finish(dist.all_gather_into_tensor(out, source, async_op=async_op), async_op)
        new = exporters.made[before:]
        check.that(len(new) == 1 and (out[rank] == new[0]).all(), f"{new}: {np.unique(out[rank])}")
    check.done()


class Offers:
    """An object with DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_dlpack():
    rank, size = here()
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(Offers(tensor))
    parallel_assert(tensor.tolist() == [sum(range(size))] * 4)


def test_parameters_and_subclasses():
    rank, size = here()
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    with torch.no_grad():
        dist.all_reduce(parameter)
    parallel_assert(parameter.tolist() == [sum(range(size))] * 3)

    class Mine(torch.Tensor):
        pass

    mine = torch.full((3,), float(rank)).as_subclass(Mine)
    dist.all_reduce(mine)
    parallel_assert(mine.tolist() == [sum(range(size))] * 3)
    plain = torch.full((3,), float(rank), requires_grad=True)
    dist.all_reduce(plain.detach())
    parallel_assert(plain.tolist() == [sum(range(size))] * 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_foreign_objects_are_refused():
    for bad in (
        None, 3, 2.5, "text", [1, 2], (1,), {"a": 1}, object(), torch.float32,
        torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex32), np.zeros(2, "M8[s]"), np.zeros(2, "U4"),
        np.zeros(2, object), np.zeros(2, [("a", "i4")]), np.zeros(2, ">i4"), np.zeros(2, "g"),
    ):  # fmt: skip
        error = None
        try:
            dist.broadcast(bad, 0)
        except (TypeError, ValueError) as exc:
            error = exc
        assert error is not None, repr(bad)
        assert "tensor" in str(error), (bad, error)
    dist.barrier()


def test_read_only_outputs_are_refused():
    rank, size = here()
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for call in (
        lambda: dist.all_reduce(frozen),
        lambda: dist.all_gather_into_tensor(np.broadcast_to(frozen, 4 * size)[:4], frozen[:1]),
        lambda: dist.irecv(frozen, 0),
        lambda: dist.all_reduce(b"abcd"),
    ):
        with parallel_raises((TypeError, ValueError)):
            call()


def test_empty_tensors_of_any_strides():
    check, size = Check(), dist.get_world_size()
    for tensor in (torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, 4).T, torch.empty(4)[4:]):
        for async_op in (False, True):
            work = dist.all_reduce(tensor, async_op=async_op)
            check.that(work is None or work.wait(), f"{tuple(tensor.shape)}")
        dist.broadcast(tensor, size - 1)
    dist.all_reduce(np.zeros((0, 3)))
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    check.done()


def test_unaligned_memory(rng):
    """Views that begin at any byte of a larger buffer."""
    check, (rank, size) = Check(), here()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int16):
        for offset in (1, 2, 3, 5):
            raw = np.zeros(100 * dtype.itemsize + 8, np.uint8)
            view = np.frombuffer(raw, np.uint8)[offset : offset + 100 * dtype.itemsize]
            parts = [draw(rng, torch.int8, 100).to(dtype) for _ in range(size)]
            tensor = torch.frombuffer(raw, dtype=dtype, count=100, offset=offset)
            tensor.copy_(parts[rank])
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            want = torch.stack(parts).amax(0)
            check.equal(tensor, want, f"{dtype} at byte {offset}")
            check.that(not raw[:offset].any(), f"{dtype} at byte {offset}: the bytes before")
            check.that(not raw[offset + view.size :].any(), f"{dtype} at {offset}: those after")
    check.done()


def test_describe_agrees_with_torch():
    from hpcdist import _buffer

    for dtype in MOVED:
        seen = _buffer.describe(poison(dtype, (2, 3)))
        assert seen["dtype"] == str(dtype)[6:] and seen["elements"] == 6
        assert tuple(seen["shape"]) == (2, 3) and seen["contiguous"]


def test_parameters_are_written_to_while_autograd_records():
    """As by torch's operations: ``for p in model.parameters(): broadcast(p, 0)``."""
    check, (rank, size) = Check(), here()
    ones = torch.ones(4)
    each, whole = [torch.ones(4) for _ in range(size)], torch.ones(4 * size)
    peer, source = (rank + 1) % size, (rank - 1) % size

    def message(p):
        sent = dist.isend(ones, peer)
        dist.irecv(p, source).wait()
        sent.wait()

    def reduce(p):
        dist.reduce(p, 0)
        dist.broadcast(p, 0)

    def gather(p):
        dist.gather(ones, [p, *each[1:]] if rank == 0 else None, 0)
        dist.broadcast(p, 0)

    for name, (call, want) in {
        "broadcast": (lambda p: dist.broadcast(p, 0), 0),
        "broadcast, async": (lambda p: dist.broadcast(p, 0, async_op=True).wait(), 0),
        "all_reduce": (lambda p: dist.all_reduce(p), sum(range(size))),
        "all_reduce_coalesced": (lambda p: dist.all_reduce_coalesced([p]), sum(range(size))),
        "reduce": (reduce, sum(range(size))),
        "all_gather": (lambda p: dist.all_gather([p, *each[1:]], ones), 1),
        "gather": (gather, 1),
        "scatter": (lambda p: dist.scatter(p, each if rank == 0 else None, 0), 1),
        "reduce_scatter": (lambda p: dist.reduce_scatter(p, each), size),
        "reduce_scatter_tensor": (lambda p: dist.reduce_scatter_tensor(p, whole), size),
        "all_to_all": (lambda p: dist.all_to_all([p, *torch.ones(size, 4)[1:]], each), 1),
        "message": (message, 1),
    }.items():  # fmt: skip
        parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
        before = parameter.data_ptr()
        call(parameter)
        check.that(parameter.tolist() == [want] * 4, f"{name}: {parameter}")
        fine = parameter.is_leaf and parameter.requires_grad and parameter.data_ptr() == before
        check.that(fine, f"{name}: it is no parameter any more")
        parameter.sum().backward()
        check.that(parameter.grad.tolist() == [1] * 4, f"{name}: gradient {parameter.grad}")
    sparse = torch.sparse_coo_tensor([[1]], [1.0], (3,)).requires_grad_()
    dist.all_reduce(sparse)
    check.that(sparse.to_dense().tolist() == [0, size, 0], f"sparse: {sparse}")
    check.done()


def free_bytes() -> int:
    """Memory that this machine can still give, in bytes."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.memory
@pytest.mark.deadline(300)
def test_beyond_two_to_the_31():
    """int8, 2^31 + 17 elements: send, broadcast, all_reduce between ranks 0 and 1."""
    rank, size = here()
    if size != 2:
        pytest.skip("once, with 2 ranks")
    need = 2 * HUGE + (3 << 30)
    enough = torch.tensor([free_bytes() >= need])
    dist.all_reduce(enough, dist.ReduceOp.MIN)
    if not enough:
        pytest.skip(f"needs {need >> 30} GiB of free memory")
    marks = [0, 1, 4095, 2**30 + 3, 2**31 - 1, 2**31, 2**31 + 1, HUGE - 1]
    tensor = torch.zeros(HUGE, dtype=torch.int8)
    # A busy machine takes longer than the tests' group may.
    group = dist.new_group(timeout=timedelta(seconds=200))

    def check(want, what):
        got = tensor[marks].tolist()
        other = int(torch.count_nonzero(tensor)) - sum(1 for x in got if x)
        parallel_assert(got == want and not other, lambda: f"{what}: {got}, {other} others")

    if rank == 0:
        tensor[marks] = torch.arange(1, 9, dtype=torch.int8)
        dist.send(tensor, 1, group)
    else:
        parallel = dist.recv(tensor, 0, group)
        assert parallel == 0
    check(list(range(1, 9)), "send and recv")
    dist.all_reduce(tensor, group=group)
    check([2 * x for x in range(1, 9)], "all_reduce")
    tensor.zero_()
    if rank == 1:
        tensor[marks] = torch.arange(11, 19, dtype=torch.int8)
    dist.broadcast(tensor, 1, group)
    check(list(range(11, 19)), "broadcast")
    dist.destroy_process_group(group)
