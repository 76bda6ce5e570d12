"""Tensors in memory that all ranks of a node map: how they are made, and the pool behind them."""

import gc
import logging
import os
import resource
import signal
import threading
import time
import warnings

import pytest
import torch
from cases import Check, draw, here, reference
from lateness import hear, once_others_have_ended, tell_all
from resources import held
from worlds import between_nodes, one_node

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

LONG = 100_003  # elements


@pytest.fixture
def group():
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def placed(part: torch.Tensor, group) -> torch.Tensor:
    """A symmetric tensor with these values."""
    return dist.empty(part.numel(), dtype=part.dtype, group=group).copy_(part)


def shared(tensor, group) -> bool:
    return dist.is_symmetric(tensor, group)


def test_shapes_dtypes_and_values(group):
    check, (rank, size) = Check(), here()
    for made, shape, dtype, value in (
        (dist.zeros(3, 4, group=group), (3, 4), torch.float32, 0),
        (dist.zeros((2, 0, 5), group=group), (2, 0, 5), torch.float32, 0),
        (dist.full((5,), 7, group=group), (5,), torch.int64, 7),
        (dist.full([2, 2], rank + 0.5, group=group), (2, 2), torch.float32, rank + 0.5),
        (dist.full((), True, group=group), (), torch.bool, True),
        (dist.full((3,), 2, dtype=torch.bfloat16, group=group), (3,), torch.bfloat16, 2),
        (dist.zeros(6, symmetric=False), (6,), torch.float32, 0),
        (dist.full((2,), 2**24 + 1, symmetric=False), (2,), torch.int64, 2**24 + 1),
        (dist.full((3,), True, symmetric=False), (3,), torch.bool, True),
        (dist.full((2,), 1 + 2j, symmetric=False), (2,), torch.complex64, 1 + 2j),
    ):
        label = f"{shape} {dtype}"
        check.that(tuple(made.shape) == shape and made.dtype == dtype, label)
        check.that(made.is_contiguous() and bool((made == value).all()), label)
    made = dist.empty(LONG, group=group, device="cpu")
    check.that(shared(made, group) == (size > 1 and one_node()), "memory")
    check.that(not made.requires_grad and made.numel() == LONG, "a plain tensor")
    check.done()


def test_a_model_trains_in_it(group):
    """Autograd writes there as anywhere."""
    weight = dist.full((50, 40), 0.01, group=group).requires_grad_()
    weight.grad = dist.zeros(50, 40, group=group)
    grad = weight.grad
    (torch.ones(3, 50) @ weight).sum().backward()
    dist.all_reduce(weight.grad, group=group)
    parallel_assert(weight.grad is grad and bool((grad == 3 * dist.get_world_size()).all()))


# ---- the pool ----


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_memory_is_used_again_once_all_ranks_have_dropped_it(group):
    rank, _size = here()
    first = dist.empty(LONG, group=group)
    address, kept = first.data_ptr(), first[5:] if rank == 0 else None
    del first
    dist.barrier()
    second = dist.empty(LONG, group=group)
    parallel_assert(second.data_ptr() != address, "rank 0 has a view of it")
    if rank == 0:
        kept.fill_(1)
    second.fill_(2)
    parallel_assert(rank != 0 or bool((kept == 1).all()))
    del kept, second
    dist.barrier()
    third = dist.empty(LONG - 7, group=group)
    parallel_assert(shared(third, group))
    before = held().mappings
    for turn in range(40):
        third = None
        dist.barrier()
        third = dist.full((LONG - turn,), turn, group=group)
        parallel_assert(bool((third == turn).all()))
    parallel_assert(held().mappings <= before, "one block at a time")


@pytest.mark.mpi(min_size=2)
def test_memory_is_given_once_without_the_entry_check():
    """Rank 0 may be ahead of the others then, and must not give again what they have not taken."""
    rank, _ = here()
    group = dist.new_group(pg_options=dist.MPIOptions(check="off"))
    first = dist.empty(LONG, group=group)
    del first
    dist.barrier()
    time.sleep(0.3 if rank else 0.0)
    one = dist.empty(LONG, group=group)
    if rank == 0:
        del one
    other = dist.empty(LONG, group=group)
    dist.barrier()
    parallel_assert(rank == 0 or one.data_ptr() != other.data_ptr(), "two tensors in one place")
    del other
    dist.barrier()
    dist.destroy_process_group(group)


def test_nothing_is_left_of_a_group(rng):
    before = held()
    for _ in range(3):
        made = dist.new_group()
        tensors = [placed(draw(rng, torch.float32, n), made) for n in (5, LONG, 40_001)]
        dist.all_reduce(tensors[1], group=made)
        names = [
            name for name in os.listdir("/dev/shm") if name.startswith(f"hpcdist-{os.getpid()}-")
        ]
        parallel_assert(not names, "a name that kill -9 would leave there")
        del tensors
        dist.destroy_process_group(made)
    after = held()
    parallel_assert((after.mappings, after.files) == (before.mappings, before.files), str(after))
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_outside_the_group_the_warning_says_what_is_made():
    rank = dist.get_rank()
    made = dist.new_group([0])
    calls = {
        "empty": lambda: dist.empty(3, group=made),
        "zeros": lambda: dist.zeros(3, group=made),
        "full": lambda: dist.full((3,), 1.0, group=made),
    }
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tensor = call()
        parallel_assert(tensor.shape == (3,) and not dist.is_symmetric(tensor, made))
        text = (
            f"{name} makes a tensor in ordinary memory on rank {rank}, which is not in the given "
            "group"
        )
        said = [(str(one.message), one.filename) for one in caught]
        parallel_assert(said == [(text, __file__)] * (rank > 0), lambda said=said: str(said))
    if rank == 0:
        del tensor
        dist.destroy_process_group(made)


def test_a_tensor_outlives_its_group(rng):
    rank, _ = here()
    made = dist.new_group()
    tensor = dist.full((LONG,), rank, group=made)
    dist.destroy_process_group(made)
    with parallel_raises(ValueError, match="destroyed"):
        dist.is_symmetric(tensor, made)
    with parallel_raises(ValueError, match="destroyed"):
        dist.empty(3, group=made)
    parallel_assert(bool((tensor.add_(1) == rank + 1).all()))
    dist.all_reduce(tensor)
    del tensor
    gc.collect()


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["no space", "no descriptor", "too much"])
def test_where_there_is_no_room_all_ranks_get_ordinary_memory(rng, group, how, caplog):
    rank, size = here()
    n, limit = LONG, None
    if how == "no space" and rank == 0:  # who makes the file
        which, limit = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(which, (4096, limit[1]))
    elif how == "no descriptor" and rank == size - 1:
        which, limit = resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(which, (3, limit[1]))
    elif how == "too much":
        room = os.statvfs("/dev/shm")
        n = room.f_blocks * room.f_frsize // 4 // size + 1
    with caplog.at_level(logging.WARNING):
        try:
            tensor = dist.empty(n, group=group)
        finally:
            if limit:
                resource.setrlimit(which, limit)
    parallel_assert(not shared(tensor, group) and tensor.numel() == n)
    said = [record.getMessage() for record in caplog.records]
    parallel_assert(len(said) == (rank == 0), str(said))
    parallel_assert(rank != 0 or "/dev/shm, which has" in said[0], str(said))
    del tensor
    # the next request is free to succeed
    parts = [draw(rng, torch.float32, LONG) for _ in range(size)]
    tensor = placed(parts[rank], group)
    parallel_assert(shared(tensor, group))
    dist.all_reduce(tensor, group=group)
    want, bound = reference("SUM", parts)
    parallel_assert(bool(((tensor.double() - want).abs() <= bound).all()))


@pytest.mark.mpi(min_size=2)
def test_a_group_between_nodes_gets_ordinary_memory(caplog):
    rank, size = here()
    made = between_nodes()
    with caplog.at_level(logging.WARNING):
        tensor = dist.full((LONG,), rank, group=made)
        again = dist.zeros(3, group=made)
    said = [record.getMessage() for record in caplog.records]
    parallel_assert(not shared(tensor, made) and not shared(again, made))
    parallel_assert(len(said) == (rank == 0), "once a group, on rank 0")
    parallel_assert(rank != 0 or "do not share one node" in said[0], str(said))
    dist.all_reduce(tensor, group=made)
    parallel_assert(bool((tensor == sum(range(size))).all()))
    dist.destroy_process_group(made)


# ---- mistakes and faults ----


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_mistakes_are_errors_on_all_ranks(group):
    rank, _size = here()
    with parallel_raises(dist.DistMismatchError, match="empty"):
        dist.empty(10 + rank, group=group)
    for wrong, kind in (
        (lambda: dist.empty(-3, group=group), RuntimeError),
        (lambda: dist.empty(3, device="meta", group=group), ValueError),
        (lambda: dist.empty("x", group=group), TypeError),
        (lambda: dist.full((2,), "x", group=group), (TypeError, RuntimeError, ValueError)),
    ):
        with parallel_raises(kind if rank == 0 else dist.DistMismatchError):
            wrong() if rank == 0 else dist.empty(3, group=group)
    for called, right, wrong in (
        ("zeros", lambda: dist.zeros(3, group=group), lambda: dist.zeros("x", group=group)),
        ("full", lambda: dist.full(3, 1, group=group), lambda: dist.full(3, "x", group=group)),
    ):
        error = (TypeError, RuntimeError, ValueError) if rank == 0 else dist.DistMismatchError
        with parallel_raises(error, match="" if rank == 0 else f"this rank called {called}\\("):
            wrong() if rank == 0 else right()
    tensor = dist.full(3, 0.0, group=group) if rank == 0 else dist.zeros(3, group=group)
    parallel_assert(shared(tensor, group), "filled in different ways")
    with parallel_raises(dist.DistMismatchError):
        dist.empty(3, group=group) if rank == 0 else dist.barrier(group=group)
    parallel_assert(shared(dist.empty(3, group=group), group), "afterwards")


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_is_named(group):
    late = here()[1] - 1
    group.carrier.timeout = 0.6
    with parallel_raises(dist.DistTimeoutError), once_others_have_ended(late):
        dist.empty(LONG, group=group)
    group.carrier.timeout = 20.0
    parallel_assert(shared(dist.empty(LONG, group=group), group), "afterwards")


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_ctrl_c_while_a_rank_is_missing(group):
    rank, _ = here()
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        hear(0)
    with parallel_raises(KeyboardInterrupt if rank == 0 else dist.DistTimeoutError):
        try:
            dist.empty(LONG, group=group)
        finally:
            if rank == 0:
                tell_all()
    parallel_assert(shared(dist.empty(LONG, group=group), group), "afterwards")


def test_a_child_of_fork_returns_nothing(group):
    rank, size = here()
    tensor = dist.full((LONG,), rank, group=group)
    child = os.fork()
    if child == 0:
        code = 0 if bool((tensor == rank).all()) else 1
        del tensor
        gc.collect()
        os._exit(code)
    parallel_assert(os.waitpid(child, 0)[1] == 0)
    other = dist.full((LONG,), 9, group=group)
    parallel_assert(other.data_ptr() != tensor.data_ptr() and bool((tensor == rank).all()))
    dist.all_reduce(tensor, group=group)
    parallel_assert(bool((tensor == sum(range(size))).all()))


def test_two_groups_in_two_threads(rng):
    rank, size = here()
    groups, problems = [dist.new_group() for _ in range(2)], []

    def work(made) -> None:
        try:
            for turn in range(30):
                tensor = dist.full((LONG + turn,), rank + turn, group=made)
                dist.all_reduce(tensor, group=made)
                if not bool((tensor == sum(r + turn for r in range(size))).all()):
                    problems.append(f"turn {turn}")
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(made,)) for made in groups]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    parallel_assert(not problems, str(problems))
    for made in groups:
        dist.destroy_process_group(made)
