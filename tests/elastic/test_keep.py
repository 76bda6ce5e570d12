"""Commits in the nodes' memory: all ranks write, find and read them together, or none does."""

from __future__ import annotations

import os
import secrets

import pytest
import torch

import hpcdist as dist
from hpcdist.elastic import keep, memory
from hpcdist.elastic.exchange import gathered
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


@pytest.fixture
def made(monkeypatch):
    """Makes keepers of one job, as its starts do; with nodes=2 half of the ranks are elsewhere."""
    name = [secrets.token_hex(6)]
    dist.broadcast_object_list(name, 0)
    keepers = []

    def make(nodes: int = 1, state: int = 0):
        node = dist.get_rank() * nodes // dist.get_world_size()
        monkeypatch.setattr(keep, "node_of_this_process", lambda: f"node {node}")
        job = f"test-{name[0]}-{node}"
        keepers.append(keep.Keeper(job, state, agreed, lambda error: False))
        parallel_assert(keepers[-1]._memory is not None)
        return keepers[-1]

    yield make
    dist.barrier()
    for each in keepers:
        each.close()
        each._memory.remove()
    parallel_assert(not any(each._memory.folder.exists() for each in keepers))


def agreed(flag: bool) -> bool:
    return all(gathered(flag))


def own(step: int) -> dict:
    return {"values": torch.arange(300) * (step + dist.get_rank()), "step": step}


def write(keeper: keep.Keeper, step: int) -> bool:
    return keeper.keep(step, own(step), ["shard", dist.get_rank(), step])


def check(found: keep.Found | None, step: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_assert(found is not None and (found.step, found.size) == (step, size))
    parallel_assert(torch.equal(found.own["values"], own(step)["values"]))
    together = {old: shard for each in gathered(found.shards) for old, shard in each.items()}
    parallel_assert(together == {old: ["shard", old, step] for old in range(size)}, rank)


def newest(keeper: keep.Keeper):
    files = keeper._memory.folder.glob(f"*.[01].{dist.get_rank()}")
    return max(files, key=lambda path: path.stat().st_mtime_ns)


def test_the_newest_of_two_is_found(made):
    keeper = made()
    parallel_assert(keeper.find() is None)
    for step in (3, 4, 5):
        parallel_assert(write(keeper, step))
    again = made()
    check(again.find(), 5)
    parallel_assert(len(list(again._memory.folder.glob("*.[01].*"))) == 2 * dist.get_world_size())
    parallel_assert(write(again, 6))
    check(made().find(), 6)


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone", "no commit"])
def test_a_damaged_file_is_refused_and_the_older_commit_taken(made, how):
    keeper = made()
    keeper.find()
    for step in (1, 2):
        parallel_assert(write(keeper, step))
    if dist.get_rank() == dist.get_world_size() - 1:
        path = newest(keeper)
        data = bytearray(path.read_bytes())
        if how == "flipped":
            data[-200] ^= 4
        elif how == "truncated":
            del data[-5:]
        elif how == "no commit":
            data[:8] = b"whatever"
        path.unlink() if how == "gone" else path.write_bytes(data)
    again = made()
    check(again.find(), 1)
    parallel_assert(write(again, 2))
    check(made().find(), 2)
    if dist.get_rank() == 0:
        for path in again._memory.folder.glob("*.[01].0"):
            os.truncate(path, 3)
    parallel_assert(made().find() is None)


def test_without_room_the_commit_before_stays(made, monkeypatch, caplog):
    keeper = made()
    keeper.find()
    parallel_assert(write(keeper, 1))
    last = dist.get_rank() == dist.get_world_size() - 1
    with monkeypatch.context() as patch:
        if last:
            patch.setattr(memory, "SPARE", 2.0)
        parallel_assert(not write(keeper, 2))
        parallel_assert(not write(keeper, 3))
    said = [
        record.message for record in caplog.records if "is not kept in the node's" in record.message
    ]
    parallel_assert(len(said) == last and all("do not fit into /dev/shm" in text for text in said))
    check(made().find(), 1)
    parallel_assert(write(keeper, 4))
    check(made().find(), 4)


def test_a_commit_that_a_dead_rank_has_not_written_does_not_count(made, monkeypatch):
    """The living agree without it; the commit before is the only whole one, and stays."""
    keeper = made()
    keeper.find()
    for step in (1, 2):
        parallel_assert(write(keeper, step))
    last = dist.get_rank() == dist.get_world_size() - 1

    def died(*_):
        raise dist.DistError("a rank has died")

    for step in (3, 4):
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "_is_death", lambda error: True)
            patch.setattr(keeper, "_agree", lambda flag: flag)  # of the living
            if last:
                patch.setattr(keeper, "_write", died)
            patch.setattr(keep, "gathered", died)
            parallel_assert(not keeper.keep(step, own(step), []))
    check(made().find(), 2)


def test_two_starts_do_not_mix(made):
    """The first died with half of commit 2 written, and the second with the other half."""
    keeper = made()
    keeper.find()
    parallel_assert(write(keeper, 1))
    for half in (0, 1):
        again = made()
        check(again.find(), 2 if half and dist.get_world_size() == 1 else 1)
        if dist.get_rank() % 2 == half:
            again._write(2, own(2), ["shard", dist.get_rank(), 2])
        dist.barrier()
    # one rank is whole in one of them
    check(made().find(), 2 if dist.get_world_size() == 1 else 1)


def test_a_node_is_lost(made):
    """The other one has copies of its ranks' files."""
    if dist.get_world_size() == 1:
        keeper = made(2)
        keeper.find()
        parallel_assert(write(keeper, 1))
        keeper._memory.remove()
        parallel_assert(made(2).find() is None)
        return
    keeper = made(2)
    keeper.find()
    for step in (1, 2, 3):
        parallel_assert(write(keeper, step))
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        keeper._memory.remove()
    dist.barrier()
    again = made(2)
    found = again.find()
    check(found, 3)
    parallel_assert(not found.same)
    parallel_assert(write(again, 4))
    check(made(2).find(), 4)


def test_each_state_finds_its_own(made):
    """A fold, or a second phase of training, does not take over what the first has committed."""
    first = made()
    first.find()
    for step in (8, 9):
        parallel_assert(write(first, step))
    second = made(state=1)
    parallel_assert(second.find() is None)
    for step in (1, 2, 3):  # of both slots nothing of the first's is removed
        parallel_assert(write(second, step))
    check(made().find(), 9)
    check(made(state=1).find(), 3)
    if dist.get_world_size() > 1:
        with parallel_raises(ValueError, match="the same States in the same order"):
            made(state=dist.get_rank()).find()


def test_a_damaged_copy_is_refused_where_another_rank_reads_the_file(made):
    """Fewer ranks had committed: a rank without a file of its own number reads its node's copy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    keeper = made(size)
    whole = own(4) if rank == 0 else None
    keeper.find()
    memory_of = keeper._memory
    blobs = [keep.codec.encode(whole), keep.codec.encode(["shard", 0, 4])]
    sent = [blobs]
    dist.broadcast_object_list(sent, 0)
    head = memory.Head(1, "n", 4, 1, 0)  # one rank had committed, and every node has its file
    pieces = [memory.shape(head, sent[0]), *sent[0]]
    if rank == size - 1:
        pieces[1] = bytes(len(pieces[1]))
    memory_of.write(head.name, pieces)
    dist.barrier()
    found = made(size).find()
    if size == 1:
        parallel_assert(found is None)
    else:
        values = torch.arange(300) * 4
        parallel_assert(found is not None and torch.equal(found.own["values"], values))
