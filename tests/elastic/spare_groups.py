"""Four ranks with groups, meshes and a model per group; spares take the places of dead ranks.

spare_groups.py [RANK=WHEN]... [CASE]: each victim dies in step WHEN; if that is "waiting", while
the others wait for a former spare; if it is "joined", in step 3, and the first former spare with
its place dies when it has made its groups. Cases: a former spare builds "another" model than its
rank had, or makes a group "less". What every rank has at the end is printed; see
test_spare_groups.py.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import hpcdist as dist
from hpcdist import init_device_mesh
from hpcdist.elastic import State, elastic, joining
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import DistributedDataParallel

STEPS = 10
OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
#: Rank, as numbered first, to when it dies.
DEATHS = dict(each.split("=") for each in sys.argv[1:] if "=" in each)
CASES = {each for each in sys.argv[1:] if "=" not in each}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def digest(*things: Any) -> str:
    found = hashlib.sha256()
    for thing in things:
        for tensor in thing if isinstance(thing, list) else [thing]:
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def made() -> dict[str, Any]:
    """Make groups in all the ways there are."""
    if joining() and "less" in CASES:
        dist.new_group = lambda *args, new=dist.new_group, **named: (
            OUTSIDE if named.get("use_local_synchronization") else new(*args, **named)
        )
    groups = {
        "low": dist.new_group([0, 1, 2], timeout=timedelta(seconds=17)),
        "unsorted": dist.new_group([3, 0, 2], sort_ranks=False),
        "pair": dist.new_group([0, 3], use_local_synchronization=True),
        "world": dist.new_group(pg_options=dist.MPIOptions(check="full")),
        "odd": dist.split_group(split_ranks=[[0, 2], [1, 3]]),
    }
    gone = dist.new_group([0, 1, 2])
    groups["again"] = dist.new_group([0, 1, 2])
    if gone is not OUTSIDE:
        dist.destroy_process_group(gone)
    return groups


class Job:
    """What this rank trains: a model of its row, one of all ranks, and a weight of its own."""

    def __init__(self, first: int) -> None:
        self.groups = made()
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.rows, self.line = self.mesh["tp"], init_device_mesh("cpu", (4,))
        row = self.mesh.get_group("tp")
        torch.manual_seed(first // 2)
        width = 5 + first // 2  # the models of the rows differ
        width += joining() and "another" in CASES
        model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
        self.model = DistributedDataParallel(model, process_group=row)
        self.zero = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.Adam, process_group=row, lr=0.1
        )
        torch.manual_seed(7)
        self.all = DistributedDataParallel(torch.nn.Linear(3, 2))
        self.sgd = torch.optim.SGD(self.all.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.sgd, 3)
        self.calls = 0
        self.groups["world"].register_pre_hook(1, self.count)
        #: The second row has a part more: shards of which no other rank of their group has a copy.
        self.solo = None
        alone = dist.new_group([first])
        if first // 2:
            self.solo = ZeroRedundancyOptimizer(
                [torch.nn.Parameter(torch.full((2,), float(first)))],
                torch.optim.Adam,
                process_group=alone,
                lr=0.1,
            )
        self.weight = torch.nn.Parameter(torch.full((first + 1,), float(first)))
        self.own = torch.optim.Adam([self.weight], lr=0.1)
        torch.manual_seed(100 + first)

    def count(self, args: Any) -> None:
        self.calls += 1

    def step(self, index: int, first: int) -> None:
        for optimizer in (self.zero, self.sgd, self.own):
            optimizer.zero_grad()
        if self.solo is not None:
            (parameter,) = self.solo.param_groups[0]["params"]
            parameter.grad = torch.full((2,), index + 1.0)
            self.solo.step()
        data = torch.randn(4, 3, generator=torch.Generator().manual_seed(50 * index + first))
        self.model(data).square().mean().backward()
        self.all(data).square().mean().backward()
        mine = torch.rand(1)
        dist.all_reduce(mine, group=self.mesh.get_group("dp"))
        dist.all_reduce(mine, group=self.groups["world"])
        (self.weight.square().sum() * mine).backward()
        for name in ("low", "again", "unsorted", "odd", *(["pair"] if not CASES else [])):
            group = self.groups[name]
            if group is not OUTSIDE:
                total = torch.ones(3)
                dist.all_reduce(total, group=group)
                assert total.tolist() == [group.size()] * 3, (name, total)
                assert group.rank() == dist.get_process_group_ranks(group).index(dist.get_rank())
        for each in (self.zero, self.sgd, self.own, self.schedule):
            each.step()

    def digests(self) -> str:
        """Of what the row has, what all have, and what this rank alone has."""
        shard = self.zero.shard_state()
        row = list(self.model.parameters())
        of_all = digest(list(self.all.parameters()))
        own = digest(
            list(self.model.buffers()),
            self.weight,
            *(self.solo.param_groups[0]["params"] if self.solo is not None else []),
            *([shard[k][n].double() for n in sorted(shard[k])] for k in sorted(shard)),
            torch.get_rng_state(),
        )
        return f"{digest(row)} {of_all} {own}"


def check(job: Job, mine: int) -> None:
    """Check the groups and meshes where all places are taken."""
    me, row = dist.get_rank(), [2 * (mine // 2), 2 * (mine // 2) + 1]
    assert (me, dist.get_world_size()) == (mine, 4)
    assert dist.get_process_group_ranks(job.mesh.get_group("tp")) == row
    assert job.mesh.get_coordinate() == divmod(me, 2) and job.mesh.shape == (2, 2)
    assert job.rows.mesh.tolist() == row and job.line.mesh.tolist() == list(range(4))
    assert job.mesh["dp"].mesh.tolist() == [me % 2, me % 2 + 2]
    if job.groups["low"] is not OUTSIDE:
        assert job.groups["low"].timeout == timedelta(seconds=17)
    assert job.groups["world"].carrier.check == 2
    if job.groups["unsorted"] is not OUTSIDE:
        assert dist.get_process_group_ranks(job.groups["unsorted"]) == [3, 0, 2]


def check_shrunk(job: Job, first: int, dead: list[int]) -> None:
    """Check the same where ranks closed up, because there were fewer spares than deaths."""
    living = [rank for rank in range(4) if rank not in dead]
    row = [living.index(rank) for rank in living if rank // 2 == first // 2]
    assert dist.get_process_group_ranks(job.mesh.get_group("tp")) == row
    assert dist.get_process_group_ranks(job.groups["world"]) == list(range(len(living)))
    assert job.line.mesh.tolist() == list(range(len(living)))
    try:
        job.mesh.get_coordinate()
        raise AssertionError("the mesh is no grid")
    except dist.DistError as error:
        assert "of it died" in str(error), error


def die_later() -> None:
    """Die after the others have recovered, and before the former spare has made its groups."""
    time.sleep(0.5)
    die()


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(timeout=timedelta(seconds=40))
    spare, first = joining(), dist.get_rank()
    assert dist.get_world_size() == 4
    when = DEATHS.get(str(first), "never")
    job = Job(first)
    if when == "waiting" and not spare:
        dist.group.WORLD.register_abort_hook(
            1, lambda: threading.Thread(target=die_later, daemon=True).start()
        )
    if spare:
        folder = os.environ.get("HPCDIST_TEST_FOLDER", "")
        if when == "joined" and not Path(folder, when).exists():
            Path(folder, when).touch()  # the next spare in that place lives
            die()
        if "waiting" in DEATHS.values():
            time.sleep(1.0)
        try:
            dist.all_reduce(torch.ones(1), group=job.groups["world"])
            raise AssertionError("the others are in no such call")
        except dist.DistError as error:
            assert "elastic.joining()" in str(error), error
    parts = {
        name: getattr(job, name) for name in ("model", "zero", "all", "sgd", "schedule", "own")
    }
    if job.solo is not None:
        parts |= {"solo": job.solo, "lone": job.solo.param_groups[0]["params"][0]}
    state = State(rebuild=True, weight=job.weight, **parts)
    state.values.seen = []
    for step in elastic(state, STEPS):
        with step:
            # where the former spare dies, it needs a place
            if not spare and (when == str(step.index) or (when == "joined" and step.index == 3)):
                die()
            job.step(step.index, first)
            state.values.seen = [*state.values.seen, 10 * first + step.index]
    assert state.values.seen == [10 * first + i for i in range(STEPS)], state.values.seen
    assert job.calls, "the hooks of the group are gone"
    size = dist.get_world_size()
    if size == 4:
        check(job, first)
    else:
        dead = [rank for ranks in state.lost for rank in ranks]
        check_shrunk(job, first, [r for r in dead if r != first and r < 4][-1:])
    fresh = dist.new_group()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, fresh.group_name)
    assert len(set(everyone)) == 1, everyone
    dist.barrier(fresh)
    print(f"end {first} of {size} {job.digests()} lost {state.lost}", flush=True)
    dist.destroy_process_group()


main()
