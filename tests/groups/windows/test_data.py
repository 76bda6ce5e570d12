"""What a window copies from and into tensors of any layout, also within its own memory, on a node
and between nodes."""

import pytest
import torch
from cases import COMPLEX, MOVED, REDUCED, Check, draw, ring

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

N = 600  # elements
#: Where a tensor lies in the window's memory of N elements: name -> view.
FORMS = {
    "one further": lambda m: m[11:311],
    "one before": lambda m: m[9:309],
    "the same": lambda m: m[10:310],
    "far behind": lambda m: m[305:605],
    "every second": lambda m: m[0:600:2],
    "every second, from within": lambda m: m[1:301:2],
    "transposed": lambda m: m[3:303].view(15, 20).t(),
    "transposed with gaps": lambda m: m[:600].view(20, 30)[:, ::2].t(),
    "one element": lambda m: m[12],
    "none": lambda m: m[12:12],
    "a row for all": lambda m: m[5:25].expand(15, 20),
    "an element for all": lambda m: m[12:13].expand(300),
    "rows that overlap": lambda m: m[:40].as_strided((15, 20), (1, 1)),
}
#: Those whose elements share memory: they are read only.
SHARED = ("a row for all", "an element for all", "rows that overlap")


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def each_target(window, memory):
    """Each rank alone, with each memory it may write: (rank's number in the group, its memory)."""
    rank, size, _, after = ring()
    for turn in range(size):
        dist.barrier()
        if rank == turn:
            yield rank, memory
            if window.get_attr(after).access_type is dist.WindowAccessType.UNIFIED and size > 1:
                yield after, window.map_remote_tensor(after)
    dist.barrier()


def each_form(rng, group, dtype):
    """Each form with each target: (window, the form's name and view, target, its memory)."""
    memory = dist.zeros(N + 40, dtype=dtype, group=group)
    window = group.new_window(memory)
    for name, form in FORMS.items():
        for target, there in each_target(window, memory):
            there.copy_(draw(rng, dtype, N + 40))
            yield window, name, form, target, there


def as_apart(op, there, offset, values):
    """The memory that an operation leaves whose tensor lies apart."""
    want = there.clone()
    part = want[offset : offset + values.numel()]
    part.copy_(op(part.clone(), values.reshape(-1)))
    return want


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128], ids=str)
def test_put_and_accumulate_within_the_same_memory(rng, group, dtype):
    check = Check()
    for window, name, form, target, there in each_form(rng, group, dtype):
        want = as_apart(lambda _, new: new, there, 10, form(there).clone())
        window.put(form(there), target, 10)
        check.equal(there, want, f"put to {target}: {name}")
        want = as_apart(torch.add, there, 10, form(there).clone())
        window.accumulate(form(there), target, 10)
        check.equal(there, want, f"accumulate to {target}: {name}")
    check.done()


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64], ids=str)
def test_get_within_the_same_memory(rng, group, dtype):
    check = Check()
    for window, name, form, target, there in each_form(rng, group, dtype):
        want = there.clone()
        if name in SHARED:
            with pytest.raises(ValueError, match="share memory"):
                window.get(form(there), target, 10)
        else:
            into = form(want)
            into.copy_(there[10 : 10 + into.numel()].clone().view(into.shape))
            window.get(form(there), target, 10)
        check.equal(there, want, f"get from {target}: {name}")
    check.done()


def test_elements_within_each_other_are_no_overlap(group):
    """Strides that interleave: 0, 2, 4 and 3, 5, 7."""
    memory = dist.zeros(8, group=group)
    window = group.new_window(memory)
    memory.copy_(torch.arange(8.0))
    into = torch.zeros(8).as_strided((2, 3), (3, 2))
    window.get(into, dist.get_rank(), 1)
    parallel_assert(into.tolist() == [[1, 2, 3], [4, 5, 6]], str(into))


def test_memory_of_two_windows(group):
    """Windows over parts that overlap, of another size on each rank; an odd address."""
    rank, *_ = ring()
    memory = dist.zeros(100, dtype=torch.int32, group=group)
    one, two = group.new_window(memory[: 60 + rank]), group.new_window(memory[20 + rank : 100])
    memory.copy_(torch.arange(100))
    two.put(memory[19 + rank : 59 + rank], rank)
    parallel_assert(memory[20 + rank : 60 + rank].tolist() == list(range(19 + rank, 59 + rank)))
    one.get(memory[1:41], rank)
    parallel_assert(memory[:41].tolist() == [0, *range(20 + rank), *range(19 + rank, 39)])
    memory.copy_(torch.arange(100))
    crooked = memory.view(torch.uint8)[2:158].clone().view(torch.int32)
    one.put(torch.frombuffer(memory.numpy(), dtype=torch.int32, count=39, offset=2), rank)
    parallel_assert(torch.equal(memory[:39], crooked), "an address between two elements")
    dist.barrier()


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_lazy_views_and_dtypes(rng, group, dtype):
    check, (rank, *_) = Check(), ring()
    memory = dist.zeros(50, dtype=dtype, group=group)
    window = group.new_window(memory)
    values = draw(rng, dtype, 20)
    window.put(values, rank, 3)
    window.put(memory[3:23], rank, 4)
    check.equal(memory[4:24], values, "shifted")
    if dtype in COMPLEX:
        for lazy in (values.conj(), values.conj().imag, -values.conj().imag):
            if lazy.dtype == dtype:
                window.put(lazy, rank)
                check.equal(memory[:20], lazy.resolve_conj().resolve_neg(), "lazy put")
                memory.zero_()
                window.accumulate(lazy, rank)
                check.equal(memory[:20], lazy.resolve_conj().resolve_neg(), "lazy accumulate")
        memory[:20] = values
        into = torch.zeros(20, dtype=dtype).conj()
        window.get(into, rank)
        check.equal(into.resolve_conj(), values, "lazy get")
    elif dtype in REDUCED:
        memory[3:23] = values
        window.accumulate(memory[3:23], rank, 3, op=dist.ReduceOp.MAX)
        check.equal(memory[3:23], values, "with itself")
    check.done()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_denormals_count_whatever_the_thread_has_set(group, dtype):
    tiny = torch.full((20,), torch.finfo(dtype).tiny / 8, dtype=dtype)
    memory = dist.empty(20, dtype=dtype, group=group).copy_(tiny)
    window = group.new_window(memory)
    rank, _, before, after = ring()
    dist.barrier()
    torch.set_flush_denormal(rank % 2 == 0)
    try:
        window.accumulate(tiny, after)
        kept = bool((tiny.double() * 1 == 0).all()) if dtype == torch.float64 else None
    finally:
        torch.set_flush_denormal(False)
    dist.barrier()
    parallel_assert(torch.equal(memory.view(torch.uint8), (tiny + tiny).view(torch.uint8)))
    parallel_assert(kept in (None, rank % 2 == 0), "the thread's mode was lost")


def test_tensors_without_memory_are_refused(group):
    from torch._subclasses.fake_tensor import FakeTensorMode

    memory = dist.zeros(8, group=group)
    window = group.new_window(memory)
    rank = dist.get_rank()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(4)
    for tensor, match in (
        (freed, "storage was freed"),
        (fake, "FakeTensor"),
        (torch._efficientzerotensor(4), "without memory"),
        (torch.ones(4).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(4)]), "nested"),
    ):
        for call in (window.put, window.get, window.accumulate):
            with parallel_raises(TypeError, match=match):
                call(tensor, rank)
    for call in (window.put, window.get, window.accumulate):
        with parallel_raises(TypeError, match="vmap"):
            torch.vmap(lambda x, call=call: (call(x, rank), x)[1])(torch.ones(2, 4))
        with parallel_raises(TypeError, match=r"torch\.func"):
            torch.func.grad(lambda x, call=call: (call(x, rank), x.sum())[1])(torch.ones(4))
    parallel_assert(bool((memory == 0).all()), "nothing was written")


@pytest.mark.mpi(min_size=2)
def test_a_window_that_was_registered_in_inference_mode(group):
    *_, after = ring()
    memory = dist.zeros(3, group=group)
    with torch.inference_mode():
        window = group.new_window(memory)
    window.put(torch.ones(3), after)
    window.accumulate(torch.ones(1), after)
    dist.barrier()
    parallel_assert(memory.tolist() == [2, 1, 1], f"{memory}")


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["put", "get"])
def test_memory_that_goes_while_data_move_is_an_error(group, what):
    """The peer gives its tensor memory of its own after an operation that failed."""
    *_, after = ring()
    window = group.new_window(dist.zeros(3, group=group))

    class Goes:
        looks = 0

        @property
        def whole(self):
            self.looks += 1
            return self.looks == 1

    window._parts[after]._keeper = Goes()
    with parallel_raises(dist.DistBackendError, match=f"{what}: .*no longer symmetric"):
        getattr(window, what)(torch.ones(3), after)
    dist.barrier()
