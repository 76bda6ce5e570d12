"""What test_slurm.py runs under srun, without torch, so that it starts at once.

srun -N2 -n4 --mpi=... python slurm_programs.py NAME
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import numpy as np

import hpcdist as dist
from hpcdist import launchers


def say(text: str) -> None:
    """Print a line in one piece: print() would write text and newline apart, and ranks mix."""
    os.write(1, f"{text}\n".encode())


def agree(condition: bool, what: object) -> None:
    """Fail on this rank, and so end the job, with what was found."""
    if not condition:
        raise AssertionError(what)


def nodes() -> None:
    """MPI's nodes and ranks against Slurm's words, data across nodes, and disagreements."""
    dist.init_process_group(timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    node, local = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_LOCALID"])
    agree(rank == int(os.environ["SLURM_PROCID"]), "rank")
    agree(dist.get_node_local_rank() == local, "local rank")
    groups_of_nodes(node, local)
    data_between_nodes()
    mismatches_between_nodes()
    late_on_another_node()
    dist.destroy_process_group()


def groups_of_nodes(node: int, local: int) -> None:
    """A group for each node, and one of the nodes' first ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = np.empty(size, np.int64)
    dist.all_gather_into_tensor(places, np.array([node], np.int64))
    here = [r for r in range(size) if places[r] == node]
    agree(len(set(places.tolist())) == int(os.environ["SLURM_STEP_NUM_NODES"]), places)
    agree(here.index(rank) == local, (here, local))
    mine, groups = dist.new_subgroups()
    agree(dist.get_process_group_ranks(mine) == here, dist.get_process_group_ranks(mine))
    # the way of the entry check: messages between nodes, a page of memory within one
    way = "MPI" if len(set(places.tolist())) == size else "shared memory and MPI"
    agree(dist.group.WORLD.carrier.checks_through == way, "the world's checks")
    agree(len(here) == 1 or mine.carrier.checks_through == "shared memory", "the node's checks")
    firsts = [places.tolist().index(n) for n in sorted(set(places.tolist()))]
    leaders = dist.new_group(firsts)
    if local == 0:
        x = np.full(5, rank + 1.0)
        dist.all_reduce(x, group=leaders)
        agree((x == sum(r + 1.0 for r in firsts)).all(), x)
    x = np.full(3, rank + 1.0, np.float32)
    dist.all_reduce(x, group=mine)
    agree((x == sum(r + 1.0 for r in here)).all(), x)
    names: list = [None] * size
    dist.all_gather_object(names, os.uname().nodename)
    agree(names == [f"hpc{n + 1}" for n in places], names)


def data_between_nodes() -> None:
    """From what travels in one packet to what does not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng()
    for n in (1, 1000, 100_000, 5_000_001):
        own = rng.integers(-1000, 1000, n).astype(np.float64)
        everybody = np.empty(size * n)
        dist.all_gather_into_tensor(everybody, own)
        agree((everybody[rank * n : (rank + 1) * n] == own).all(), n)
        total = own.copy()
        dist.all_reduce(total)
        agree((total == everybody.reshape(size, n).sum(0)).all(), n)
        got = np.empty(n)
        pair = [dist.isend(own, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
        for work in pair:
            work.wait()
        left = (rank - 1) % size
        agree((got == everybody[left * n : (left + 1) * n]).all(), n)


def mismatches_between_nodes() -> None:
    """The same error on all ranks, and the group goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # another shape on the other node
    try:
        dist.all_reduce(np.ones(4 + (rank == size - 1)))
        raise AssertionError("a mismatch was not noticed")
    except dist.DistMismatchError as error:
        agree(f"rank {size - 1}" in str(error) and "float64[5]" in str(error), error)
    # another operation
    try:
        if rank == size - 1:
            dist.barrier()
        else:
            dist.all_reduce(np.ones(4))
        raise AssertionError("a mismatch was not noticed")
    except dist.DistMismatchError as error:
        agree("barrier" in str(error) and "all_reduce" in str(error), error)


def late_on_another_node() -> None:
    """A rank of the other node arrives too late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    patient = dist.new_group(timeout=timedelta(seconds=1))
    began = time.monotonic()
    if rank == size - 1:
        time.sleep(2.5)
    try:
        dist.all_reduce(np.ones(4), group=patient)
        raise AssertionError("nobody gave up")
    except dist.DistTimeoutError as error:
        text = str(error)
        agree(time.monotonic() - began < 8, text)
        agree(f"rank {size - 1} has not joined" in text or "gave up" in text, text)
    dist.barrier()
    x = np.ones(4)
    dist.all_reduce(x, group=patient)
    agree((x == size).all(), x)


def hello() -> None:
    dist.init_process_group()
    x = np.ones(4)
    dist.all_reduce(x)
    where = f"rank {dist.get_rank()} of {dist.get_world_size()} on {os.uname().nodename}"
    say(f"{where}: sum {x[0]:g}, threads {os.environ.get('OMP_NUM_THREADS')}")
    dist.destroy_process_group()


def place(mpi: str) -> None:
    """What the launcher says; then, if `mpi` is "mpich", which needs no launcher, one MPI world."""
    at = launchers.detect()
    where = f"{at.rank} of {at.size}, {at.local_rank} of {at.local_size}, {at.nodes} nodes"
    say(f"{at.launcher}: {where} on {os.uname().nodename}")
    if mpi == "mpich":
        dist.init_process_group(timeout=timedelta(seconds=40))
        together(at.rank, at.size)


def meets(port: str) -> None:
    """Meet by an address, in spite of an srun that starts no MPI; again, over the same store."""
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
    for _ in range(2):
        dist.init_process_group(
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=40),
        )
        together(rank, size)


def together(rank: int, size: int) -> None:
    """Data within the nodes and between them, checked."""
    agree((dist.get_rank(), dist.get_world_size()) == (rank, size), "rank and size")
    names: list = [None] * size
    dist.all_gather_object(names, os.uname().nodename)
    agree(len(set(names)) == 2, names)
    agree(dist.get_node_local_rank() == names[:rank].count(names[rank]), names)
    for n in (1, 100_000):
        x = np.full(n, rank + 1.0)
        dist.all_reduce(x)
        agree((x == size * (size + 1) / 2).all(), x)
    say(f"together {rank} of {size} on {names[rank]}")
    dist.destroy_process_group()


def dies() -> None:
    """The last rank is killed while the others wait for it."""
    dist.init_process_group(timeout=timedelta(seconds=40))
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        say(f"began {time.time()}")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(np.ones(4))
    say("an all_reduce without all ranks")


if __name__ == "__main__":
    {f.__name__: f for f in (nodes, hello, place, meets, dies)}[sys.argv[1]](*sys.argv[2:])
    say("well")
