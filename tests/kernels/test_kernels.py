"""The reduction kernels of every instruction set here, against NumPy and torch, bit by bit.

Data is fresh in every run; a failing test shows the seed it used.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hpcdist import _ops
from hpcdist.dtypes import DTYPES, DType, lookup, reducible_by

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

SEED = int(os.environ.get("HPCDIST_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
ISAS = _ops.available_isas()
SIZES = [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 100, 1023, 100_003]
HALVES = ["float16", "bfloat16"]
QUIET_NAN = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
}
# Every kind of float: zero, denormals, normals at the edges, infinity, NaNs with payload.
SPECIAL_BITS = {
    "float16": [0, 1, 0x3FF, 0x400, 0x3BFF, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF],
    "bfloat16": [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF],
    "float32": [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001]
    + [0x7FC00000, 0x7FFFFFFF],
    "float64": [0, 1, 0xFFFFFFFFFFFFF, 0x10000000000000, 0x3FF0000000000000, 0x7FEFFFFFFFFFFFFF]
    + [0x7FF0000000000000, 0x7FF0000000000001, 0x7FF8000000000000, 0x7FFFFFFFFFFFFFFF],
}
REDUCTIONS = [(op, dtype) for dtype in DTYPES for op in dtype.ops]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ from test to test and from run to run."""
    print(f"HPCDIST_TEST_SEED={SEED}")
    return np.random.default_rng([SEED, zlib.crc32(request.node.name.encode())])


@pytest.fixture(autouse=True)
def restore_isa() -> Iterator[None]:
    yield
    _ops.force_isa("auto")


def part(dtype: DType) -> DType:
    """The real type a complex number is a pair of; any other type itself."""
    return {"complex64": lookup("float32"), "complex128": lookup("float64")}.get(dtype.name, dtype)


def raw(dtype: DType) -> np.dtype:
    """Unsigned integers as wide as the (real) type."""
    return np.dtype(f"u{part(dtype).itemsize}")


def draw(rng: np.random.Generator, dtype: DType, n: int) -> np.ndarray:
    """The bits of `n` elements: half anything at all, the rest ordinary and special values."""
    kind = raw(dtype)
    count = n * dtype.itemsize // kind.itemsize
    bits = rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
    if dtype.kind == "bool":
        bits[rng.random(count) < 0.4] = 0
        bits[rng.random(count) < 0.4] = 1
    if part(dtype).kind == "float":
        ordinary = rng.random(count) < 0.4
        values = rng.normal(scale=3, size=count)
        bits[ordinary] = from_values(values, part(dtype))[ordinary]
        special = np.array(SPECIAL_BITS[part(dtype).name], kind)
        special = np.concatenate([special, special | kind.type(1 << (8 * kind.itemsize - 1))])
        chosen = rng.random(count) < 0.2
        bits[chosen] = rng.choice(special, count)[chosen]
    return bits


def to_values(bits: np.ndarray, dtype: DType) -> np.ndarray:
    """The numbers behind the bits of a float type, in float64 or float32."""
    if dtype.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(dtype.name)


def from_values(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Bits of a float type, each value rounded once to nearest even; NaNs made the one NaN."""
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16":
            single = torch.from_numpy(values.astype(np.float32))
            bits = single.to(torch.bfloat16).view(torch.uint16).numpy().copy()
        else:
            bits = values.astype(dtype.name).view(raw(dtype))
    bits[np.isnan(values)] = QUIET_NAN[dtype.name]
    return bits


def expect_bool(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    either = {"SUM": np.logical_or, "MAX": np.logical_or, "BOR": np.logical_or}
    both = {"PRODUCT": np.logical_and, "MIN": np.logical_and, "BAND": np.logical_and}
    return ({**either, **both, "BXOR": np.logical_xor}[op](a, b)).astype(np.uint8)


def expect_integer(op: str, a: np.ndarray, b: np.ndarray, dtype: DType) -> np.ndarray:
    ufunc = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum}
    ufunc |= {"MAX": np.maximum, "BAND": np.bitwise_and, "BOR": np.bitwise_or}
    ufunc |= {"BXOR": np.bitwise_xor}
    return ufunc[op](a.view(dtype.name), b.view(dtype.name)).view(raw(dtype))


def expect_float(op: str, a: np.ndarray, b: np.ndarray, dtype: DType) -> np.ndarray:
    x, y = to_values(a, dtype), to_values(b, dtype)
    with np.errstate(all="ignore"):
        if op in ("SUM", "AVG", "PREMUL_SUM"):
            return from_values(x + y, dtype)
        if op == "PRODUCT":
            return from_values(x * y, dtype)
        least = op == "MIN"
        # The smaller where they differ; among zeros the one whose sign says so.
        first = (x < y) if least else (x > y)
        first |= (x == y) & (np.signbit(x) == least)
        result = np.where(first, a, b)
        result[np.isnan(x) | np.isnan(y)] = QUIET_NAN[dtype.name]
        return result


def expect(op: str, a: np.ndarray, b: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype.kind == "bool":
        return expect_bool(op, a, b)
    if dtype.kind in ("int", "uint"):
        return expect_integer(op, a, b, dtype)
    return expect_float(op, a, b, part(dtype))


def at(offset: int, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of `bits` as bytes, `offset` bytes into a larger buffer full of 0xA5."""
    whole = np.full(bits.nbytes + 128, 0xA5, np.uint8)
    start = -whole.ctypes.data % 64 + offset
    inside = whole[start : start + bits.nbytes]
    inside[:] = bits.view(np.uint8)
    return whole, inside


def untouched_around(whole: np.ndarray, inside: np.ndarray) -> bool:
    start = inside.ctypes.data - whole.ctypes.data
    return bool((whole[:start] == 0xA5).all() and (whole[start + inside.nbytes :] == 0xA5).all())


def equal(got: np.ndarray, want: np.ndarray, note: str) -> None:
    got = got.view(want.dtype)
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        i = wrong[0]
        pytest.fail(
            f"{note}: {wrong.size} of {want.size} wrong, first at {i}: "
            f"{got[i]:#x} instead of {want[i]:#x}"
        )


def run(op: str, dtype: DType, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a op b`` as bits."""
    out = b.copy()
    _ops.reduce_into(out.view(np.uint8), a.view(np.uint8), dtype.code, op)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_reduces(op: str, dtype: DType, isa: str, rng: np.random.Generator) -> None:
    _ops.force_isa(isa)
    for n in SIZES:
        for offset_a, offset_b in [(0, 0), (1, 3), (dtype.itemsize, 0), (2, 61)]:
            a, b = draw(rng, dtype, n), draw(rng, dtype, n)
            whole_a, in_ = at(offset_a, a)
            whole_b, inout = at(offset_b, b)
            before = whole_a.copy()
            note = f"{op} {dtype} {isa}, {n} elements at {offset_a}, {offset_b}"
            whole, apart = at(offset_a + 5, draw(rng, dtype, n))
            _ops.reduce_into(apart, in_, dtype.code, op, inout)
            equal(apart.copy(), expect(op, a, b, dtype), f"{note}, apart")
            assert untouched_around(whole, apart), f"{note}: wrote outside its output"
            _ops.reduce_into(inout, in_, dtype.code, op)
            equal(inout.copy(), expect(op, a, b, dtype), note)
            assert np.array_equal(whole_a, before), f"{note}: changed its input"
            assert untouched_around(whole_b, inout), f"{note}: wrote outside its output"


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_order_and_instruction_set_do_not_matter(
    op: str, dtype: DType, rng: np.random.Generator
) -> None:
    a, b = draw(rng, dtype, 20_011), draw(rng, dtype, 20_011)
    _ops.force_isa("scalar")
    want = run(op, dtype, a, b)
    for isa in ISAS:
        _ops.force_isa(isa)
        equal(run(op, dtype, a, b), want, f"{op} {dtype} {isa}")
        equal(run(op, dtype, b, a), want, f"{op} {dtype} {isa}, operands swapped")


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("dtype", [lookup(name) for name in QUIET_NAN], ids=str)
def test_extremes_of_special_values(op: str, dtype: DType) -> None:
    kind = raw(dtype).type
    sign = kind(1 << (8 * dtype.itemsize - 1))
    infinity = kind(SPECIAL_BITS[dtype.name][-4])
    assert np.isposinf(to_values(np.array([infinity]), dtype)[0])
    zero, tiny, nan = kind(0), kind(1), kind(QUIET_NAN[dtype.name])
    ascending = [infinity | sign, tiny | sign, zero | sign, zero, tiny, infinity]
    for isa in ISAS:
        _ops.force_isa(isa)
        for i, low in enumerate(ascending):
            for high in ascending[i:]:
                got = run(op, dtype, np.array([low]), np.array([high]))
                assert got[0] == (low if op == "MIN" else high)
            for some_nan in (nan, nan | sign, nan | kind(1), infinity | kind(1)):
                assert run(op, dtype, np.array([low]), np.array([some_nan]))[0] == nan
                assert run(op, dtype, np.array([some_nan]), np.array([low]))[0] == nan


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", HALVES)
def test_every_half_survives_the_way_through_float32(name: str, isa: str) -> None:
    _ops.force_isa(isa)
    dtype = lookup(name)
    every = np.arange(65536, dtype=np.uint16)
    tensor = torch.from_numpy(every.view(np.int16).copy()).view(dtype.torch_dtype)
    want = np.where(tensor.isnan().numpy(), np.uint16(QUIET_NAN[name]), every)
    assert (want == QUIET_NAN[name]).sum() == (2046 if name == "float16" else 254)
    times_one = np.empty_like(every)
    _ops.scale_mul(times_one.view(np.uint8), every.view(np.uint8), name, 1.0)
    equal(times_one, want, "times one")
    equal(run("SUM", dtype, every, np.full_like(every, 0x8000)), want, "plus -0")
    by_one = every.copy()
    _ops.scale_div(by_one.view(np.uint8), name, 1)
    equal(by_one, want, "divided by one")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
@pytest.mark.parametrize("name", HALVES)
def test_halves_round_as_torch_does(name: str, op: str, isa: str, rng: np.random.Generator) -> None:
    _ops.force_isa(isa)
    dtype = lookup(name)
    every = np.arange(65536, dtype=np.uint16)
    tensor = torch.from_numpy(every.view(np.int16).copy()).view(dtype.torch_dtype)
    for other in rng.integers(0, 65536, 48).tolist() + SPECIAL_BITS[name]:
        b = np.full_like(every, other)
        y = torch.from_numpy(b.view(np.int16).copy()).view(dtype.torch_dtype)
        wide = tensor.float() + y.float() if op == "SUM" else tensor.float() * y.float()
        rounded = wide.to(dtype.torch_dtype)
        want = rounded.view(torch.int16).numpy().view(np.uint16).copy()
        want[rounded.isnan().numpy()] = QUIET_NAN[name]
        equal(run(op, dtype, every, b), want, f"{op} with {other:#x}")


def truncated(values: np.ndarray, divisor: int) -> np.ndarray:
    """Integer quotients towards zero, in Python's exact integers."""
    return np.array(
        [abs(v) // divisor * (1 if v >= 0 else -1) for v in values.tolist()], values.dtype
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind in ("int", "uint")], ids=str)
def test_integers_divide_like_c(dtype: DType, isa: str, rng: np.random.Generator) -> None:
    _ops.force_isa(isa)
    info = np.iinfo(dtype.name)
    random_divisors = [int(d) for d in rng.integers(2, 1 << 20, 4)]
    for divisor in [1, 2, 3, 7, 255, 256, 65537, (1 << 31) - 1, 1 << 33, *random_divisors]:
        # Next to a multiple is where a division rounded in floating point would go wrong.
        factors = rng.integers(
            info.min // divisor,
            info.max // divisor,
            300,
            endpoint=True,
            dtype=np.int64 if info.min else np.uint64,
        )
        near = [int(q) * divisor + d for q in factors for d in (-1, 0, 1)]
        near += [info.min, info.min + 1, info.max - 1, info.max, 0]
        values = np.array([v for v in near if info.min <= v <= info.max], dtype.name)
        got = values.copy()
        _ops.scale_div(got.view(np.uint8), dtype.code, divisor)
        assert np.array_equal(got, truncated(values, divisor)), f"by {divisor}"
    if dtype.itemsize <= 2:
        every = np.arange(info.min, info.max + 1).astype(dtype.name)
        for divisor in [2, 3, 5, 6, 127, 1000, random_divisors[0]]:
            got = every.copy()
            _ops.scale_div(got.view(np.uint8), dtype.code, divisor)
            assert np.array_equal(got, truncated(every, divisor)), f"every value by {divisor}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", reducible_by("PREMUL_SUM"), ids=str)
def test_floats_scale(dtype: DType, isa: str, rng: np.random.Generator) -> None:
    _ops.force_isa(isa)
    real = part(dtype)
    single = np.float64 if real.name == "float64" else np.float32
    for n in SIZES:
        for offset in (0, 1, 6):
            bits = draw(rng, dtype, n)
            values = to_values(bits, real)
            divisor = int(rng.integers(1, 5000))
            factor = float(rng.choice([1 / 3, -0.5, 1e-4, 1e4, 1 / divisor]))
            outer, buf = at(offset, bits)
            _ops.scale_div(buf, dtype.code, divisor)
            with np.errstate(all="ignore"):
                quotients = from_values(values / single(divisor), real)
                products = from_values(values * single(factor), real)
            note = f"{dtype} {isa}, {n} elements at {offset}"
            equal(buf.copy(), quotients, f"{note}, divided by {divisor}")
            assert untouched_around(outer, buf), f"{note}: wrote outside its output"
            _, src = at(offset, bits)
            whole, dst = at(offset + 1, np.zeros_like(bits))
            _ops.scale_mul(dst, src, dtype.code, factor)
            equal(dst.copy(), products, f"{note}, times {factor}")
            equal(src.copy(), bits, f"{note}, source of times")
            assert untouched_around(whole, dst), f"{note}: wrote outside its output"
            _ops.scale_mul(src, src, dtype.code, factor)
            equal(src.copy(), products, f"{note}, times {factor} in place")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("divisor", [2, 3, 5, 7, 12, 100, 1023, 2048])
def test_half_quotients_are_the_nearest_there_are(divisor: int, isa: str) -> None:
    # float64 has the quotient of float16 by a small integer exactly enough to round it once.
    _ops.force_isa(isa)
    every = np.arange(65536, dtype=np.uint16)
    got = every.copy()
    _ops.scale_div(got.view(np.uint8), "float16", divisor)
    with np.errstate(all="ignore"):
        wide = every.view(np.float16).astype(np.float64) / divisor
    equal(got, from_values(wide, lookup("float16")), f"by {divisor}")


@pytest.mark.parametrize("isa", ISAS)
def test_flushing_denormals_changes_no_extreme_and_no_float16(
    isa: str, rng: np.random.Generator
) -> None:
    # A thread's flush-to-zero mode must not let ranks disagree.
    _ops.force_isa(isa)
    cases = [("MIN", name) for name in QUIET_NAN] + [("MAX", name) for name in QUIET_NAN]
    drawn = []
    for op, name in [*cases, ("SUM", "float16"), ("PRODUCT", "float16")]:
        dtype = lookup(name)
        a, b = draw(rng, dtype, 5000), draw(rng, dtype, 5000)
        for bits in (a, b):  # denormals of both signs
            bits[:1000] &= raw(dtype).type((1 << (8 * dtype.itemsize - 1)) | 0x7F)
        drawn.append((op, dtype, a, b, expect(op, a, b, dtype)))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        got = [run(op, dtype, a, b) for op, dtype, a, b, _ in drawn]
    finally:
        torch.set_flush_denormal(False)
    for result, (op, dtype, _, _, want) in zip(got, drawn, strict=True):
        equal(result, want, f"{op} {dtype}")


def test_large_buffers_from_several_threads(rng: np.random.Generator) -> None:
    dtype = lookup("bfloat16")
    inputs = [(draw(rng, dtype, 300_001), draw(rng, dtype, 300_001)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda pair: run("SUM", dtype, *pair), inputs))
    for (a, b), got in zip(inputs, results, strict=True):
        equal(got, expect("SUM", a, b, dtype), "SUM bfloat16 in a thread")
