"""Data, references and checks that the collective tests share.

All ranks draw from the same generator, so each knows what every other rank holds and computes the
reference by itself, in exact integers or float64. A case that is wrong is noted and the next one
runs, so the ranks stay in step; ``Check.done`` fails on all ranks together.
"""

from __future__ import annotations

import time
import zlib

import numpy as np
import torch

import hpcdist as dist
from hpcdist import ReduceOp
from hpcdist.testing import parallel_assert

INTS = [
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64,
]  # fmt: skip
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
REDUCED = [torch.bool, *INTS, *FLOATS, *COMPLEX]
FLOAT8 = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
MOVED = [*REDUCED, *FLOAT8]

#: Empty, one, odd, and beyond every eager limit.
SIZES = (0, 1, 7, 40_001)
FACTOR = 0.75
OPS = {
    "SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "PRODUCT": ReduceOp.PRODUCT, "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX, "BAND": ReduceOp.BAND, "BOR": ReduceOp.BOR, "BXOR": ReduceOp.BXOR,
    "PREMUL_SUM": ReduceOp.PREMUL_SUM(FACTOR),
}  # fmt: skip

_BITWISE = ("BAND", "BOR", "BXOR")


def promised(name: str, dtype: torch.dtype) -> bool:
    """Whether the public surface promises a reduction of a dtype."""
    if dtype in FLOAT8:
        return False
    if dtype == torch.bool:
        return name not in ("AVG", "PREMUL_SUM")
    if dtype in INTS:
        return name != "PREMUL_SUM"
    if dtype in COMPLEX:
        return name in ("SUM", "AVG", "PREMUL_SUM")
    return name not in _BITWISE


def pairs():
    """Every promised (name, op, dtype)."""
    return [
        (name, op, dtype) for dtype in REDUCED for name, op in OPS.items() if promised(name, dtype)
    ]


def draw(rng: np.random.Generator, dtype: torch.dtype, shape) -> torch.Tensor:
    """Random values of a dtype: all bits for integers, about 1 in size for floats."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    if dtype in FLOAT8:
        return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).view(dtype)
    if dtype in INTS:
        out = torch.empty(shape, dtype=dtype)
        if out.numel():
            bits = rng.integers(0, 256, out.nbytes, dtype=np.uint8)
            out.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(bits))
        return out
    values = rng.standard_normal(shape)
    if dtype in COMPLEX:
        values = values + 1j * rng.standard_normal(shape)
    return torch.from_numpy(np.asarray(values)).to(dtype)


def poison(dtype: torch.dtype, shape) -> torch.Tensor:
    """An output that holds no value anyone computes: every byte 0xA5 (true for bool)."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    n = int(np.prod(shape, dtype=np.int64))
    bits = torch.full((n * dtype.itemsize,), 1 if dtype == torch.bool else 0xA5, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def raw(tensor) -> bytes:
    """The bytes of a tensor or array, in C order."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    if not tensor.numel():  # an empty tensor may have strides that forbid the view
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def reduce_at_odd_address(
    check: Check, name: str, small: torch.Tensor, n: int, group: dist.ProcessGroup | None = None
) -> None:
    """Check an all_reduce of n elements that repeat `small`; those beside them stay as they are."""
    rank, size = here()
    times = n // len(small) + 1
    parts = [torch.roll(small, 131 * r).repeat(times)[:n] for r in range(size)]
    mine = torch.cat([parts[rank][:3], parts[rank], parts[rank][:3]])
    beside = mine[:3].clone()
    dist.all_reduce(mine[3:-3], OPS[name], group=group)
    label = f"{name} {small.dtype} n={n}"
    check.near(mine[3:-3], *reference(name, parts), label)
    check.everywhere(mine[3:-3], label)
    check.equal(mine[:3], beside, f"{label}: before")
    check.equal(mine[-3:], beside, f"{label}: behind")


def reference(name: str, parts: list[torch.Tensor]):
    """Reduce parts one after another; return values and the rounding error that is allowed.

    Integers and bool are exact (zero error); floats are computed in float64, and each of the
    combinations and the scaling may round once in the dtype's own precision.
    """
    dtype = parts[0].dtype
    if dtype == torch.bool:
        stack = np.stack([p.numpy() for p in parts])
        fold = {
            "SUM": np.any, "MAX": np.any, "BOR": np.any,
            "PRODUCT": np.all, "MIN": np.all, "BAND": np.all,
        }  # fmt: skip
        out = stack.sum(0) % 2 == 1 if name == "BXOR" else fold[name](stack, axis=0)
        return torch.from_numpy(np.asarray(out)), 0
    if dtype in INTS:
        return _exact(name, [p.numpy() for p in parts]), 0
    wide = torch.complex128 if dtype in COMPLEX else torch.float64
    stack = torch.stack([p.to(wide) for p in parts])
    eps = torch.finfo(dtype).eps
    if name in ("MIN", "MAX"):
        return (stack.amin(0) if name == "MIN" else stack.amax(0)), 0
    if name == "PRODUCT":
        out = stack.prod(0)
        return out, len(parts) * eps * out.abs() + torch.finfo(dtype).tiny
    if name == "PREMUL_SUM":
        stack = stack * FACTOR
    scale = 1 / len(parts) if name == "AVG" else 1
    bound = (len(parts) + 1) * eps * stack.abs().sum(0) * scale + torch.finfo(dtype).tiny
    return stack.sum(0) * scale, bound


def _exact(name: str, parts: list[np.ndarray]) -> torch.Tensor:
    """Integers with the wrap-around of their width; AVG divides the wrapped sum, as C does."""
    out = parts[0].copy()
    for part in parts[1:]:
        if name in ("SUM", "AVG"):
            out = out + part
        elif name == "PRODUCT":
            out = out * part
        elif name in _BITWISE:
            out = {"BAND": out & part, "BOR": out | part, "BXOR": out ^ part}[name]
        else:
            out = np.minimum(out, part) if name == "MIN" else np.maximum(out, part)
    if name == "AVG":
        n = len(parts)
        quotient = out // n if out.dtype.kind == "u" else np.sign(out) * (np.abs(out) // n)
        if out.dtype.kind == "i":
            # abs of the smallest integer overflows: divide it apart
            least = np.iinfo(out.dtype).min
            quotient = np.where(out == least, -(-int(least) // n), quotient)
        out = np.asarray(quotient).astype(parts[0].dtype)
    return torch.from_numpy(np.array(out))


class Check:
    """Notes what is wrong on this rank, and fails on all ranks at the end."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.digests: list[int] = []
        self.labels: list[str] = []

    def that(self, condition: bool, label: str) -> None:
        """Note a condition that does not hold."""
        if not condition:
            self.problems.append(label)

    def equal(self, got, want, label: str) -> None:
        """Note a tensor that is not bit for bit the expected one."""
        if got.dtype != want.dtype or tuple(got.shape) != tuple(want.shape):
            self.problems.append(f"{label}: {got.dtype}{tuple(got.shape)} for {want.dtype}")
        elif raw(got) != raw(want):
            self.problems.append(f"{label}: got {got} instead of {want}")

    def near(self, got: torch.Tensor, want: torch.Tensor, bound, label: str) -> None:
        """Note a result that is off by more than its rounding allows; no error: exact."""
        exact = not isinstance(bound, torch.Tensor)
        if exact and want.dtype != got.dtype:
            want = want.to(got.dtype)
        if exact:
            self.equal(got, want, label)
            return
        error = (got.to(want.dtype) - want).abs()
        bad = ~(error <= bound)  # NaN is bad too
        if bad.any():
            at = int(bad.reshape(-1).nonzero()[0])
            self.problems.append(
                f"{label}: element {at} is {got.reshape(-1)[at].item()} instead of "
                f"{want.reshape(-1)[at].item()} (error {error.reshape(-1)[at].item():g}, allowed "
                f"{bound.reshape(-1)[at].item():g}; {int(bad.sum())} of {bad.numel()} are off)"
            )

    def everywhere(self, tensor, label: str) -> None:
        """Note a result that must be bit for bit the same on all ranks; compared in ``done``."""
        self.digests.append(zlib.crc32(raw(tensor)))
        self.labels.append(label)

    def done(self) -> None:
        """Compare what must be alike, and fail on all ranks if anything was noted on any."""
        __tracebackhide__ = True
        if self.digests:
            own = torch.tensor(self.digests)
            out = torch.empty(dist.get_world_size(), len(own), dtype=torch.int64)
            dist.all_gather_into_tensor(out, own)
            for i in (out != out[0]).any(0).nonzero().reshape(-1).tolist():
                self.problems.append(f"{self.labels[i]}: bits differ between ranks")
        shown = self.problems[:8]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - 8} more")
        parallel_assert(not self.problems, lambda: "\n".join(shown))


def finish(work, async_op: bool) -> None:
    """Wait for what an operation returned, which must be a Work only when it was asked for."""
    if async_op:
        assert work.wait() is True and work.is_completed() and work.is_success()
    else:
        assert work is None


def here() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def late(rank: int, size: int, seconds: float) -> None:
    """Let the last rank come late."""
    if rank == size - 1:
        time.sleep(seconds)


def ring() -> tuple[int, int, int, int]:
    """This rank, the number of ranks, the rank before and the one after."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, size, (rank - 1) % size, (rank + 1) % size
