"""Asynchronous operations in a group whose ranks are on nodes of their own, as far as it knows.

Long all_reduces go as a ring there with Open MPI, where no core is to spare; with MPICH they are
polled with naps.
"""

import pytest
import torch
from cases import OPS, Check, draw, here, reference
from giving_up import give_up_at_random
from worlds import between_nodes

import hpcdist as dist
from hpcdist import _engine
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks

#: Bytes from which there is a ring, and of one of its segments.
LEAST, SEGMENT = 1 << 20, 64 << 10


@pytest.fixture
def group():
    made = between_nodes()
    yield made
    dist.destroy_process_group(made)


def test_the_check_goes_through_messages(group):
    size = dist.get_world_size()
    parallel_assert(
        group.carrier.checks_through == "MPI" or size == 1, group.carrier.checks_through
    )


@pytest.mark.parametrize("name, dtype", [
    ("SUM", torch.float32), ("AVG", torch.float16), ("PREMUL_SUM", torch.float64),
    ("MAX", torch.bfloat16),
])  # fmt: skip
def test_long_all_reduce(rng, group, name, dtype):
    check, (rank, size) = Check(), here()
    item = torch.empty(0, dtype=dtype).element_size()
    n = LEAST // item + 3 * (SEGMENT // item) * size + 3  # more segments than are in flight at once
    parts = [draw(rng, dtype, n) for _ in range(size)]
    want, bound = reference(name, parts)
    tensor = parts[rank].clone()
    dist.all_reduce(tensor, OPS[name], group=group, async_op=True).wait()
    check.near(tensor, want, bound, f"{name} {dtype} n={n}")
    check.everywhere(tensor, f"{name} {dtype} n={n}")
    check.done()


def test_in_a_row_and_together(rng, group):
    """Several in flight, of lengths on both sides of the limit, with others in between."""
    check, (rank, size) = Check(), here()
    lengths = (300_000, 10, 500_003, 262_144, 262_143)
    parts = [[draw(rng, torch.float32, n) for _ in range(size)] for n in lengths]
    tensors = [each[rank].clone() for each in parts]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    listed = [each[rank].clone() for each in parts]
    works.append(dist.all_reduce_coalesced(listed, group=group, async_op=True))
    from_last = torch.full((500_000,), float(rank))
    works.append(dist.broadcast(from_last, size - 1, group=group, async_op=True))
    for work in works:
        work.wait()
    for one, other, each in zip(tensors, listed, parts, strict=True):
        want, bound = reference("SUM", each)
        check.near(one, want, bound, f"n={len(one)}")
        check.near(other, want, bound, f"n={len(one)}, of a list")
    check.done()
    parallel_assert(bool((from_last == size - 1).all()))


@pytest.mark.parametrize("n", [0, 1, 3001, 100_003])
@pytest.mark.parametrize("more", [0, 3], ids=["even", "uneven"])
def test_lists(rng, group, n, more):
    """Short tensors go by the library's tree, long ones around a ring; inputs lie in outputs."""
    check, (rank, size) = Check(), here()
    lengths = [n + more * r for r in range(size)]
    parts = [draw(rng, torch.float32, k) for k in lengths]
    for root in (0, size - 1):
        block = torch.zeros(sum(lengths) + size)
        apart = [block[at : at + k] for at, k in zip(starts(lengths), lengths, strict=True)]
        for places in (apart, [torch.zeros(k) for k in lengths]):
            places[rank].copy_(parts[rank])
            dist.all_gather(places, places[rank], group=group)
            check.that(all(map(torch.equal, places, parts)), f"all_gather {lengths}")
            kept = [torch.zeros_like(place) for place in places] if rank == root else None
            dist.gather(parts[rank], kept, root, group=group)
            check.that(kept is None or all(map(torch.equal, kept, parts)), f"gather {lengths}")
            own = places[(root + 1) % size if more == 0 and rank == root else rank]
            dist.scatter(own, places if rank == root else None, root, group=group)
            check.that(torch.equal(own, parts[rank]), f"scatter {lengths}")
    check.done()


def starts(lengths: list[int]) -> list[int]:
    """Where each begins, if there is an element between them."""
    return [sum(lengths[:r]) + r for r in range(len(lengths))]


def test_one_waits_and_one_does_not(rng, group):
    """Who waits inside the call and who does not take the same way, where that is allowed."""
    check, (rank, size) = Check(), here()
    parts = [draw(rng, torch.float32, 700_001) for _ in range(size)]
    want, bound = reference("SUM", parts)
    tensor = parts[rank].clone()
    work = group.carrier.all_reduce(tensor, async_op=rank == 0 and _engine.ASYNC_HERE)
    if work is not None:
        work.wait()
    check.near(tensor, want, bound, "sync and async")
    check.everywhere(tensor, "sync and async")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_no_mixed_outcomes_when_ranks_give_up_at_random(group, count):
    give_up_at_random(group, count)
