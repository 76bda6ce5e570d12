"""all_reduce, all_reduce_coalesced, reduce, reduce_scatter against exact and float64 references."""

import numpy as np
import pytest
import torch
from cases import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    OPS,
    REDUCED,
    SIZES,
    Check,
    draw,
    finish,
    here,
    pairs,
    poison,
    promised,
    raw,
    reference,
)

import hpcdist as dist
from hpcdist import ReduceOp
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_all_reduce(rng, async_op):
    check, (rank, size) = Check(), here()
    for name, op, dtype in pairs():
        for n in SIZES:
            label = f"all_reduce {name} {dtype} n={n}"
            parts = [draw(rng, dtype, n) for _ in range(size)]
            want, bound = reference(name, parts)
            tensor = parts[rank].clone()
            finish(dist.all_reduce(tensor, op, async_op=async_op), async_op)
            check.near(tensor, want, bound, label)
            check.everywhere(tensor, label)
            again = parts[rank].clone()
            finish(dist.all_reduce(again, op, async_op=not async_op), not async_op)
            check.equal(again, tensor, f"{label}, repeated")
    check.done()


def test_all_reduce_at_every_small_size(rng):
    """Vector kernels have tails: every size around their widths, at odd addresses."""
    check, (rank, size) = Check(), here()
    for name, dtype in [
        ("SUM", torch.bfloat16), ("MAX", torch.float16), ("SUM", torch.float32),
        ("MIN", torch.float64), ("BXOR", torch.bool), ("PRODUCT", torch.int8),
        ("AVG", torch.int16), ("PREMUL_SUM", torch.complex64),
    ]:  # fmt: skip
        for n in (*range(2, 70), 127, 128, 129, 255, 257):
            parts = [draw(rng, dtype, n + 1) for _ in range(size)]
            want, bound = reference(name, [part[1:] for part in parts])
            tensor = parts[rank].clone()
            dist.all_reduce(tensor[1:], OPS[name])
            check.near(tensor[1:], want, bound, f"{name} {dtype} n={n}")
            check.equal(tensor[:1], parts[rank][:1], f"{name} {dtype} n={n}: the element before")
    check.done()


def test_all_reduce_in_chunks(rng):
    """Beyond the chunks of 8 MiB, and not a multiple of it; async too."""
    check, (rank, size) = Check(), here()
    for name, dtype, n in [
        ("SUM", torch.float32, 2_200_003),
        ("AVG", torch.bfloat16, 4_300_001),
        ("MAX", torch.int8, 17_000_003),
        ("SUM", torch.complex128, 550_001),
    ]:
        small = draw(rng, dtype, 10_007)
        parts = [torch.roll(small, 131 * r).repeat(n // 10_007 + 1)[:n] for r in range(size)]
        want, bound = reference(name, parts)
        for async_op in (False, True):
            tensor = parts[rank].clone()
            finish(dist.all_reduce(tensor, OPS[name], async_op=async_op), async_op)
            check.near(tensor, want, bound, f"{name} {dtype} n={n} async={async_op}")
            check.everywhere(tensor, f"{name} {dtype} n={n} async={async_op}")
    check.done()


def special(dtype):
    """Every pair of special values meets once."""
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.5]
    return torch.tensor([(a, b) for a in values for b in values], dtype=dtype).T


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_min_max_of_nan_zero_and_infinity(async_op):
    """NaN wins wherever it sits, -0 is less than +0, and all ranks hold the same bits."""
    check, (rank, size) = Check(), here()
    for dtype in FLOATS:
        first, second = special(dtype)
        for holder in range(size):
            mine = first if rank == holder else second
            for op in (ReduceOp.MIN, ReduceOp.MAX):
                tensor = mine.clone().contiguous()
                finish(dist.all_reduce(tensor, op, async_op=async_op), async_op)
                a, b = first.double(), second.double() if size > 1 else first.double()
                nan = a.isnan() | b.isnan()
                want = torch.minimum(a, b) if op == ReduceOp.MIN else torch.maximum(a, b)
                label = f"{op} {dtype}, holder {holder}"
                check.that(bool((tensor.isnan() == nan).all()), f"{label}: NaN: {tensor}")
                got = tensor.double()
                check.that(bool((got[~nan] == want[~nan]).all()), f"{label}: {got} for {want}")
                zero = ~nan & (a == 0) & (b == 0)
                negative = a.signbit() | b.signbit()
                if op == ReduceOp.MAX:
                    negative = a.signbit() & b.signbit()
                ok = got.signbit()[zero] == negative[zero]
                check.that(bool(ok.all()), f"{label}: sign of zero: {got[zero]}")
                check.everywhere(tensor, label)
    check.done()


def test_nan_with_any_payload():
    """Signalling, negative and payload NaNs end in one NaN on all ranks, in MIN and MAX."""
    check, (rank, size) = Check(), here()
    bits = {
        torch.float16: (torch.int16, [0x7E01, -1, 0x7C01]),
        torch.bfloat16: (torch.int16, [0x7FC1, -1, 0x7F81]),
        torch.float32: (torch.int32, [0x7FC12345, -1, 0x7F800001]),
        torch.float64: (torch.int64, [0x7FF8000000000123, -1, 0x7FF0000000000001]),
    }
    for dtype, (ints, patterns) in bits.items():
        for name in ("MIN", "MAX"):
            for holder in range(size):
                tensor = torch.ones(3, dtype=dtype)
                if rank == holder:
                    tensor = torch.tensor(patterns, dtype=ints).view(dtype)
                dist.all_reduce(tensor, OPS[name])
                check.that(bool(tensor.isnan().all()), f"{name} {dtype} lost a NaN: {tensor}")
                check.everywhere(tensor, f"{name} {dtype}, holder {holder}")
    check.done()


def test_a_sum_of_different_nans_is_some_nan():
    """Also where results are compared: which NaN it is may differ from rank to rank."""
    check, (rank, size) = Check(), here()
    group = dist.new_group(pg_options=dist.MPIOptions(check="full"))
    for dtype, quiet in (
        (torch.float16, 0x7E00),
        (torch.bfloat16, 0x7FC0),
        (torch.float32, 0x7FC00000),
        (torch.float64, 0x7FF8 << 48),
    ):
        ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        for n in (1, 31, 1000, 300_001):
            tensor = torch.full((n,), quiet + rank + 1, dtype=ints).view(dtype)
            tensor[n // 2] = 1
            dist.all_reduce(tensor, group=group)
            check.that(int(tensor.isnan().sum()) == n - 1, f"{dtype} {n}: {tensor}")
            check.that(tensor[n // 2] == size, f"{dtype} {n}: {tensor}")
    dist.destroy_process_group(group)
    check.done()


def test_half_types_accumulate_in_float32():
    """Sums that a float16 or bfloat16 adder would get wrong by more than one rounding."""
    check, (rank, size) = Check(), here()
    for dtype in (torch.float16, torch.bfloat16):
        big = 2.0 / torch.finfo(dtype).eps  # at `big`, adding 1 is half a unit in the last place
        tensor = torch.tensor([big if rank == 0 else 3.0, 1.0], dtype=dtype)
        parts = [torch.tensor([big if r == 0 else 3.0, 1.0], dtype=dtype) for r in range(size)]
        want, bound = reference("SUM", parts)
        dist.all_reduce(tensor)
        check.near(tensor, want, bound, str(dtype))
        # the average of large values must not overflow on the way
        huge = torch.full((5,), torch.finfo(dtype).max / 8, dtype=dtype)
        mean = huge.clone()
        dist.all_reduce(mean, ReduceOp.AVG)
        want, bound = reference("AVG", [huge] * size)
        check.near(mean, want, bound, f"AVG {dtype}")
    check.done()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_all_reduce_coalesced(rng, async_op):
    check, (rank, size) = Check(), here()
    shapes = [(3,), (0,), (), (5, 7), (4001,)]
    for name, op, dtype in pairs():
        parts = [[draw(rng, dtype, shape) for shape in shapes] for _ in range(size)]
        tensors = [t.clone() for t in parts[rank]]
        finish(dist.all_reduce_coalesced(tensors, op, async_op=async_op), async_op)
        for i, shape in enumerate(shapes):
            want, bound = reference(name, [part[i] for part in parts])
            check.near(tensors[i], want, bound, f"coalesced {name} {dtype} {shape}")
            check.everywhere(tensors[i], f"coalesced {name} {dtype} {shape}")
    check.done()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_reduce(rng, async_op):
    check, (rank, size) = Check(), here()
    for i, (name, op, dtype) in enumerate(pairs()):
        root = i % size
        for n in SIZES:
            parts = [draw(rng, dtype, n) for _ in range(size)]
            tensor = parts[rank].clone()
            finish(dist.reduce(tensor, root, op, async_op=async_op), async_op)
            label = f"reduce to {root} {name} {dtype} n={n}"
            if rank == root:
                want, bound = reference(name, parts)
                check.near(tensor, want, bound, label)
            else:
                check.equal(tensor, parts[rank], f"{label}: input changed off the root")
    check.done()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_reduce_scatter_tensor(rng, async_op):
    check, (rank, size) = Check(), here()
    for name, op, dtype in pairs():
        for n in (0, 1, 7, 10_001):
            parts = [draw(rng, dtype, n * size) for _ in range(size)]
            kept = parts[rank].clone()
            out = poison(dtype, n)
            finish(dist.reduce_scatter_tensor(out, parts[rank], op, async_op=async_op), async_op)
            want, bound = reference(name, [part[rank * n : (rank + 1) * n] for part in parts])
            label = f"reduce_scatter_tensor {name} {dtype} n={n}"
            check.near(out, want, bound, label)
            check.equal(parts[rank], kept, f"{label}: the input changed")
    # the input as a stack, and the other name
    out = torch.empty(4)
    dist.reduce_scatter_single(out, torch.arange(4.0 * size).reshape(size, 4))
    check.equal(
        out, torch.arange(4.0 * size).reshape(size, 4)[rank] * size, "reduce_scatter_single"
    )
    check.done()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_reduce_scatter_of_uneven_lists(rng, async_op):
    check, (rank, size) = Check(), here()
    for name, op, dtype in pairs():
        for counts in ([3] * size, [5 * r for r in range(size)], [0] * (size - 1) + [3001]):
            parts = [[draw(rng, dtype, n) for n in counts] for _ in range(size)]
            kept = [t.clone() for t in parts[rank]]
            out = poison(dtype, counts[rank])
            finish(dist.reduce_scatter(out, parts[rank], op, async_op=async_op), async_op)
            want, bound = reference(name, [part[rank] for part in parts])
            label = f"reduce_scatter {name} {dtype} {counts}"
            check.near(out, want, bound, label)
            for a, b in zip(parts[rank], kept, strict=True):
                check.equal(a, b, f"{label}: an input changed")
    check.done()


def test_large_reduce_and_reduce_scatter(rng):
    check, (rank, size) = Check(), here()
    n = 1_500_007
    small = draw(rng, torch.float32, 10_007)
    times = -(-n * size // 10_007)
    parts = [torch.roll(small, 17 * r).repeat(times)[: n * size] for r in range(size)]
    out = torch.empty(n)
    dist.reduce_scatter_tensor(out, parts[rank])
    want, bound = reference("SUM", [part[rank * n : (rank + 1) * n] for part in parts])
    check.near(out, want, bound, "reduce_scatter_tensor")
    tensor = parts[rank].clone()
    dist.reduce(tensor, size - 1)
    if rank == size - 1:
        check.near(tensor, *reference("SUM", parts), "reduce")
    check.done()


def test_refused_before_anything_is_sent():
    """What is not promised is an error on every rank, and the group goes on."""
    rank, size = here()
    for dtype in [*REDUCED, *FLOAT8]:
        for name, op in OPS.items():
            if promised(name, dtype):
                continue
            for call in (
                lambda t, op=op: dist.all_reduce(t, op),
                lambda t, op=op: dist.all_reduce(t, op, async_op=True),
                lambda t, op=op: dist.all_reduce_coalesced([t], op),
                lambda t, op=op: dist.reduce(t, 0, op),
                lambda t, op=op: dist.reduce_scatter_tensor(t[:2], t, op),
                lambda t, op=op: dist.reduce_scatter(t[:2], [t[:2]] * size, op),
            ):
                tensor = poison(dtype, 2 * size)
                try:
                    call(tensor)
                except (TypeError, ValueError) as exc:
                    text = str(exc)
                else:
                    text = None
                assert text is not None, f"{name} of {dtype} was accepted"
                assert str(dtype)[6:].split("_")[0] in text or name in text, text
                assert raw(tensor) == raw(poison(dtype, 2 * size))
    done = torch.ones(1)
    dist.all_reduce(done)
    parallel_assert(done.item() == size)


def test_wrong_arguments():
    rank, size = here()
    base = torch.zeros(8, 8)
    for bad, error in [
        (base[:, ::2], ValueError),
        (base[::2], ValueError),
        (torch.zeros(1).expand(4), ValueError),
        (torch.zeros(3, 3).to_sparse_csr(), TypeError),
        (torch.zeros(3, device="meta"), TypeError),
        ([1.0, 2.0], TypeError),
        (3.0, TypeError),
        (None, TypeError),
        (np.zeros(3, dtype=object), TypeError),
        (np.zeros(3, dtype="U3"), TypeError),
        (np.zeros(3, dtype=">f8"), TypeError),
        (np.zeros((4, 4))[:, 1], ValueError),
        (b"bytes are read-only", (TypeError, ValueError)),
    ]:
        with parallel_raises(error):
            dist.all_reduce(bad)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with parallel_raises((TypeError, ValueError)):
        dist.all_reduce(frozen)
    with parallel_raises(TypeError):
        dist.all_reduce(torch.zeros(1), "no such op" if size else None)
    with parallel_raises(TypeError):
        dist.all_reduce(torch.zeros(1), 3.5)
    with parallel_raises(ValueError):
        dist.reduce(torch.zeros(1), size)
    with parallel_raises(ValueError):
        dist.reduce(torch.zeros(1), 0, group_dst=0)
    with parallel_raises(ValueError):
        dist.reduce(torch.zeros(1))
    with parallel_raises(ValueError):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * size + 1))
    with parallel_raises(TypeError):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * size).double())
    with parallel_raises(ValueError):
        dist.reduce_scatter(torch.zeros(3), [torch.zeros(3)] * (size + 1))
    with parallel_raises(ValueError):
        dist.reduce_scatter(torch.zeros(2), [torch.zeros(3)] * size)
    with parallel_raises(TypeError):
        dist.all_reduce_coalesced([torch.zeros(2), torch.zeros(2).double()])
    with parallel_raises(ValueError):
        dist.all_reduce_coalesced([])


def test_reduce_ops_of_torch_and_names(rng):
    """torch.distributed's own ReduceOp and deprecated names mean the same."""
    import torch.distributed as td

    check, (rank, size) = Check(), here()
    parts = [draw(rng, torch.int32, 9) for _ in range(size)]
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        want, bound = reference(name, parts)
        for op in (getattr(td.ReduceOp, name), name):
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op)
            check.near(tensor, want, bound, f"{name} as {op!r}")
    for factor in (2.0, torch.tensor(2.0)):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, ReduceOp.PREMUL_SUM(factor))
        check.equal(tensor, torch.full((3,), 2.0 * size), f"PREMUL_SUM({factor!r})")
    check.done()


def test_complex_views(rng):
    check, (rank, size) = Check(), here()
    for dtype in COMPLEX:
        parts = [draw(rng, dtype, (6, 5)) for _ in range(size)]
        tensor = parts[rank].clone().mH.contiguous()
        dist.all_reduce(tensor)
        check.near(tensor, *reference("SUM", [p.mH.contiguous() for p in parts]), str(dtype))
        with parallel_raises((TypeError, ValueError)):  # a lazy conjugate is no plain memory
            dist.all_reduce(parts[rank].clone().conj())
        beside_none = [None, parts[rank].clone().conj()]
        with parallel_raises((TypeError, ValueError)):  # ... nor pairs of real numbers
            dist.all_reduce_coalesced(beside_none)
        with parallel_raises((TypeError, ValueError, dist.DistMismatchError)):  # on one rank alone
            plain = [torch.ones(3), torch.ones(2)]
            dist.all_reduce_coalesced(beside_none if rank == size - 1 else plain)
        total = torch.ones(1)
        dist.all_reduce(total)
        check.equal(total, torch.full((1,), float(size)), f"{dtype} afterwards")
    check.done()
