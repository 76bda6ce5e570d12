"""Every collective at every level of the entry check: the data must not depend on it."""

import pytest
import torch
from cases import Check, draw, finish, here, poison, reference

import hpcdist as dist

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[0, 1, 2, 3], ids=["off", "on", "full", "fast"])
def level(request):
    comm = dist.group.WORLD.carrier
    before = comm.check
    dist.barrier()
    comm.check = request.param
    yield request.param
    comm.check = before
    dist.barrier()


def even_sizes(check, rng, level, async_op) -> None:
    """The operations of one size on all ranks."""
    rank, size = here()

    def done(work):
        finish(work, async_op)

    for n in (0, 1, 5, 30_001):
        parts = [draw(rng, torch.float32, n) for _ in range(size)]
        mine, want = parts[rank], reference("SUM", parts)
        label = f"level {level} n={n}"

        t = mine.clone()
        done(dist.all_reduce(t, async_op=async_op))
        check.near(t, *want, f"{label} all_reduce")
        t, u = mine.clone(), mine.clone()
        done(dist.all_reduce_coalesced([t, u], async_op=async_op))
        check.near(u, *want, f"{label} all_reduce_coalesced")
        t = mine.clone()
        done(dist.reduce(t, size - 1, async_op=async_op))
        check.near(t, *(want if rank == size - 1 else (mine, 0)), f"{label} reduce")
        t = mine.clone()
        done(dist.broadcast(t, size - 1, async_op=async_op))
        check.equal(t, parts[-1], f"{label} broadcast")
        out = poison(torch.float32, n * size)
        done(dist.all_gather_into_tensor(out, mine, async_op=async_op))
        check.equal(out, torch.cat(parts), f"{label} all_gather_into_tensor")
        blocks = poison(torch.float32, n * size)
        done(dist.all_to_all_single(blocks, torch.cat([mine] * size), async_op=async_op))
        check.equal(blocks, torch.cat(parts), f"{label} all_to_all_single")
        t = poison(torch.float32, n)
        done(dist.reduce_scatter_tensor(t, torch.cat(parts), async_op=async_op))
        check.near(t, *reference("SUM", [mine] * size), f"{label} reduce_scatter_tensor")


def uneven_sizes(check, rng, level, async_op) -> None:
    """The operations that take a size per rank."""
    rank, size = here()

    def done(work):
        finish(work, async_op)

    for counts in ([4] * size, [3 * r for r in range(size)], [0] * (size - 1) + [20_001]):
        parts = [draw(rng, torch.int16, n) for n in counts]
        label = f"level {level} {counts}"
        for root in range(size):
            outs = [poison(torch.int16, n) for n in counts] if rank == root else None
            done(dist.gather(parts[rank], outs, root, async_op=async_op))
            check.that(
                outs is None or torch.equal(torch.cat(outs), torch.cat(parts)), f"{label} gather"
            )
            t = poison(torch.int16, counts[rank])
            done(dist.scatter(t, parts if rank == root else None, root, async_op=async_op))
            check.equal(t, parts[rank], f"{label} scatter")
        outs = [poison(torch.int16, n) for n in counts]
        done(dist.all_gather(outs, parts[rank], async_op=async_op))
        check.equal(torch.cat(outs), torch.cat(parts), f"{label} all_gather")
        outs = [[poison(torch.int16, n), poison(torch.int16, 2)] for n in counts]
        ones = torch.ones(2, dtype=torch.int16)
        done(dist.all_gather_coalesced(outs, [parts[rank], ones], async_op=async_op))
        check.equal(torch.cat([out[0] for out in outs]), torch.cat(parts), f"{label} coalesced")
        sent = [parts[r].clone() for r in range(size)]
        outs = [poison(torch.int16, counts[rank]) for _ in range(size)]
        done(dist.all_to_all(outs, sent, async_op=async_op))
        check.that(all(torch.equal(out, parts[rank]) for out in outs), f"{label} all_to_all")
        got = poison(torch.int16, counts[rank] * size)
        work = dist.all_to_all_single(
            got, torch.cat(sent), [counts[rank]] * size, counts, async_op=async_op
        )
        done(work)
        check.equal(got, torch.cat([parts[rank]] * size), f"{label} all_to_all_single")
        t = poison(torch.int16, counts[rank])
        done(dist.reduce_scatter(t, parts, dist.ReduceOp.MAX, async_op=async_op))
        check.equal(t, parts[rank], f"{label} reduce_scatter")


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_everything(rng, level, async_op):
    check, (rank, size) = Check(), here()
    even_sizes(check, rng, level, async_op)
    uneven_sizes(check, rng, level, async_op)
    finish(dist.barrier(async_op=async_op), async_op)
    held = [None] * size
    dist.all_gather_object(held, {"rank": rank, "text": "x" * rank})
    check.that([one["rank"] for one in held] == list(range(size)), f"level {level} objects")
    check.done()
