# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What type checkers are to find behind a group: a Carrier, and no Any on the way; never run."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

from hpcdist import ProcessGroup, ReduceOp, Work
from hpcdist._engine import Comm
from hpcdist.backends.base import GroupBackend
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.cuda_over_mpi import StagedGroup
from hpcdist.backends.dispatch import agreeing, combine, serving
from hpcdist.backends.nccl.group import NcclGroup
from hpcdist.groups.members import Members
from hpcdist.groups.resolve import carrier_of, member, resolve
from hpcdist.groups.state import world
from hpcdist.groups.world import NonMember


def backends(comm: Comm, third: GroupBackend, staged: StagedGroup, nccl: NcclGroup) -> None:
    carriers: list[Carrier] = [comm, third, staged, nccl]
    assert_type(combine({"cpu": comm, "cuda": nccl}), Carrier)
    assert_type(serving(carriers[0], None), Carrier)
    assert_type(agreeing(carriers[0]), Carrier)


def all_reduce(t: torch.Tensor, pg: ProcessGroup) -> None:
    # what the public function takes for the default group and for another, and the method's
    assert_type(world.comm, Carrier)
    assert_type(carrier_of(pg), Carrier)
    assert_type(pg.carrier, Carrier)
    assert_type(resolve(pg), ProcessGroup | NonMember)
    assert_type(resolve(pg).carrier, Carrier)
    assert_type(resolve(None).members, Members)
    assert_type(member(pg), ProcessGroup)
    assert_type(world.comm.all_reduce(t, ReduceOp.SUM, True), Work)
    assert_type(world.comm.all_reduce(t, ReduceOp.SUM), Work | None)
    assert_type(world.comm.broadcast(t, 0, True), Work)
    assert_type(pg.carrier.native, Comm | None)
    if pg.carrier.native is not None:
        assert_type(pg.carrier.native.native, Comm)
        assert_type(pg.carrier.native.all_reduce(t, ReduceOp.SUM, True), Work)
    assert_type(pg.carrier.isend(t, 1), Work)
    world.comm.all_reduce(t, ReduceOp.SUM, True, apis="mine")  # type: ignore
    world.comm.all_reduce(t, ReduceOp.SUM, "later")  # type: ignore
    world.comm.all_reduce(t, ReduceOp.SUM, True).wait_for()  # type: ignore
    world.comm.all_reduces(t)  # type: ignore
