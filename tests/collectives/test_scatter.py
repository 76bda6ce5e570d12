"""scatter: every dtype and root, even and uneven, bit for bit."""

import numpy as np
import pytest
import torch
from cases import MOVED, SIZES, Check, draw, finish, here, poison

import hpcdist as dist
from hpcdist.testing import parallel_raises

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_scatter(rng, async_op):
    check, (rank, size) = Check(), here()
    for i, dtype in enumerate(MOVED):
        root = i % size
        for counts in [
            *([n] * size for n in SIZES),
            [5 * r for r in range(size)],
            [0] * (size - 1) + [3001],
            [0] + [40_001] * (size - 1),
        ]:
            parts = [draw(rng, dtype, n) for n in counts]
            kept = [part.clone() for part in parts]
            out = poison(dtype, counts[rank])
            work = dist.scatter(out, parts if rank == root else None, root, async_op=async_op)
            finish(work, async_op)
            check.equal(out, kept[rank], f"from {root} {dtype} {counts}")
            for a, b in zip(parts, kept, strict=True):
                check.equal(a, b, f"from {root} {dtype} {counts}: an input changed")
    check.done()


def test_large_and_in_place(rng):
    """The root's own part may be the destination already."""
    check, (rank, size) = Check(), here()
    n = 2_500_003
    small = draw(rng, torch.float32, 10_007)
    parts = [torch.roll(small, 19 * r).repeat(n // 10_007 + 1)[:n] for r in range(size)]
    want = parts[rank].clone()
    root = size - 1
    out = parts[root] if rank == root else poison(torch.float32, n)
    dist.scatter(out, parts if rank == root else None, root)
    check.equal(out, want, "in place on the root")
    check.done()


def test_defaults_shapes_and_numpy(rng):
    check, (rank, size) = Check(), here()
    group = dist.new_group(list(range(size)))
    parts = [draw(rng, torch.int32, (2, 3)) for _ in range(size)]
    last = size - 1
    for kwargs, root in [({}, 0), ({"src": last}, last), ({"group_src": last}, last)]:
        out = poison(torch.int32, (2, 3))
        dist.scatter(out, parts if rank == root else None, group=group, **kwargs)
        check.equal(out, parts[rank], str(kwargs))
    # rows of one tensor, an empty list where none belongs
    out = poison(torch.int32, (2, 3))
    dist.scatter(out, list(torch.stack(parts)) if rank == 0 else [])
    check.equal(out, parts[rank], "rows")
    array = np.zeros((2, 3), np.int32)
    dist.scatter(array, [part.numpy() for part in parts] if rank == 0 else None)
    check.equal(array, parts[rank].numpy(), "NumPy")
    dist.destroy_process_group(group)
    check.done()


def test_wrong_arguments():
    rank, size = here()
    t = torch.zeros(3)
    for error, call in [
        (ValueError, lambda: dist.scatter(t, [t], src=size)),
        (ValueError, lambda: dist.scatter(t, None if rank == 0 else [t], src=0)),
        (ValueError, lambda: dist.scatter(t, [t] * (size + 1), src=rank)),
        (ValueError, lambda: dist.scatter(t, [torch.zeros(4)] * size, src=rank)),
        (TypeError, lambda: dist.scatter(t, [t.double()] * size, src=rank)),
        (ValueError, lambda: dist.scatter(torch.zeros(3, 2)[:, 0], [t] * size, src=rank)),
        (ValueError, lambda: dist.scatter(t, [t] * size, src=0, group_src=0)),
    ]:
        with parallel_raises(error):
            call()
