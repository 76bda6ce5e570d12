"""Starting, asking and ending: the default group on real ranks."""

from __future__ import annotations

import re
import threading
import time
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
from worlds import SHORT, outcome, true_place, works

import hpcdist as dist
from hpcdist import MPIOptions, _engine, launchers
from hpcdist.startup.init import _checked_request
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

#: Why the backend "nccl" is refused where there is no GPU: with its library, and without.
NO_NCCL = (
    "CUDA is not available: the backend 'nccl'"
    if dist.is_nccl_available()
    else "the backend 'nccl' is not available"
)


def test_the_world_is_mpis():
    rank, size = true_place()
    parallel_assert((dist.get_rank(), dist.get_world_size()) == (rank, size))
    parallel_assert(dist.is_initialized() and dist.is_available())
    parallel_assert(dist.get_backend() == "mpi" == dist.Backend.MPI)
    parallel_assert(dist.get_backend_config() == "cpu:mpi")
    parallel_assert(dist.get_process_group_ranks(None) == list(range(size)))
    parallel_assert(dist.group.WORLD is dist.GroupMember.WORLD is not None)
    parallel_assert(works)


def test_the_launcher_says_what_mpi_says():
    launch = launchers.detect()
    rank, size = true_place()
    parallel_assert(size == 1 or (launch.rank, launch.size) == (rank, size), f"{launch}")


def test_node_local_rank():
    everyone = [None] * dist.get_world_size()
    node = dist.group.WORLD.carrier.node_ranks
    dist.all_gather_object(everyone, (node[0], dist.get_node_local_rank()))
    there = sorted(number for first, number in everyone if first == node[0])
    parallel_assert(there == list(range(len(node))), f"{everyone}")
    parallel_assert(dist.get_node_local_rank(fallback_rank=99) == dist.get_node_local_rank())


def test_twice_is_an_error():
    with parallel_raises(ValueError, match="exists already"):
        dist.init_process_group()
    parallel_assert(works)


def test_init_and_destroy_ten_times():
    dist.destroy_process_group()
    sums = []
    for _ in range(10):
        dist.init_process_group(timeout=SHORT)
        group = dist.new_group()
        sums.append(works())
        total = np.ones(3)
        dist.all_reduce(total, group=group)
        sums.append(bool((total == dist.get_world_size()).all()))
        dist.destroy_process_group()
        sums.append(not dist.is_initialized() and dist.get_pg_count() == 0)
    dist.init_process_group(timeout=SHORT)
    parallel_assert(all(sums), f"{sums}")
    parallel_assert(_engine.mpi_state() == "up")


@pytest.mark.mpi(min_size=2)
def test_the_programs_first_collective_is_number_1(no_world):
    """Not one of those that init_process_group makes itself."""
    dist.init_process_group(timeout=SHORT)
    with parallel_raises(dist.DistMismatchError, match=r"collective #1 of|collective #1 \("):
        dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_has_only_started_has_called_nothing(no_world):
    dist.init_process_group(timeout=SHORT)
    dist.group.WORLD.timeout = timedelta(seconds=1)
    late, text = dist.get_rank() == 1, ""
    if late:
        time.sleep(2)
    try:
        dist.barrier()
    except dist.DistTimeoutError as error:
        text = str(error)
    if not late:
        time.sleep(1.5)  # until the late one has arrived
    words = ["called no operation yet", "gave up"]  # of the rank that gives up, of the others
    if 1 not in dist.group.WORLD.carrier.node_ranks:
        words.append("rank 1 has not joined")  # what it has called is not seen from another node
    parallel_assert(any(each in text for each in words), text)
    parallel_assert(dist.get_world_size() > 2 or late or "called no operation yet" in text, text)


def test_without_a_default_group():
    dist.destroy_process_group()
    tensor = torch.ones(2)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "barrier": dist.barrier,
        "send": lambda: dist.send(tensor, 0),
        "get_rank": dist.get_rank,
        "get_world_size": dist.get_world_size,
        "get_backend": dist.get_backend,
        "new_group": dist.new_group,
        "all_gather_object": lambda: dist.all_gather_object([None], 1),
        "destroy_process_group": dist.destroy_process_group,
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            if "init_process_group" not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            wrong.append(f"{name} did not raise")
    gone = not dist.is_initialized() and dist.group.WORLD is None
    dist.init_process_group(timeout=SHORT)
    parallel_assert(not wrong, f"{wrong}")
    parallel_assert(gone)


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "mpi"},
        {"backend": "MPI"},
        {"backend": "cpu:mpi"},
        {"init_method": "mpi://"},
        {"backend": "mpi", "init_method": "mpi://", "group_name": "mine"},
        {"backend": "mpi", "rank": 0, "world_size": 0},
        {"device_id": torch.device("cpu")},
        {"pg_options": MPIOptions(check="full")},
    ],
    ids=str,
)
def test_ways_to_start(no_world, arguments):
    text = outcome(**arguments)
    fine = not text and works()
    backend = dist.get_backend() if not text else None
    name = dist.group.WORLD.name if not text else None
    if text:
        dist.init_process_group(timeout=SHORT)
    parallel_assert(fine, text)
    parallel_assert(backend == arguments.get("backend", "mpi").lower(), f"{backend}")
    parallel_assert(name == arguments.get("group_name", "world"), f"{name}")


def test_stated_rank_and_size_are_compared_with_mpi(no_world):
    rank, size = true_place()
    texts = [outcome(rank=rank, world_size=size)]
    dist.destroy_process_group()
    texts.append(outcome(init_method=f"mpi://?rank={rank}&world_size={size}"))
    dist.destroy_process_group()
    wrong = [
        outcome(world_size=size + 1),
        outcome(rank=rank + 1, world_size=size),
        outcome(init_method=f"mpi://?world_size={size + 3}"),
    ]
    dist.init_process_group(timeout=SHORT)
    parallel_assert(texts == ["", ""], f"{texts}")
    parallel_assert(
        all(f"rank {rank} of {size}" in text and "mpirun -n" in text for text in wrong), f"{wrong}"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"backend": "nothing"}, "ValueError: there is no backend 'nothing'"),
        ({"backend": "nccl"}, f"DistBackendError: {NO_NCCL}"),
        ({"backend": "ucc"}, "DistBackendError: the backend 'ucc' is not .*backend='mpi'"),
        ({"backend": "cpu:mpi,cuda:nccl"}, f"DistBackendError: {NO_NCCL}"),
        ({"backend": "cpu:mpi,cpu:mpi"}, "ValueError: backend .* twice"),
        ({"backend": "cpu:"}, "ValueError: .* not of the form device:backend"),
        ({"backend": 5}, "ValueError: a backend's name must be a str"),
        ({"init_method": "etcd://"}, "DistNetworkError: No rendezvous handler for etcd://"),
        ({"init_method": "mpi://", "store": object()}, "ValueError: give either"),
        ({"store": object()}, "ValueError: a store needs rank and world_size"),
        ({"pg_options": {"comm": 1}}, "TypeError: pg_options .*MPIOptions"),
    ],
)
def test_refusals(no_world, monkeypatch, arguments, expected):
    # as on a login node: torch for CUDA, which brings libnccl, and no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = outcome(**arguments)
    left = dist.is_initialized()
    if not left:
        dist.init_process_group(timeout=SHORT)
    parallel_assert(not left, "the group exists in spite of it")
    parallel_assert(re.search(expected, text) is not None, text)
    parallel_assert(works)


@pytest.mark.parametrize("timeout", [5, "5s", timedelta(0), timedelta(seconds=-1)])
def test_refuses_timeouts(no_world, timeout):
    try:
        dist.init_process_group(timeout=timeout)
        text = ""
    except (TypeError, ValueError) as error:
        text = str(error)
    if not dist.is_initialized():
        dist.init_process_group(timeout=SHORT)
    parallel_assert("timeout must be" in text, text)


def test_timeout_setting(no_world, monkeypatch):
    monkeypatch.setenv("HPCDIST_TIMEOUT", "7.5")
    dist.init_process_group()
    parallel_assert(dist.group.WORLD.timeout == timedelta(seconds=7.5))
    dist.group.WORLD.timeout = timedelta(seconds=9)
    parallel_assert(dist.group.WORLD.carrier.timeout == 9.0)


@pytest.mark.parametrize(("setting", "level"), [("off", 0), ("on", 1), ("full", 2), ("fast", 3)])
def test_check_setting(no_world, monkeypatch, setting, level):
    monkeypatch.setenv("HPCDIST_CHECK", setting)
    dist.init_process_group(timeout=SHORT)
    sub = dist.new_group()
    parallel_assert(dist.group.WORLD.carrier.check == level == sub.carrier.check)
    parallel_assert(works)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("variable", "setting"), [("HPCDIST_CHECK", "off"), ("HPCDIST_CHECK_TRANSPORT", "MPI")]
)
def test_a_setting_that_one_rank_has_alone_is_named(no_world, monkeypatch, variable, setting):
    rank, size = true_place()
    if rank == size - 1:
        monkeypatch.setenv(variable, setting)
    text = outcome()
    monkeypatch.undo()
    if not dist.is_initialized():
        dist.init_process_group(timeout=SHORT)
    parallel_assert(variable in text and f"rank {size - 1}" in text, text)


def test_a_communicator_of_mpi4py_as_the_world(no_world):
    mpi4py = pytest.importorskip("mpi4py.MPI")
    rank, size = true_place()
    backwards = mpi4py.COMM_WORLD.Split(0, key=size - rank)
    text = outcome(pg_options=MPIOptions(comm=backwards))
    seen = (dist.get_rank(), dist.get_world_size()) if not text else None
    fine = not text and works()
    first = torch.tensor([rank])
    dist.broadcast(first, 0)
    backwards.Free()
    still = works()  # on a duplicate of its own
    dist.destroy_process_group()
    dist.init_process_group(timeout=SHORT)
    parallel_assert(seen == (size - 1 - rank, size), f"{text or seen}")
    parallel_assert(fine and still and int(first) == size - 1, text)


def test_part_of_the_job_as_the_world(no_world):
    """Two worlds beside each other, of the even and of the odd ranks."""
    mpi4py = pytest.importorskip("mpi4py.MPI")
    rank, size = true_place()
    half = mpi4py.COMM_WORLD.Split(rank % 2, key=rank)
    text = outcome(pg_options=MPIOptions(comm=half.handle))
    seen = (dist.get_rank(), dist.get_world_size()) if not text else None
    fine = not text and works()
    dist.destroy_process_group()
    half.Free()
    dist.init_process_group(timeout=SHORT)
    expected = (rank // 2, len(range(rank % 2, size, 2)))
    parallel_assert(seen == expected and fine, f"{text or seen}")


def test_mpi_options_refuse():
    mpi4py = pytest.importorskip("mpi4py.MPI")
    with parallel_raises(ValueError, match="MPI_COMM_NULL"):
        MPIOptions(comm=mpi4py.COMM_NULL)
    with parallel_raises(TypeError, match="communicator of mpi4py"):
        MPIOptions(comm="world")
    with parallel_raises(ValueError, match="off, on, full, fast"):
        MPIOptions(check="maybe")


def test_destroyed_groups_say_so():
    group = dist.new_group()
    dist.destroy_process_group(group)
    for call in (
        lambda: dist.all_reduce(torch.ones(1), group=group),
        lambda: dist.get_rank(group),
        lambda: dist.destroy_process_group(group),
        lambda: dist.get_process_group_ranks(group),
        lambda: group.barrier(),
    ):
        with parallel_raises(ValueError, match="has been destroyed"):
            call()
    parallel_assert(works)


def test_destroying_the_world_destroys_all(no_world):
    dist.init_process_group(timeout=SHORT)
    groups = [dist.new_group() for _ in range(3)]
    count = dist.get_pg_count()
    dist.destroy_process_group(dist.group.WORLD)
    after = dist.get_pg_count()
    try:
        groups[1].barrier()
        text = ""
    except ValueError as error:
        text = str(error)
    dist.init_process_group(timeout=SHORT)
    parallel_assert((count, after) == (4, 0) and "destroyed" in text, f"{count} {after} {text}")


def test_destroy_waits_for_outstanding_work(no_world):
    dist.init_process_group(timeout=SHORT)
    tensors = [torch.full((1 << 16,), 1.0) for _ in range(8)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    size = dist.get_world_size()
    dist.destroy_process_group()
    done = all(handle.is_completed() for handle in handles)
    right = all(bool((tensor == size).all()) for tensor in tensors)
    dist.init_process_group(timeout=SHORT)
    parallel_assert(done and right, f"done {done}, right {right}")


@pytest.mark.mpi(min_size=2)
def test_destroy_gives_up_on_a_message_that_never_comes(no_world):
    """The error is raised, the group is gone, and the next one works."""
    dist.init_process_group(timeout=SHORT)
    dist.group.WORLD.timeout = timedelta(seconds=0.5)
    work = dist.irecv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())
    start = time.monotonic()
    try:
        dist.destroy_process_group()
        text = ""
    except dist.DistTimeoutError as error:
        text = str(error)
    took = time.monotonic() - start
    gone = not dist.is_initialized()
    dist.init_process_group(timeout=SHORT)
    parallel_assert(gone and took < 5, f"{took} s, {text!r}")
    parallel_assert(text or work.is_completed(), "no error, and the receive is still there")
    parallel_assert(works)


def test_collectives_from_another_thread():
    """Two groups, two threads: MPI was started for that."""
    group = dist.new_group()
    failures = []

    def run():
        try:
            for _ in range(50):
                total = torch.ones(64)
                dist.all_reduce(total, group=group)
                if not bool((total == dist.get_world_size()).all()):
                    failures.append(total)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    right = all(works() for _ in range(50))
    thread.join()
    parallel_assert(right and not failures, f"{failures}")
    parallel_assert(_engine.thread_level().lower().endswith("multiple"), _engine.thread_level())
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("wrong", "error"), ((3, TypeError), ("a\udcff", ValueError)), ids=ascii)
def test_what_is_no_group_name_is_refused_by_name(wrong, error):
    with parallel_raises(error, match="group_name must be"):
        _checked_request(None, None, None, -1, -1, None, wrong, None, None, 0)
