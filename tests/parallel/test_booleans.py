"""Booleans among the arguments of training: nothing else is taken for one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import hpcdist as dist
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.parallel import Join
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

OF_DDP = (
    "broadcast_buffers",
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "forward_sync_buffers",
    "lazy_bucket_allocation",
)
OF_ZERO = ("parameters_as_bucket_view", "overlap_with_ddp")
OF_JOIN = ("enable", "throw_on_early_termination", "divide_by_initial_world_size")
MAKE = {
    "ddp": lambda **options: dist.DistributedDataParallel(torch.nn.Linear(2, 2), **options),
    "zero": lambda **options: ZeroRedundancyOptimizer(
        torch.nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1, **options
    ),
    "join": lambda **options: Join([MAKE["ddp"]()], **options),
    "its join": lambda **options: MAKE["ddp"]().join(**options),
}
ALL = [
    *(("ddp", name) for name in OF_DDP),
    *(("zero", name) for name in OF_ZERO),
    *(("join", name) for name in OF_JOIN),
    *(("its join", name) for name in OF_JOIN),
]


@pytest.mark.parametrize("wrong", ["False", "yes", 2, 0.0], ids=repr)
@pytest.mark.parametrize("what, name", ALL)
def test_what_is_no_boolean(what, name, wrong):
    with parallel_raises(TypeError, match=f"{name} must be True or False, not"):
        MAKE[what](**{name: wrong})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what, name", ALL)
def test_a_rank_whose_value_is_wrong_tells_the_others(what, name):
    """They waited for it in the constructor, or in front of the block, until the timeout."""
    last = dist.get_world_size() - 1
    wrong = dist.get_rank() == last
    refused = None
    try:
        made = MAKE[what](**({name: "False"} if wrong else {}))
        if "join" in what:
            with made:
                pass
    except Exception as error:
        refused = error
    parallel_assert(
        type(refused) is (TypeError if wrong else dist.DistMismatchError), repr(refused)
    )
    parallel_assert(f"{name} must be True or False, not str" in str(refused), str(refused))
    dist.barrier()


#: What keeps a value where it can be looked at; the others are seen by what they do.
KEPT = [pair for pair in ALL if pair[1] not in ("init_sync", "check_reduction")]


def kept(made, what, name):
    if what in ("ddp", "zero"):
        return getattr(made, name)
    (hook,) = made._hooks
    return {
        "enable": made._enable,
        "throw_on_early_termination": made._throw,
        "divide_by_initial_world_size": hook.initial,
    }[name]


@pytest.mark.parametrize("given", [0, np.bool_(False), np.int64(0)], ids=repr)
@pytest.mark.parametrize("what, name", KEPT)
def test_other_forms_of_false(what, name, given):
    parallel_assert(kept(MAKE[what](**{name: given}), what, name) is False)


@pytest.mark.parametrize("given", [1, np.bool_(True)], ids=repr)
@pytest.mark.parametrize("what, name", KEPT)
def test_other_forms_of_true(what, name, given):
    parallel_assert(kept(MAKE[what](**{name: given}), what, name) is True)


@pytest.mark.parametrize("given", [0, 1, np.bool_(False), np.bool_(True)], ids=repr)
def test_what_init_sync_and_check_reduction_do(given):
    rank, module = dist.get_rank(), torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dist.DistributedDataParallel(module, init_sync=given, check_reduction=given)
    parallel_assert(bool((module.weight == (0 if given else rank)).all()), str(module.weight))
    texts = [str(each.message) for each in said]
    parallel_assert(("check_reduction has no effect" in texts) == bool(given), str(texts))


def test_settings_of_a_module():
    model = MAKE["ddp"]()
    for name in ("broadcast_buffers", "require_manual_backward_finalization"):
        with parallel_raises(TypeError, match=f"{name} must be True or False, not str"):
            setattr(model, name, "False")
        setattr(model, name, np.bool_(True))
        parallel_assert(getattr(model, name) is True)
        setattr(model, name, 0)
        parallel_assert(getattr(model, name) is False)


@pytest.mark.mpi(min_size=2)
def test_the_first_calls_of_a_world_may_all_fail(no_world):
    """Such errors left the ranks out of step: only one of two counters of calls was reset."""
    dist.init_process_group()
    last = dist.get_rank() == dist.get_world_size() - 1
    texts = []
    for wrong in ({"bucket_cap_mb": -1}, {"static_graph": None}):
        try:
            dist.DistributedDataParallel(torch.nn.Linear(3, 3), **(wrong if last else {}))
        except (ValueError, TypeError, dist.DistError) as error:
            texts.append(str(error))
    total = torch.ones(1)
    dist.all_reduce(total)
    parallel_assert(len(texts) == 2 and total.item() == dist.get_world_size(), str(texts))
    dist.destroy_process_group()
