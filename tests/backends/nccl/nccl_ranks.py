"""A rank of a job over NCCL: python nccl_ranks.py CASE, without MPI or under mpirun.

``faults``: every fault that leaves the processes alive. ``die``: one rank after the other dies in
an operation, and the survivors make a new group. ``killed``: the last rank dies, under mpirun.
``forked``: a child uses what it inherited.
Without MPI the ranks meet over a store, with torchrun's variables.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import nccl_faults
import standin
import torch
from nccl_faults import MODES, Case, Trial
from standin import cpu, gpu

import hpcdist as dist
from hpcdist import _engine
from hpcdist.backends import cuda


def everything() -> None:
    """All kinds of operations and groups, with nothing wrong."""
    assert _engine.mpi_state() == "none", "NCCL over a store needs no MPI"
    rank, size = dist.get_rank(), dist.get_world_size()
    data = gpu(torch.full((5,), rank + 1.0))
    dist.all_reduce(data)
    assert bool((cpu(data) == size * (size + 1) / 2).all()), cpu(data)
    found = [None] * size
    dist.all_gather_object(found, rank)
    assert found == list(range(size))
    if size > 1:
        pair = gpu(torch.zeros(1))
        if rank == 0:
            dist.send(gpu(torch.ones(1)), 1)
        elif rank == 1:
            dist.recv(pair, 0)
            assert cpu(pair).item() == 1
    assert dist.get_node_local_rank() == rank  # all are on this machine
    assert dist.new_subgroups()[0].size() == size
    half = dist.new_group(list(range(rank % 2, size, 2)), use_local_synchronization=True)
    dist.all_reduce(data.fill_(1), group=half)
    assert bool((cpu(data) == half.size()).all())
    dist.barrier()


def tell(case: Case, late: float, problem: str) -> None:
    """One line for the test that started this job."""
    print("\n@" + json.dumps([*case, late, problem]), flush=True)


def faults() -> None:
    """Every fault in every mode."""
    for case in nccl_faults.cases(dist.get_world_size(), mpi=False):
        trial = Trial(case)
        tell(case, *trial.run())
        dist.barrier()
        trial.end()


def die(first: int) -> None:
    """The last of the ranks that are left dies in each mode, from the given one on."""
    ranks = list(range(dist.get_world_size()))
    for mode in (MODES[first:] + MODES[:first])[: len(ranks) - 1]:
        trial = Trial(Case("die", mode), ranks)
        tell(trial.case, *trial.run())
        ranks.pop()


def killed() -> None:
    """The last rank dies in an operation; the launcher is to end the job."""
    trial = Trial(Case("die", "sync"))
    print(f"\nbegan {time.time()}", flush=True)
    trial.run()
    time.sleep(60.0)  # whatever this rank was told, mpirun has to end it


def forked() -> None:
    """A child uses every public name of what it inherited; the parent's operations go on."""
    size = dist.get_world_size()
    dist.all_reduce(gpu(torch.ones(1)))  # makes the communicator
    backend = dist.group.WORLD.carrier
    tensors = [gpu(torch.ones(4)) for _ in range(2)]
    with standin.fault(f"delay:{size - 1}:{backend.seq + 1}:1.0"):
        works = [dist.all_reduce(each, async_op=True) for each in tensors]
    child = os.fork()
    if not child:
        began = standin.library().standin_calls()  # in the parent the watchdog calls, too
        problem = in_child(works[0], backend)
        if standin.library().standin_calls() != began:
            problem = "a function of NCCL was called"
        print(f"\nchild: {problem or 'told'}", flush=True)
        os._exit(bool(problem))
    ended = os.waitpid(child, 0)[1]
    assert ended == 0, ended
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert bool((cpu(tensor) == size).all())
    dist.barrier()


def in_child(work: object, backend: object) -> str:
    """What is wrong about the handles of the process that this one was forked from."""
    told = set()
    text = repr(work)
    if "forked from" not in text:
        return text
    comm = backend.communicators.all()[0]
    for thing in (work, comm):
        for name in dir(type(thing)):
            if name.startswith("_"):
                continue
            try:
                found = getattr(thing, name)
                if callable(found):
                    found()
            except dist.DistError as error:
                if "NCCL does not survive a fork" not in str(error):
                    return f"{name}: {error}"
                told.add(name)
            except (TypeError, ValueError):
                pass  # of a call without its arguments
    calls = {"wait", "is_completed", "is_success", "exception", "source_rank", "get_future"}
    missing = (calls | {"abort", "destroy", "finalize", "async_error", "device"}) - told
    if missing:
        return f"not refused: {sorted(missing)}"
    for operation in (
        lambda: dist.all_reduce(gpu(torch.ones(4))),
        lambda: dist.barrier(),
        lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
        lambda: dist.isend(gpu(torch.ones(4)), (dist.get_rank() + 1) % dist.get_world_size()),
        backend.abort,
    ):
        try:
            operation()
        except dist.DistError as error:
            if "does not survive a fork" not in str(error):
                return str(error)
        else:
            return "an operation was not refused"
    dist.destroy_process_group()  # as over MPI: nothing here is this process's
    return ""


def main(case: str, *more: str) -> None:
    standin.load()
    cuda.use(standin.Runtime())
    with standin.training():
        backend = "cpu:mpi,cuda:nccl" if case == "killed" else "nccl"
        method = None if case == "killed" else "env://"
        dist.init_process_group(backend, method, timeout=timedelta(seconds=20))
        if case == "die":
            die(int(more[0]))
            os._exit(0)  # the world's group has lost its members
        if case == "killed":
            killed()
        if case == "forked":
            forked()
        everything()
        if case == "faults":
            faults()
        dist.destroy_process_group()
    print(f"\nrank {os.environ['RANK']}: fine", flush=True)


main(*sys.argv[1:])
