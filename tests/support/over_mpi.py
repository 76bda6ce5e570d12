"""What the tests of CUDA tensors over MPI share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import cases
import standin
import torch
from standin import cpu, gpu

import hpcdist as dist

#: Bytes of a buffer in these tests: its edge is near.
CHUNK = 1024


def start(seconds: float = 20.0, backend: str | None = "mpi") -> None:
    """The default group anew."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def sizes(dtype: torch.dtype) -> tuple[int, ...]:
    """Elements around the edge of a buffer."""
    n = CHUNK // dtype.itemsize
    return 0, 1, n - 1, n, 3 * n + 5


def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Poison on the device."""
    return gpu(torch.full((n * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype))


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To the last bit."""
    return cases.raw(cpu(found)) == cases.raw(wanted)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same, but for the order in which floats were added: pieces may take another."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return equal(found, wanted)
    eps = torch.finfo(wanted.dtype).eps * 8 * dist.get_world_size()
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    return torch.allclose(cpu(found).to(wide), wanted.to(wide), rtol=eps, atol=eps, equal_nan=True)


def right(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor | int) -> bool:
    """As :func:`cases.reference` has it, within its bound."""
    check = cases.Check()
    check.near(cpu(found), wanted, bound, "")
    return not check.problems


class Copies:
    """Counts the copies to and from pinned memory while it stands in their place."""

    def __init__(self, fails: int, on_copy: Callable[[int], None] | None) -> None:
        self.count = 0
        self._fails = fails
        self._on_copy = on_copy

    def copy(self, runtime: Any, *about: Any) -> None:
        self.count += 1
        if self._on_copy is not None:
            self._on_copy(self.count)
        if self.count == self._fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        standin.Runtime.copy(runtime, *about)


@contextmanager
def copies(
    runtime: Any, fails: int = 0, on_copy: Callable[[int], None] | None = None
) -> Iterator[Copies]:
    """Watch a runtime's copies; from 1, the one of that number fails."""
    counted = Copies(fails, on_copy)
    runtime.copy = lambda *about: counted.copy(runtime, *about)
    try:
        yield counted
    finally:
        del runtime.copy
