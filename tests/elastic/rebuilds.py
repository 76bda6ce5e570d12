"""Ranks die, and the others make all groups again; see test_rebuild.py.

Of six ranks rank 2 dies, then the highest of the others.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch

import hpcdist as dist
from hpcdist import init_device_mesh
from hpcdist.groups.reconfigure import ReconfigureOptions
from hpcdist.parallel import DistributedDataParallel

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
#: By name, the ranks of groups in which rank 2 is, and of some in which it is not.
GROUPS = {
    "low": [0, 1, 2],
    "high": [2, 3, 4],
    "pair": [1, 4],
    "unsorted": [4, 0, 2, 3],
    "alone": [2, 5],
    "odd": [1, 3, 5],
    "world": [0, 1, 2, 3, 4, 5],
}


def made() -> dict[str, Any]:
    """Make the groups in all the ways there are."""
    new, size = dist.new_group, dist.get_world_size()
    groups = {
        "low": new([0, 1, 2], timeout=timedelta(seconds=17)),
        "high": new([2, 3, 4]),
        "pair": new([1, 4], use_local_synchronization=True),
        "unsorted": new([4, 0, 2, 3], sort_ranks=False),
        "alone": new([2, 5]),
        "odd": dist.split_group(split_ranks=[[0, 2, 4], [1, 3, 5]]),
        "world": new(pg_options=dist.MPIOptions(check="full")),
    }
    if dist.get_rank() % 2 == 0:
        groups["even"], groups["odd"] = groups["odd"], OUTSIDE
    own, groups["all"] = dist.new_subgroups(size // 2)
    groups["half"] = own
    return groups


def check(groups: dict[str, Any], ranks: dict[str, list[int]], living: list[int]) -> None:
    """Check the ranks of each group, and that it works; `living` are the first numbers."""
    me = living[dist.get_rank()]
    for name, first in ranks.items():
        pg = groups[name]
        left = [rank for rank in first if rank in living]
        if me not in left:
            assert pg is OUTSIDE or me not in first, (name, pg)
            continue
        assert dist.get_process_group_ranks(pg) == [living.index(rank) for rank in left], name
        assert (pg.rank(), pg.size()) == (left.index(me), len(left)), name
        for place, rank in enumerate(left):
            assert dist.get_group_rank(pg, living.index(rank)) == place
            assert dist.get_global_rank(pg, place) == living.index(rank)
        for count in (1, 300_000):
            total = torch.full((count,), float(me))
            dist.all_reduce(total, group=pg)
            assert total.tolist()[:1] == [sum(left)], (name, total)
        if len(left) > 1:
            got = torch.zeros(1)
            ahead, behind = ((pg.rank() + step) % pg.size() for step in (1, -1))
            work = dist.irecv(got, group=pg, group_src=behind)
            dist.send(torch.full((1,), float(me)), group=pg, group_dst=ahead)
            work.wait()
            assert got.item() == left[behind], (name, got)


def in_step(**expected: Any) -> None:
    """Check that all ranks have the same."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, expected)
    assert all(each == expected for each in everyone), everyone


def check_meshes(meshes: dict[str, Any], living: list[int]) -> None:
    """Check a mesh of two dimensions, slices of it, and one of all ranks in a line."""
    me, grid, rows, line = dist.get_rank(), meshes["grid"], meshes["rows"], meshes["line"]
    assert line.size() == len(living) and line.get_coordinate() == (me,), line
    assert line.mesh.tolist() == list(range(len(living))) and line.get_group().size() == line.size()
    assert dist.get_process_group_ranks(rows.get_group()) == rows.mesh.tolist(), rows
    assert rows.get_local_rank() == rows.get_coordinate()[0] == rows.get_group().rank()
    assert hash(grid) == meshes["hash"]
    if len(living) == 5:
        for use in (lambda: grid.shape, lambda: grid["dp"], grid.get_coordinate, grid.size):
            try:
                use()
                raise AssertionError("the mesh is no grid")
            except dist.DistError as error:
                assert "rank 2 of it died" in str(error), error
        assert "rank 2 of it died" in repr(grid) and grid.ndim == 2
    else:
        columns = 3 if len(living) == 6 else 2
        assert grid.shape == (2, columns) and grid.get_coordinate() == divmod(me, columns), grid
        assert grid.mesh.tolist() == [list(range(columns)), list(range(columns, 2 * columns))]
        assert grid["dp"].mesh.tolist() == [me % columns, me % columns + columns]
        assert meshes["flat"].mesh.tolist() == list(range(2 * columns))
    for name in ("dp", "tp", "flat"):
        total = torch.ones(1)
        dist.all_reduce(total, group=grid.get_group(name))
        assert total == grid.get_group(name).size() > 0, (name, total)


def die(victim: int) -> list[int]:
    """Let a rank die in a collective; return the lost ranks that the others name."""
    if dist.get_rank() == victim:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(10_000_000):
            dist.all_reduce(torch.ones(3))
    except dist.RankFailedError as error:
        return list(error.ranks)
    raise AssertionError("nobody died")


def train(model: DistributedDataParallel, me: int) -> float:
    """Return the average gradient, of inputs that are the first numbers of the ranks."""
    model.zero_grad()
    model(torch.full((1, 1), float(me))).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return weight.grad.item()


def disagree(groups: dict[str, Any]) -> None:
    """Let one rank ask for the groups: all lose them."""
    try:
        dist.group.WORLD.reconfigure(rebuild=dist.get_rank() == 1)
        raise AssertionError("the ranks wanted the same")
    except dist.DistMismatchError as error:
        assert "rebuild" in str(error), error
    try:
        dist.barrier(groups["world"])
        raise AssertionError("it was made again")
    except ValueError as error:
        assert "was lost when the default group was reconfigured" in str(error), error


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    dist.init_process_group(timeout=timedelta(seconds=40))
    me, living = dist.get_rank(), [0, 1, 2, 3, 4, 5]
    groups = made()
    dropped = dist.new_group([0, 1, 3])
    has_dropped = dropped is not OUTSIDE and me != 1
    if me == 1:
        del dropped
    half = [rank for rank in living if rank // 3 == me // 3]
    ranks = {**GROUPS, "half": half}
    check(groups, ranks, living)
    grid = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    meshes = {"grid": grid, "rows": grid["tp"], "line": init_device_mesh("cpu", (6,))}
    meshes |= {"flat": grid.flatten("flat"), "hash": hash(grid)}
    check_meshes(meshes, living)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=groups["half"])
    train(model, me)
    objects, seen = dict(groups), []
    groups["world"].register_post_hook(3, lambda args: seen.append(args.name))
    for victim, number in ((2, 2), (4, 5)):
        generation = groups["world"].members.generation
        assert die(victim) == [victim]
        done = dist.group.WORLD.reconfigure(ReconfigureOptions(rebuild=True))
        assert done.lost == (victim,) and len(done.ranks) == len(living) - 1, done
        living.remove(number)
        seen.clear()
        check(groups, ranks, living)
        check_meshes(meshes, living)
        assert all(groups[name] is objects[name] for name in groups)
        assert groups["world"].members.generation == generation + 1
        assert seen == ["all_reduce", "all_reduce", "irecv", "send"], seen
        left = [rank for rank in half if rank in living]
        assert train(model, me) == sum(left) / len(left), left
        if groups["low"] is not OUTSIDE:
            assert groups["low"].timeout == timedelta(seconds=17)
        assert groups["world"].carrier.check == 2
        if has_dropped:
            try:
                dist.barrier(dropped)
                raise AssertionError("the group was made again without rank 1")
            except ValueError as error:
                assert "rank 1 has destroyed it" in str(error) or number == 5, error
        fresh = dist.new_group([0, 1])
        again = dist.new_group()
        in_step(name=again.group_name, world=groups["world"].group_name)
        check({"again": again}, {"again": living}, living)
        dist.destroy_process_group(again)
        if fresh is not OUTSIDE:
            dist.destroy_process_group(fresh)
    assert dist.group.WORLD.reconfigure(rebuild=True).lost == ()
    check(groups, ranks, living)
    disagree(groups)
    in_step(name=dist.new_group().group_name)
    print(f"ended {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()


main()
