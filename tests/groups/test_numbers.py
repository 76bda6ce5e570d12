"""Ranks, tags, splits, options of hooks: what counts as a number, and errors that name them."""

import numpy as np
import pytest
import torch

import hpcdist as dist
from hpcdist.nn import functional
from hpcdist.parallel import comm_hooks
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def test_integers_of_any_library_are_ranks():
    last = dist.get_world_size() - 1
    for root in (torch.tensor(last), torch.tensor(last, dtype=torch.uint8), np.int32(last)):
        data = torch.full((3,), float(dist.get_rank()))
        dist.broadcast(data, root)
        dist.broadcast(data, group_src=root)
        dist.reduce(data.clone(), root)
        dist.broadcast_object_list([1], root)
        parallel_assert(data.tolist() == [last] * 3, data)
    parallel_assert(dist.get_group_rank(dist.group.WORLD, torch.tensor(last)) == last)


@pytest.mark.parametrize("wrong", (0.0, "0", torch.tensor(0.0), torch.tensor([0, 0])), ids=repr)
def test_what_is_no_rank_is_refused_by_name(wrong):
    data = torch.zeros(3)
    for call, name in (
        (lambda: dist.broadcast(data, wrong), "src"),
        (lambda: dist.broadcast(data, group_src=wrong), "group_src"),
        (lambda: dist.reduce(data, wrong), "dst"),
        (lambda: dist.send(data, wrong), "dst"),
        (lambda: dist.irecv(data, wrong), "src"),
        (lambda: dist.get_global_rank(dist.group.WORLD, wrong), "group_rank"),
        (lambda: dist.get_group_rank(dist.group.WORLD, wrong), "global_rank"),
    ):
        with parallel_raises(TypeError, match=f"^{name} must be a whole number"):
            call()


def test_what_is_no_tag_or_peer_of_a_window_is_refused_by_name():
    data = torch.zeros(4)
    for wrong in ("a", 1.0, None):
        with parallel_raises(TypeError, match="tag must be a whole number"):
            dist.isend(data, 0, tag=wrong)
    if not dist.group.WORLD.supports_window:
        return
    window = dist.group.WORLD.new_window(dist.zeros(4))
    for wrong in (None, "a", 1.0):
        with parallel_raises(TypeError, match="rank must be a whole number"):
            window.put(data, wrong)
        with parallel_raises(TypeError, match="target_offset_nelems must be a whole number"):
            window.get(data, 0, wrong)
        with parallel_raises(TypeError, match="rank must be a whole number"):
            window.signal(wrong)


def test_tensors_are_splits():
    size, rank = dist.get_world_size(), dist.get_rank()
    for splits in (
        torch.full((size,), 2),
        np.full(size, 2),
        range(2, 3) if size == 1 else [2] * size,
    ):
        out = torch.zeros(2 * size)
        dist.all_to_all_single(out, torch.full((2 * size,), float(rank)), splits, splits)
        dist.group.WORLD.all_to_all_single(out.clone(), out.clone(), splits, splits).wait()
        functional.all_to_all_single(out.clone(), out.clone(), splits, splits)
        parallel_assert(out.tolist() == [k // 2 for k in range(2 * size)], out)
    data = torch.zeros(2 * size)
    for wrong in (2, torch.tensor(2), torch.ones(size, size, dtype=torch.int64)):
        with parallel_raises(TypeError, match="output_split_sizes must be a list of whole numb"):
            dist.all_to_all_single(data, data.clone(), wrong)
    with parallel_raises(TypeError, match="input_split_sizes must hold whole numbers"):
        dist.all_to_all_single(data, data.clone(), None, torch.full((size,), 2.0))


def test_one_rank_alone_with_wrong_splits():
    size = dist.get_world_size()
    data = torch.zeros(2 * size)
    splits = 2 if dist.get_rank() == 0 else torch.full((size,), 2)
    with parallel_raises((TypeError, dist.DistError), match="output_split_sizes must be a list"):
        dist.all_to_all_single(data, data.clone(), splits)


def test_an_array_of_times_is_refused_by_its_dtype():
    with parallel_raises(TypeError, match="has dtype datetime64.*arrays of numbers and booleans"):
        dist.all_reduce(np.array(["2026-01-01"], "datetime64[D]"))


def test_what_is_no_number_among_a_hooks_options_is_refused_by_name():
    state = comm_hooks.PowerSGDState
    whole = ("matrix_approximation_rank", "start_powerSGD_iter", "random_seed")
    whole += ("compression_stats_logging_frequency",)
    for name in (*whole, "min_compression_rate", "orthogonalization_epsilon"):
        for wrong in (None, "1", [3], *((2.5,) if name in whole else ())):
            with parallel_raises(TypeError, match=f"^{name} must be a"):
                state(None, **{name: wrong})
    with parallel_raises(ValueError, match="^min_compression_rate must be a number, not nan"):
        state(None, min_compression_rate=float("nan"))
    for wrong in (None, "1", 1.5):
        with parallel_raises(TypeError, match="^start_localSGD_iter must be a whole number"):
            comm_hooks.PostLocalSGDState(None, None, wrong)
        with parallel_raises(TypeError, match="^bucket_size must be a whole number"):
            comm_hooks.quantization_perchannel_hook(None, None, wrong)
    made = state(None, matrix_approximation_rank=np.int64(2), start_powerSGD_iter=1e3)
    parallel_assert((made.matrix_approximation_rank, made.start_powerSGD_iter) == (2, 1000))
