"""all_reduce from a source apart from its tensor, by every way that an all_reduce takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cases import OPS, Check, draw, finish, here, pairs, raw, reference
from forms import intact, output
from nans import NAN, error_of
from worlds import between_nodes

import hpcdist as dist
from hpcdist import _engine
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

#: Bytes: carried by the entry check, a little more, in one piece; and elements in several.
BYTES = (8, 1032, 3_848, 5_000)
LONG = 600_000
STREAM = 8 << 20  # bytes from which results are written past the caches


@pytest.fixture(params=["as they are", "between nodes", "unchecked"])
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """Ranks that share memory, or do not, and without the entry check."""
    made = between_nodes() if request.param == "between nodes" else dist.new_group()
    if request.param == "unchecked":
        made.carrier.check = 0
    yield made
    dist.destroy_process_group(made)


def check_one(
    check: Check,
    rng: np.random.Generator,
    group: dist.ProcessGroup,
    name: str,
    dtype: torch.dtype,
    n: int,
    async_op: bool = False,
    with_source: bool = True,
) -> None:
    rank, size = here()
    parts = [draw(rng, dtype, n) for _ in range(size)]
    tensor, whole = output(dtype, n)
    source: torch.Tensor | None = parts[rank].clone()
    if not with_source:
        tensor.copy_(parts[rank])
        source = None
    work = group.carrier.native.all_reduce(tensor, OPS[name], async_op, source=source)
    finish(work, async_op)
    label = f"{name} {dtype} n={n} async={async_op} source={with_source}"
    check.near(tensor, *reference(name, parts), label)
    check.everywhere(tensor, label)
    intact(check, whole, label)
    if source is not None:
        check.equal(source, parts[rank], f"{label}: the source has changed")


def test_results_past_the_caches(rng: np.random.Generator) -> None:
    check, group = Check(), dist.group.WORLD
    for name, dtype, more, async_op in (
        ("SUM", torch.uint8, -1, False),
        ("SUM", torch.uint8, 77, True),
        ("AVG", torch.float32, 77, False),
        ("AVG", torch.float16, 77, True),
    ):
        check_one(check, rng, group, name, dtype, STREAM // dtype.itemsize + more, async_op)
    check.done()


def test_every_dtype_and_operation(rng: np.random.Generator) -> None:
    check, group = Check(), dist.group.WORLD
    for name, _, dtype in pairs():
        for nbytes in BYTES:
            n = nbytes // dtype.itemsize
            check_one(check, rng, group, name, dtype, n, async_op=nbytes == 5_000)
    check.done()


def test_some_ranks_have_one(rng: np.random.Generator, group: dist.ProcessGroup) -> None:
    check, (rank, size) = Check(), here()
    for name in ("SUM", "PREMUL_SUM"):
        for n in (2, 1_300, LONG):
            for odd in (0, 1):
                for async_op in (False, True):
                    has = rank % 2 == odd and size > 1
                    check_one(check, rng, group, name, torch.float32, n, async_op, has)
    check.done()


def test_in_an_order_of_memory_of_its_own(rng: np.random.Generator) -> None:
    native, (rank, size) = dist.group.WORLD.carrier.native, here()
    parts = [draw(rng, torch.float64, (40, 50, 60)).permute(2, 0, 1) for _ in range(size)]
    tensor = torch.full_like(parts[rank], NAN)
    native.all_reduce(tensor, source=parts[rank])
    wanted, bound = reference("SUM", parts)
    parallel_assert(tensor.stride() == parts[rank].stride())
    parallel_assert(bool(((tensor - wanted).abs() <= bound).all()))


def test_the_tensor_itself(rng: np.random.Generator) -> None:
    native, (rank, size) = dist.group.WORLD.carrier.native, here()
    parts = [draw(rng, torch.int64, 5_000) for _ in range(size)]
    tensor = parts[rank].clone()
    native.all_reduce(tensor, source=tensor)
    parallel_assert(raw(tensor) == raw(reference("SUM", parts)[0]))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (lambda t: torch.zeros(3), "ValueError: source and tensor differ in their shapes"),
        (lambda t: torch.zeros(8, 4).t(), "in the order of their elements"),
        (lambda t: torch.zeros(4, 8, dtype=torch.int32), "TypeError: source is int32"),
        (lambda t: t.view(-1)[1:].as_strided((4, 8), (8, 1)), "source lies in tensor"),
        (lambda t: torch.zeros(4, 16)[:, ::2], "source"),
        (lambda t: [1.0], "source"),
    ],
    ids=["shape", "strides", "dtype", "overlap", "gaps", "list"],
)
def test_what_cannot_be_one_is_refused_on_all_ranks(source, text: str) -> None:
    native, rank = dist.group.WORLD.carrier.native, dist.get_rank()
    memory = torch.arange(40.0)
    tensor = memory[:32].view(4, 8)
    before = tensor.clone()
    if rank == 0:
        error = error_of(lambda: native.all_reduce(tensor, source=source(tensor)))
        parallel_assert(
            error is not None and text in f"{type(error).__name__}: {error}", f"{error}"
        )
    else:
        error = error_of(lambda: native.all_reduce(tensor))
        parallel_assert(isinstance(error, dist.DistMismatchError), f"{error}")
    parallel_assert(torch.equal(tensor, before), "the tensor has changed")


def test_a_nan_in_the_source_is_found_and_one_in_the_tensor_is_not() -> None:
    native, (rank, size) = dist.group.WORLD.carrier.native, here()
    _engine.look_for_nans(True)
    try:
        for n in (2, 500, 300_000):
            tensor, source = torch.full((n,), NAN), torch.ones(n)
            native.all_reduce(tensor, source=source)
            parallel_assert(torch.equal(tensor, torch.full((n,), float(size))), f"{n}")
            if rank == size - 1:
                source[n // 2] = NAN
            error = error_of(lambda: native.all_reduce(tensor, source=source))  # noqa: B023
            wanted = f"NaN at element {n // 2} of {n}"
            parallel_assert(error is not None and wanted in str(error), f"{n}: {error}")
    finally:
        _engine.look_for_nans(False)
