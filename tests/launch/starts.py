"""The programs that test_starts.py runs: MPI started by hpcdist, or by mpi4py before or after it.

mpirun -n 2 python starts.py NAME
"""

from __future__ import annotations

import os
import sys

import torch


def say(text: str) -> None:
    """Print a line in one piece: print() would write text and newline apart, and ranks mix."""
    os.write(1, f"{text}\n".encode())


def work() -> None:
    """Synchronous, asynchronous and point-to-point operations, checked."""
    import hpcdist as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), rank + 1.0)
    dist.all_reduce(x)
    assert (x == size * (size + 1) / 2).all()
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 1000, 100_000)]
    for one in works:
        one.wait()
        assert (one.result()[0] == size).all()
    if size > 1:
        got = torch.empty(70_000)
        pair = [
            dist.irecv(got, (rank - 1) % size),
            dist.isend(torch.full((70_000,), float(rank)), (rank + 1) % size),
        ]
        for one in pair:
            one.wait()
        assert (got == (rank - 1) % size).all()
    dist.barrier()


def hpcdist_alone() -> None:
    import hpcdist as dist

    dist.init_process_group()
    work()
    assert "mpi4py.MPI" not in sys.modules


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


PROGRAMS = {
    program.__name__: program
    for program in (
        hpcdist_alone,
        without_destroy_twice,
        mpi4py_before,
        mpi4py_after,
        fewer_threads,
        some_ranks,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
    say("well")
