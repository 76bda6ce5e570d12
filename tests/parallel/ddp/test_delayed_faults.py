"""Delayed parameters where a pass fails on one rank: all are in step afterwards."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import DDP, SpareNet

import hpcdist as dist
from hpcdist.parallel.comm_hooks import allreduce_hook
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


def own(number: int) -> torch.Tensor:
    return torch.full((3, 2), 1.0 + number + dist.get_rank())


class Boom(Exception):
    pass


def explode(*_gradients: torch.Tensor) -> None:
    raise Boom


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("find", [False, True], ids=["all used", "find unused"])
@pytest.mark.parametrize("hook", [allreduce_hook, None], ids=["hook", "no hook"])
@pytest.mark.parametrize("manual", [False, True], ids=["", "ended by hand"])
def test_an_exception_on_one_rank_leaves_the_ranks_in_step(find: bool, hook, manual: bool) -> None:
    """The ranks compare how a pass with a hook ends when the delayed gradients are there too."""
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(6):
        net = SpareNet()
        named = [(n, p) for n, p in net.named_parameters() if n.startswith(("first.", "last."))]
        model = DDP(
            net,
            process_group=group,
            find_unused_parameters=find,
            delay_all_reduce_named_params=named,
            param_to_hook_all_reduce=net.first.weight,
        )
        if hook is not None:
            model.register_comm_hook(group, hook)
        model.require_manual_backward_finalization = manual

        def step(model: DDP = model) -> None:
            model(own(0)).sum().backward()
            if manual:
                model.finalize_backward()

        step()
        step()
        fails = rank == turn % size
        if fails:
            (net.first.bias if turn % 4 < 2 else net.spare.weight).register_hook(explode)
        with pytest.raises(Boom if fails else dist.DistError):
            step()
        if hook is not None:  # else the next backward may be the error, of a rank that comes there
            with pytest.raises(dist.DistError, match="an earlier backward pass failed"):
                model(own(0))
        again = DDP(net, process_group=group)  # compares its calls with the other ranks'
        del model, again
    parallel_assert(True)
    dist.destroy_process_group(group)
