"""all_gather in its forms, and gather: every dtype, even and uneven, bit for bit."""

import numpy as np
import pytest
import torch
from cases import MOVED, SIZES, Check, draw, finish, here, poison

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

SYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def uneven(size: int) -> list[list[int]]:
    """Sizes per rank: growing, nothing but one, and one without anything."""
    return [
        [5 * r for r in range(size)],
        [0] * (size - 1) + [3001],
        [0] + [40_001] * (size - 1),
        [0] * size,
    ]


@SYNC
def test_all_gather_into_tensor(rng, async_op):
    check, (rank, size) = Check(), here()
    for dtype in MOVED:
        for n in SIZES:
            parts = [draw(rng, dtype, n) for _ in range(size)]
            out = poison(dtype, n * size)
            kept = parts[rank].clone()
            work = dist.all_gather_into_tensor(out, parts[rank], async_op=async_op)
            finish(work, async_op)
            check.equal(out, torch.cat(parts), f"{dtype} n={n}")
            check.equal(parts[rank], kept, f"{dtype} n={n}: the input changed")
    parts = [draw(rng, torch.int32, (2, 3)) for _ in range(size)]
    for shape in [(2 * size, 3), (size, 2, 3), (6 * size,)]:
        out = poison(torch.int32, shape)
        finish(dist.all_gather_single(out, parts[rank], async_op=async_op), async_op)
        check.equal(out, torch.cat(parts).reshape(shape), f"shape {shape}")
    check.done()


def test_all_gather_in_place_and_large(rng):
    check, (rank, size) = Check(), here()
    n = 2_500_003
    small = draw(rng, torch.float32, 10_007)
    parts = [torch.roll(small, 19 * r).repeat(n // 10_007 + 1)[:n] for r in range(size)]
    out = poison(torch.float32, n * size)
    out[rank * n : (rank + 1) * n] = parts[rank]
    dist.all_gather_into_tensor(out, out[rank * n : (rank + 1) * n])
    check.equal(out, torch.cat(parts), "in place")
    outs = [poison(torch.float32, n) for _ in range(size)]
    dist.all_gather(outs, parts[rank])
    for r in range(size):
        check.equal(outs[r], parts[r], f"a list, from rank {r}")
    check.done()


@SYNC
def test_all_gather_lists(rng, async_op):
    check, (rank, size) = Check(), here()
    for dtype in MOVED:
        for counts in [*([n] * size for n in SIZES), *uneven(size)]:
            parts = [draw(rng, dtype, n) for n in counts]
            outs = [poison(dtype, n) for n in counts]
            finish(dist.all_gather(outs, parts[rank], async_op=async_op), async_op)
            for r in range(size):
                check.equal(outs[r], parts[r], f"{dtype} {counts}, from rank {r}")
    check.done()


def test_all_gather_into_views_of_one_tensor(rng):
    """Destinations may lie in one tensor, in any order, and have shapes of their own."""
    check, (rank, size) = Check(), here()
    parts = [draw(rng, torch.int64, (r + 1, 3)) for r in range(size)]
    whole = poison(torch.int64, (sum(range(size + 1)), 3))
    views = list(whole.flip(0).clone().split(list(range(1, size + 1))))
    dist.all_gather(views, parts[rank])
    for r in range(size):
        check.equal(views[r], parts[r], f"from rank {r}")
    check.done()


@SYNC
def test_all_gather_coalesced(rng, async_op):
    """One list per rank, shaped like what that rank sends, as torch has it."""
    check, (rank, size) = Check(), here()
    shapes = [(2, 2), (1,), (0,), (), (4001,)]
    for dtype in MOVED:
        parts = [[draw(rng, dtype, shape) for shape in shapes] for _ in range(size)]
        outs = [[poison(dtype, shape) for shape in shapes] for _ in range(size)]
        finish(dist.all_gather_coalesced(outs, parts[rank], async_op=async_op), async_op)
        for r in range(size):
            for i, shape in enumerate(shapes):
                check.equal(outs[r][i], parts[r][i], f"{dtype} {shape} from rank {r}")
    check.done()


@SYNC
def test_gather(rng, async_op):
    check, (rank, size) = Check(), here()
    for i, dtype in enumerate(MOVED):
        root = i % size
        for counts in [*([n] * size for n in SIZES), *uneven(size)]:
            parts = [draw(rng, dtype, n) for n in counts]
            outs = [poison(dtype, n) for n in counts] if rank == root else None
            kept = parts[rank].clone()
            finish(dist.gather(parts[rank], outs, root, async_op=async_op), async_op)
            for r in range(size if outs else 0):
                check.equal(outs[r], parts[r], f"to {root} {dtype} {counts}, from rank {r}")
            check.equal(parts[rank], kept, f"to {root} {dtype} {counts}: the input changed")
    check.done()


def test_gather_defaults_and_group_ranks(rng):
    check, (rank, size) = Check(), here()
    parts = [draw(rng, torch.float32, 3) for _ in range(size)]
    group = dist.new_group(list(range(size)))
    last = size - 1
    for kwargs, root in [({}, 0), ({"dst": last}, last), ({"group_dst": last}, last)]:
        outs = [torch.zeros(3) for _ in range(size)] if rank == root else None
        dist.gather(parts[rank], outs, group=group, **kwargs)
        for r in range(size if outs else 0):
            check.equal(outs[r], parts[r], f"{kwargs}, from rank {r}")
    dist.destroy_process_group(group)
    check.done()


@SYNC
def test_gather_single(rng, async_op):
    check, (rank, size) = Check(), here()
    for i, dtype in enumerate(MOVED):
        root = i % size
        for n in SIZES:
            parts = [draw(rng, dtype, n) for _ in range(size)]
            out = poison(dtype, n * size) if rank == root else None
            finish(dist.gather_single(parts[rank], out, root, async_op=async_op), async_op)
            if out is not None:
                check.equal(out, torch.cat(parts), f"to {root} {dtype} n={n}")
    parts = [draw(rng, torch.int32, (2, 3)) for _ in range(size)]
    for shape in [(2 * size, 3), (size, 2, 3), (6 * size,)]:
        out = poison(torch.int32, shape) if rank == size - 1 else None
        work = dist.gather_into_tensor(parts[rank], out, group_dst=size - 1, async_op=async_op)
        finish(work, async_op)
        if out is not None:
            check.equal(out, torch.cat(parts).reshape(shape), f"shape {shape}")
    whole = np.zeros((size, 2)) if rank == 0 else None
    dist.gather_single(np.full(2, float(rank)), whole)
    if whole is not None:
        check.equal(whole, np.repeat(np.arange(size, dtype=float), 2).reshape(size, 2), "numpy")
    check.done()


def test_gather_single_wrong_arguments():
    """All ranks learn of it, whichever rank is wrong."""
    rank, size = here()
    t = torch.zeros(3)

    def on_root(tensor):
        return tensor if rank == 0 else None

    cases = [
        (f"must have {3 * size}", on_root(torch.zeros(3 * size + 1))),
        ("contiguous", on_root(torch.zeros(3, 2 * size)[:, ::2])),
        ("must be given", None),
        ("numpy.ndarray, not str", on_root("x")),
    ]
    if size > 1:
        cases.append(("must be None", torch.zeros(3 * size)))
    for text, whole in cases:
        raised = None
        try:
            dist.gather_single(t, whole)
        except (ValueError, TypeError, dist.DistMismatchError) as error:
            raised = error
        parallel_assert(raised is not None and (text in str(raised)), f"{text}: {raised!r}")
    out = on_root(torch.zeros(3 * size))
    dist.gather_single(t + 1, out)
    parallel_assert(out is None or bool(out.all()))


def test_numpy(rng):
    check, (rank, size) = Check(), here()
    parts = [rng.standard_normal((2, 3)) for _ in range(size)]
    out = np.zeros((size, 2, 3))
    dist.all_gather_into_tensor(out, parts[rank])
    check.equal(out, np.stack(parts), "all_gather_into_tensor")
    outs = [np.zeros((2, 3)) for _ in range(size)]
    dist.all_gather(outs, parts[rank])
    check.equal(np.stack(outs), np.stack(parts), "all_gather")
    outs = [np.zeros((2, 3)) for _ in range(size)] if rank == 0 else None
    dist.gather(parts[rank], outs)
    if outs:
        check.equal(np.stack(outs), np.stack(parts), "gather")
    check.done()


def test_roots_that_give_other_things_than_lists(rng):
    """A tensor or an array with the parts stacked, or an iterator, as all_gather takes them."""
    check, (rank, size) = Check(), here()
    parts = [draw(rng, torch.float32, 3) for _ in range(size)]
    for name, whole in (("torch", torch.zeros(size, 3)), ("numpy", np.zeros((size, 3), "f4"))):
        dist.gather(parts[rank], whole if rank == 0 else None)
        got = torch.as_tensor(whole)
        check.equal(got, torch.stack(parts) if rank == 0 else torch.zeros(size, 3), name)
        part = torch.zeros(3)
        dist.scatter(part, whole if rank == 0 else None)
        check.equal(part, parts[rank], f"scatter {name}")
    outs = [torch.zeros(3) for _ in range(size)]
    work = dist.gather(parts[rank], iter(outs) if rank == 0 else None, async_op=True)
    work.wait()
    found = work.result()
    check.that(len(found) == (size if rank == 0 else 0), f"{found}")
    for r, each in enumerate(found):
        check.equal(each, parts[r], f"iterator {r}")
    whole = np.zeros(size) if rank == 0 else None
    dist.gather_single(np.array(rank + 1.0), whole)
    check.that(whole is None or whole.tolist() == [r + 1.0 for r in range(size)], f"{whole}")
    with parallel_raises((TypeError, dist.DistMismatchError), match="len"):
        dist.gather(parts[rank], torch.tensor(1.0) if rank == 0 else None)
    check.done()


def test_read_only_inputs():
    """What is only read may be read-only."""
    rank, size = here()
    array = np.full(4, float(rank))
    array.flags.writeable = False
    out = np.zeros((size, 4))
    dist.all_gather_into_tensor(out, array)
    parallel_assert(lambda: out[:, 0].tolist() == list(range(size)))
    got = bytearray(3 * size)
    dist.all_gather_into_tensor(got, b"abc")
    parallel_assert(lambda: got == b"abc" * size)


def test_wrong_arguments():
    rank, size = here()
    t = torch.zeros(3)
    cases = [
        (ValueError, lambda: dist.all_gather_into_tensor(torch.zeros(3 * size + 1), t)),
        (TypeError, lambda: dist.all_gather_into_tensor(torch.zeros(3 * size).int(), t)),
        (ValueError, lambda: dist.all_gather_into_tensor(torch.zeros(size, 3, 2)[:, :, 0], t)),
        (ValueError, lambda: dist.all_gather([t.clone()] * (size + 1), t)),
        (TypeError, lambda: dist.all_gather([t.double() for _ in range(size)], t)),
        (ValueError, lambda: dist.all_gather([torch.zeros(4) for _ in range(size)], t)),
        (TypeError, lambda: dist.all_gather(["x"] * size, t)),
        (ValueError, lambda: dist.all_gather_coalesced([], [t])),
        (ValueError, lambda: dist.all_gather_coalesced([[t]] * (size + 1), [t])),
        (ValueError, lambda: dist.gather(t, [t], dst=size)),
        (ValueError, lambda: dist.gather(t, None if rank == 0 else [t], dst=0)),
        (ValueError, lambda: dist.gather(t, [t] * (size + 1), dst=rank)),
    ]
    for error, call in cases:
        with parallel_raises(error):
            call()
    with parallel_raises((TypeError, ValueError)):
        frozen = np.zeros(3 * size, np.float32)
        frozen.flags.writeable = False
        dist.all_gather_into_tensor(frozen, t)
