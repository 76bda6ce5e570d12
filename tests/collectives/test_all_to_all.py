"""all_to_all and all_to_all_single: every dtype, even and uneven splits, bit for bit."""

import numpy as np
import pytest
import torch
from cases import MOVED, Check, draw, finish, here, poison

import hpcdist as dist
from hpcdist.testing import parallel_raises

pytestmark = pytest.mark.ranks

SYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def tables(size: int) -> list[list[list[int]]]:
    """How much rank r sends to rank s: even, uneven, mostly nothing, nothing at all, much."""
    ranks = range(size)
    return [
        [[1] * size for _ in ranks],
        [[7] * size for _ in ranks],
        [[(r + 2 * s) % 5 for s in ranks] for r in ranks],
        [[4001 if (r, s) == (0, size - 1) else 0 for s in ranks] for r in ranks],
        [[0] * size for _ in ranks],
        [[20_011 * (s + 1) + r for s in ranks] for r in ranks],
    ]


@SYNC
def test_all_to_all(rng, async_op):
    check, (rank, size) = Check(), here()
    for dtype in MOVED:
        for table in tables(size):
            parts = [[draw(rng, dtype, n) for n in row] for row in table]
            kept = [part.clone() for part in parts[rank]]
            outs = [poison(dtype, table[r][rank]) for r in range(size)]
            finish(dist.all_to_all(outs, parts[rank], async_op=async_op), async_op)
            for r in range(size):
                check.equal(outs[r], parts[r][rank], f"{dtype} {table} from rank {r}")
                check.equal(parts[rank][r], kept[r], f"{dtype} {table}: an input changed")
    check.done()


@SYNC
def test_all_to_all_single(rng, async_op):
    check, (rank, size) = Check(), here()
    for i, dtype in enumerate(MOVED):
        row_shape = ((), (3,), (2, 2))[i % 3]
        for table in tables(size):
            parts = [[draw(rng, dtype, (n, *row_shape)) for n in row] for row in table]
            sent, received = table[rank], [table[r][rank] for r in range(size)]
            source = torch.cat(parts[rank])
            kept = source.clone()
            out = poison(dtype, (sum(received), *row_shape))
            work = dist.all_to_all_single(out, source, received, sent, async_op=async_op)
            finish(work, async_op)
            want = torch.cat([parts[r][rank] for r in range(size)])
            check.equal(out, want, f"{dtype} {row_shape} {table}")
            check.equal(source, kept, f"{dtype} {table}: the input changed")
    check.done()


@SYNC
def test_all_to_all_single_without_splits(rng, async_op):
    check, (rank, size) = Check(), here()
    for dtype in MOVED:
        for rows in (0, 1, 3, 1001):
            parts = [draw(rng, dtype, (rows * size, 2)) for _ in range(size)]
            out = poison(dtype, (rows * size, 2))
            finish(dist.all_to_all_single(out, parts[rank], async_op=async_op), async_op)
            blocks = [part[rank * rows : (rank + 1) * rows] for part in parts]
            check.equal(out, torch.cat(blocks), f"{dtype} {rows} rows")
    # splits on one side only, where they say the same
    out, source = torch.zeros(size), torch.full((size,), float(rank))
    dist.all_to_all_single(out, source, output_split_sizes=[1] * size)
    check.equal(out, torch.arange(float(size)), "output splits only")
    out.zero_()
    dist.all_to_all_single(out, source, input_split_sizes=[1] * size)
    check.equal(out, torch.arange(float(size)), "input splits only")
    check.done()


def test_large(rng):
    check, (rank, size) = Check(), here()
    n = 2_500_003
    small = draw(rng, torch.int32, 10_007)
    whole = [small.roll(23 * r).repeat(n * size // 10_007 + 1)[: n * size] for r in range(size)]
    out = poison(torch.int32, n * size)
    dist.all_to_all_single(out, whole[rank])
    want = torch.cat([part[rank * n : (rank + 1) * n] for part in whole])
    check.equal(out, want, "all_to_all_single")
    outs = [poison(torch.int32, n) for _ in range(size)]
    dist.all_to_all(outs, list(whole[rank].split(n)))
    check.equal(torch.cat(outs), want, "all_to_all")
    check.done()


def test_numpy(rng):
    check, (rank, size) = Check(), here()
    parts = [rng.standard_normal((size, 4)) for _ in range(size)]
    out = np.zeros((size, 4))
    dist.all_to_all_single(out, parts[rank])
    check.equal(out, np.stack([part[rank] for part in parts]), "all_to_all_single")
    outs = [np.zeros(4) for _ in range(size)]
    dist.all_to_all(outs, list(parts[rank]))
    check.equal(np.stack(outs), out, "all_to_all")
    check.done()


def test_wrong_arguments():
    rank, size = here()
    t = torch.zeros(2 * size)
    other = torch.zeros(2 * size)
    for error, call in [
        (ValueError, lambda: dist.all_to_all([t] * (size + 1), [t] * size)),
        (ValueError, lambda: dist.all_to_all([t] * size, [t] * (size + 1))),
        (TypeError, lambda: dist.all_to_all([t.int() for _ in range(size)], [t] * size)),
        (ValueError, lambda: dist.all_to_all_single(t, other, [1] * size, None)),
        (ValueError, lambda: dist.all_to_all_single(t, other, None, [2] * (size + 1))),
        (ValueError, lambda: dist.all_to_all_single(t, other, None, [-1] + [2] * (size - 1))),
        (TypeError, lambda: dist.all_to_all_single(t, other.int())),
        (ValueError, lambda: dist.all_to_all_single(t, t)),
        (ValueError, lambda: dist.all_to_all_single(torch.zeros(2 * size, 2)[:, 0], t)),
    ]:
        with parallel_raises(error):
            call()
    if size > 1:
        with parallel_raises(ValueError, match="divisible"):
            dist.all_to_all_single(torch.zeros(2 * size + 1), torch.zeros(2 * size + 1))


def misfits(out: torch.Tensor, t: torch.Tensor, **about) -> dict:
    """Each call, in a group of one rank."""
    n, group = len(out), about["group"]
    return {
        "all_to_all_single": lambda: dist.all_to_all_single(out, t, **about),
        "with splits": lambda: dist.all_to_all_single(out, t, [n], [4], **about),
        "with rows": lambda: dist.all_to_all_single(out[:, None], t[:, None], **about),
        "nn": lambda: dist.nn.functional.all_to_all_single(out, t, group=group),
        "all_to_all": lambda: dist.all_to_all([out], [t], **about),
        "all_gather": lambda: dist.all_gather([out], t, **about),
        "all_gather_into_tensor": lambda: dist.all_gather_single(out, t, **about),
        "gather": lambda: dist.gather(t, [out], group_dst=0, **about),
        "scatter": lambda: dist.scatter(out, [t], group_src=0, **about),
        "reduce_scatter": lambda: dist.reduce_scatter(out, [t], **about),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_single(out, t, **about),
    }


@SYNC
def test_what_stays_on_its_rank_must_fit(async_op):
    """No other rank compares the sizes in a group of one rank, nor without the entry check."""
    check, (rank, size) = Check(), here()
    groups = [dist.new_group([r]) for r in range(size)]
    for n in (1, 3, 8):
        out = torch.zeros(n)
        calls = misfits(out, torch.ones(4), group=groups[rank], async_op=async_op)
        for name, call in calls.items():
            try:
                finish(call(), async_op and name != "nn")
                check.that(False, f"{name} of 4 elements into {n}: no error")
            except ValueError:
                pass
            check.that(not out.any(), f"{name} of 4 elements into {n}: {out}")
    dist.destroy_process_group(groups[rank])
    check.done()
