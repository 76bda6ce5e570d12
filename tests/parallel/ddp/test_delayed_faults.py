"""Delayed parameters where a pass fails on one rank: all are in step afterwards."""

from __future__ import annotations

import pytest
import torch
from ddp_cases import DDP, Boom, SpareNet, boom_if, explode
from torch import nn

import hpcdist as dist
from hpcdist.parallel.comm_hooks import allreduce_hook
from hpcdist.testing import parallel_assert

pytestmark = pytest.mark.ranks


def own(number: int) -> torch.Tensor:
    return torch.full((3, 2), 1.0 + number + dist.get_rank())


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
        with pytest.raises(dist.DistError) as error:
            model(own(0))
        if hook is not None or not fails:
            assert "an earlier backward pass failed" in str(error.value)
        again = DDP(net, process_group=group)  # compares its calls with the other ranks'
        del model, again
    parallel_assert(True)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize("all_fail", [True, False], ids=["all ranks", "one rank"])
def test_an_exception_behind_the_last_gradient(others: bool, all_fail: bool) -> None:
    """Where the other ranks have averages that this one has not, the next backward is an error."""
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(3):
        net = nn.Linear(2, 2)
        layers = nn.Sequential(nn.Identity(), net, nn.Linear(2, 2)) if others else net
        named = [(n, p) for n, p in layers.named_parameters() if not others or n[0] == "2"]
        model = DDP(
            layers,
            process_group=group,
            find_unused_parameters=True,  # no bucket waits for the end of backward
            delay_all_reduce_named_params=named,
            param_to_hook_all_reduce=named[0][1],
        )
        fails = all_fail or rank == turn % size
        model(own(0)).sum().backward()
        x = own(0).requires_grad_() * 1  # its hook runs behind the parameters'
        x.register_hook(explode if fails else lambda _gradient: None)
        loss = model(x).sum()
        with boom_if(fails):
            loss.backward()
        loss = model(own(0)).sum()
        if all_fail:
            net.zero_grad()
            loss.backward()
            parallel_assert(net.weight.grad is not None)
            continue
        with pytest.raises(dist.DistMismatchError, match="after a backward that an exception"):
            loss.backward()
        with pytest.raises(dist.DistError, match="an earlier backward pass failed"):
            model(own(0))
        DDP(layers, process_group=group)
    dist.destroy_process_group(group)
