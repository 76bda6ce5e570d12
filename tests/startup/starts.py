"""The programs of test_starts.py and test_without_launcher.py: each way in which MPI may start.

mpirun -n 2 python starts.py NAME ARGUMENTS

NumPy's arrays do for most: a process without torch starts in a sixth of the time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def say(text: str) -> None:
    """Print a line in one piece: print() would write text and newline apart, and ranks mix."""
    os.write(1, f"{text}\n".encode())


def work(ones: Callable[[int], Any] = np.ones) -> None:
    """Synchronous, asynchronous and point-to-point operations, checked."""
    import hpcdist as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    x = ones(1000) * (rank + 1)
    dist.all_reduce(x)
    assert (x == size * (size + 1) / 2).all()
    works = [dist.all_reduce(ones(n), async_op=True) for n in (1, 1000, 100_000)]
    for one in works:
        one.wait()
        assert (one.result()[0] == size).all()
    if size > 1:
        got = ones(70_000) * -1
        pair = [
            dist.irecv(got, (rank - 1) % size),
            dist.isend(ones(70_000) * rank, (rank + 1) % size),
        ]
        for one in pair:
            one.wait()
        assert (got == (rank - 1) % size).all()
    dist.barrier()


def hpcdist_alone() -> None:
    import torch

    import hpcdist as dist

    dist.init_process_group()
    work(torch.ones)
    assert "mpi4py.MPI" not in sys.modules


def without_torch() -> None:
    import hpcdist as dist

    dist.init_process_group()
    work()
    assert "torch" not in sys.modules


def several_threads() -> None:
    """Several threads start the world at once, as lazy libraries do; one of them gets it."""
    import threading

    import hpcdist as dist

    told: list[str] = []
    ready = threading.Barrier(4)

    def start() -> None:
        ready.wait()
        try:
            dist.init_process_group()
            told.append("")
        except ValueError as error:
            told.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert told.count("") == 1, told
    assert all("init_process_group()" in text for text in told if text), told
    work()


PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def place(when: str) -> None:
    """Say what torchrun's variables are."""
    say(f"{when}: " + " ".join(os.environ.get(name, "-") for name in PLACE))


def variables(method: str = "") -> None:
    """As a script for torchrun has them, before and after the start."""
    place("before")
    import hpcdist as dist

    dist.init_process_group(init_method=method or None)
    work()
    place("after")


def variables_of_spawn() -> None:
    import hpcdist as dist

    dist.spawn(_with_variables, nprocs=2)


def _with_variables(rank: int) -> None:
    assert os.environ["RANK"] == str(rank)
    variables()


def without_destroy_twice() -> None:
    """Groups made again after destroy, the last one left to the exit."""
    import hpcdist as dist

    for _ in range(10):
        dist.init_process_group()
        work()
        dist.destroy_process_group()
    dist.init_process_group()
    work()


def mpi4py_before() -> None:
    from mpi4py import MPI

    import hpcdist as dist
    from hpcdist import _engine

    dist.init_process_group()
    work()
    assert not _engine.owns_mpi()
    dist.destroy_process_group()
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


def mpi4py_after() -> None:
    import hpcdist as dist
    from hpcdist import _engine

    dist.init_process_group()
    from mpi4py import MPI

    work()
    assert _engine.owns_mpi()
    assert MPI.COMM_WORLD.allreduce(1) == dist.get_world_size()
    dist.destroy_process_group()


def fewer_threads() -> None:
    """An MPI that allows one thread at a time: everything runs on the caller's."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    import hpcdist as dist
    from hpcdist import _engine

    dist.init_process_group()
    say(f"level {_engine.thread_level()}")
    work()
    MPI.COMM_WORLD.Barrier()


def some_ranks() -> None:
    """An mpi4py communicator of some ranks as the world."""
    from mpi4py import MPI

    import hpcdist as dist

    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, -world.rank)
    dist.init_process_group(pg_options=dist.MPIOptions(comm=half))
    assert (dist.get_rank(), dist.get_world_size()) == (half.rank, half.size)
    work()
    dist.destroy_process_group()


def given(url: str, rank: str, size: str) -> None:
    """Meet by a URL, or without one; twice; mpi4py comes later."""
    import hpcdist as dist

    how = {"init_method": url, "rank": int(rank), "world_size": int(size)} if url else {}
    for _ in range(2):
        dist.init_process_group(**how)
        assert (dist.get_rank(), dist.get_world_size()) == (int(rank), int(size))
        work()
        dist.destroy_process_group()
    assert not any(name.startswith("PMI") for name in os.environ)
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == int(size)


def child(rank: int, port: str) -> None:
    import hpcdist as dist

    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    work()
    say(f"rank {rank} of {dist.get_world_size()}")
    dist.destroy_process_group()


def multiprocessing(port: str) -> None:
    import torch.multiprocessing as mp

    mp.spawn(child, (port,), nprocs=2)
    mp.start_processes(child, (port,), nprocs=2, start_method="fork")


def children_of_ranks() -> None:
    """Every rank starts a job of its own, without a group of its own and with one."""
    import multiprocessing
    import socket

    import hpcdist as dist

    fresh = multiprocessing.get_context("spawn")
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        children = [fresh.Process(target=child, args=(rank, port)) for rank in range(2)]
        children.append(fresh.Process(target=one_of_one))
        for each in children:
            each.start()
        for each in children:
            each.join()
        assert [each.exitcode for each in children] == [0, 0, 0]
        if not dist.is_initialized():
            dist.init_process_group()
        work()


def one_of_one() -> None:
    import hpcdist as dist

    dist.init_process_group(rank=0, world_size=1)
    work()
    say("one of one")


def tutorial_child(rank: int, size: int, port: str) -> None:
    """As torch's tutorials begin; the import alone is another."""
    import torch

    import hpcdist as dist

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=size)
    assert dist.get_rank() == rank and dist.get_world_size() == size
    work(torch.ones)
    dist.destroy_process_group()


def tutorial(port: str) -> None:
    import torch.multiprocessing as mp

    mp.spawn(tutorial_child, args=(2, port), nprocs=2)


def dying(url: str, rank: str, size: str, how: str) -> None:
    """Rank 1 dies; the others compute for long, or have left."""
    import signal
    import time

    import hpcdist as dist
    from hpcdist.startup import steps

    if how == "early" and rank == "1":
        steps.start_mpi = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if how == "early" and rank == "0":
        begin, steps.start_mpi = steps.start_mpi, lambda *a: (time.sleep(1), begin(*a))[1]
    dist.init_process_group(init_method=url, rank=int(rank), world_size=int(size))
    dist.barrier()
    if how == "left":
        dist.destroy_process_group()
    if rank == "1":
        time.sleep(0.3)
        say(f"dies {time.time():.3f}")
        if how == "exception":
            raise ValueError("boom")
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "left":
        time.sleep(40)


def missing(url: str, rank: str, size: str) -> None:
    from datetime import timedelta

    import hpcdist as dist
    from hpcdist import _engine

    try:
        dist.init_process_group(
            init_method=url, rank=int(rank), world_size=int(size), timeout=timedelta(seconds=2)
        )
    except dist.DistTimeoutError as error:
        say(f"{error}; mpi {_engine.mpi_state()}")


def raising(rank: int, how: str) -> None:
    import hpcdist as dist

    dist.init_process_group()
    assert dist.get_rank() == rank
    work()
    print(f"rank {rank} of {dist.get_world_size()}", flush=True)
    if rank == 1 and how == "raises":
        raise ValueError(f"boom {rank}")
    if rank == 1 and how == "exits":
        sys.exit(5)
    if how:
        dist.barrier()


def spawning(how: str) -> None:
    import hpcdist as dist
    from hpcdist.startup.spawn import ProcessExitedException, ProcessRaisedException, api

    if how == "plain":
        api._starter = lambda: None
    try:
        dist.spawn(raising, ("raises",), nprocs=2, join=False).join()
    except ProcessRaisedException as error:
        cause = type(error.__cause__).__name__
        say(f"{error}raised ProcessRaisedException by rank {error.error_index} from {cause}")
    try:
        dist.spawn(raising, ("exits",), nprocs=2)
    except ProcessExitedException as error:
        say(f"raised ProcessExitedException by rank {error.error_index} with {error.exit_code}")


def spawned(rank: int) -> None:
    import time

    say(f"spawned {os.getpid()}")
    time.sleep(60)


def deserting(how: str, starts: str) -> None:
    """Leave spawned processes alone, in one of several ways, when both have said that they run."""
    import threading
    import time

    import hpcdist as dist
    from hpcdist.startup.spawn import api

    if starts == "plain":
        api._starter = lambda: None
    spawning = threading.Thread(target=dist.spawn, args=(spawned, (), 2, False))
    spawning.start()
    spawning.join()  # its end is not the program's
    if how == "waits":
        time.sleep(60)
    sys.stdin.readline()
    say("ends")
    os._exit(0)


def sleeping() -> None:
    import time

    import hpcdist as dist

    dist.init_process_group()
    say(f"sleeps {os.getpid()}")
    time.sleep(60)


def wrong_by_hand() -> None:
    """Rank 1 is told that it is rank 0: all ranks hear of it, and can start again."""
    import hpcdist as dist

    own = int(next(os.environ[v] for v in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if v in os.environ))
    try:
        dist.init_process_group(rank=0, world_size=2)
    except ValueError as error:
        assert own == 1 and "told rank=0, world_size=2, but this is rank 1 of 2" in str(error)
    except dist.DistMismatchError as error:
        assert own == 0 and "rank 1 gave init_process_group" in str(error)
    else:
        raise AssertionError("no error")
    dist.init_process_group(rank=own, world_size=2)
    work()


PROGRAMS = {
    program.__name__: program
    for program in (
        hpcdist_alone,
        without_torch,
        without_destroy_twice,
        mpi4py_before,
        mpi4py_after,
        fewer_threads,
        some_ranks,
        several_threads,
        given,
        multiprocessing,
        children_of_ranks,
        tutorial,
        dying,
        missing,
        spawning,
        deserting,
        sleeping,
        variables,
        variables_of_spawn,
        wrong_by_hand,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
    say("well")
