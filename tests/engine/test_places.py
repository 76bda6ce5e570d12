"""HPCDIST_NODES: the ranks of one machine behave as on several nodes."""

import os
import re

import pytest
import torch
from worlds import start_with, true_place, works

import hpcdist as dist
from hpcdist import _engine
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]


@pytest.fixture
def nodes(no_world, monkeypatch):
    """Start the world with the variable as on these ranks; after an error without it."""
    given = os.environ.get("HPCDIST_NODES")

    def begin(text: str, ranks: range | None = None) -> str:
        given_here = ranks is None or true_place()[0] in ranks
        return start_with(monkeypatch, HPCDIST_NODES=text if given_here else None)

    yield begin
    dist.destroy_process_group()
    assert os.environ.get("HPCDIST_NODES") == given


def segments() -> set[str]:
    """Memory that this process shares with others through hpcdist."""
    with open("/proc/self/maps") as maps:
        return set(re.findall(r"/dev/shm/(hpcdist-\S+)", maps.read()))


def blocks(size: int, count: int) -> list[int]:
    """The node of each rank."""
    count = min(size, count)
    return [n for n in range(count) for _ in range(size // count + (n < size % count))]


def check_places(expected: list[int], before: set[str]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [r for r in range(size) if expected[r] == expected[rank]]
    order = sorted(set(expected), key=expected.index)
    world = dist.group.WORLD
    several = len(order) > 1
    way = "MPI" if len(order) == size else "shared memory and MPI"
    found = {
        "node": list(world.carrier.node_ranks),
        "carried": world.carrier.checks_through,
        "windows": world.supports_window,
        "local": dist.get_node_local_rank(),
        "said": [os.environ[n] for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")],
        "machine": _engine.ranks_of_machine(world.carrier),
    }
    local = own.index(rank)
    parallel_assert(found == {
        "node": own,
        "carried": way if several else "shared memory",
        "windows": True,
        "local": local,
        "said": [str(local), str(len(own)), str(order.index(expected[rank]))],
        "machine": size,
    }, lambda: f"{found}, {expected}")  # fmt: skip
    parallel_assert(works)
    node, _ = dist.new_subgroups()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=node)
    through = node.carrier.checks_through
    alone = len(own) == 1
    fine = float(total) == sum(own) and (alone or through == "shared memory")
    parallel_assert(fine, f"{total} {own} {through}")
    shared = [None] * size
    dist.all_gather_object(shared, segments() - before)
    met = {r for r in range(size) if shared[r] & shared[rank]}
    parallel_assert(met <= set(own), f"memory shared with {met}")


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_blocks(nodes, count):
    before = segments()
    text = nodes(str(count))
    parallel_assert(not text, text)
    check_places(blocks(dist.get_world_size(), count), before)


def test_the_node_of_each_rank(nodes):
    size, before = true_place()[1], segments()
    listed = [(r + 1) % 2 * 7 for r in range(size)]
    text = nodes(", ".join(map(str, listed)))
    parallel_assert(not text, text)
    check_places(listed, before)


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5", "2x", "0,", "0," * 9 + "1", "1,-1"])
@pytest.mark.parametrize("alone", [False, True], ids=["all", "last"])
def test_nonsense(nodes, value, alone):
    size = true_place()[1]
    text = nodes(value, range(size - 1, size) if alone else None)
    named = f"HPCDIST_NODES is '{value}' on rank {size - 1 if alone else 0}"
    parallel_assert(named in text and "number of nodes" in text, text)


@pytest.mark.parametrize(("first", "said"), [("", "not set"), ("2", "'2'")])
def test_ranks_that_disagree(nodes, first, said):
    rank, size = true_place()
    text = nodes(first if rank < size - 1 else "1")
    want = f"HPCDIST_NODES is {said} on rank 0, and '1' on rank {size - 1}: give it the same value"
    parallel_assert(want in text, text)
    parallel_assert(works)
