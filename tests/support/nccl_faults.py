"""Every fault of the stand-in for NCCL, in every way to start an operation, one after the other.

The ranks of a job run the cases together; each makes a group of its own and leaves the job usable.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import standin
import torch
from long_form import LONG
from standin import gpu

import hpcdist as dist
from hpcdist.backends import cuda
from hpcdist.backends.dispatch import serving

#: The groups' timeout while something goes wrong.
LIMIT = 0.4
#: What an error may take beyond it. The long form asserts what is promised. CI runs four ranks,
#: each with a thread for every stream, on two cores that other jobs use too: a rank that is not
#: scheduled for a second is no hang.
SLACK = 1.0 if LONG else 5.0

#: How the operation that goes wrong is started, and where its error is to come out: synchronous, of
#: the next call; asynchronous, of ``wait(timeout)``; of a synchronous call that waits on the host;
#: in backward, or of the next forward.
MODES = ("sync", "async", "blocking", "ddp")
#: What the stand-in does to a rank's operation, and a rank that never calls it.
FAULTS = ("fail", "hang", "delay", "remote", "absent")
#: Faults that the stand-in itself makes, on the last rank.
DONE_BY_NCCL = ("fail", "hang", "delay", "remote", "die")
#: In what one rank's call differs.
MISMATCHES = ("operation", "reduce-op", "count", "dtype", "root")

LATE = (dist.DistTimeoutError, dist.RankFailedError)


class Case(NamedTuple):
    """One of them; `checked`: with the entry check over MPI."""

    kind: str
    mode: str
    checked: bool = False


def cases(size: int, mpi: bool) -> list[Case]:
    """What there is for so many ranks; the entry check needs MPI."""
    made = [Case(kind, mode) for kind in FAULTS for mode in MODES if size > 1 or kind != "absent"]
    if size > 1:
        made += [
            Case(kind, mode, checked)
            for kind in MISMATCHES
            for mode in MODES
            for checked in ((False, True) if mpi else (False,))
            if (kind, mode) != ("root", "ddp")
        ]
        made += [Case("absent", mode, True) for mode in MODES if mpi]
    return made


def wanted(case: Case, victim: bool) -> tuple[type, ...]:
    """The types of error that a rank may get; none if it is to get none."""
    if case.kind == "delay" or (case.kind == "absent" and victim):
        return ()
    if case.kind in MISMATCHES:
        # unchecked, NCCL finds out in flight: some ranks may only see the others leave
        return (dist.DistMismatchError,) if case.checked else (dist.DistBackendError, *LATE)
    if victim and case.kind == "die":
        return (SystemExit,)  # never comes back
    if victim and case.kind in ("fail", "remote"):
        return (dist.DistBackendError,) if case.kind == "fail" else (dist.RankFailedError,)
    return LATE


@contextmanager
def environment(**variables: str) -> Any:
    """Set some variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Trial:
    """One case on one rank, inside of :func:`standin.training`.

    Parameters
    ----------
    case : Case
        Which.
    ranks : sequence of int, optional
        Between which; all.
    """

    def __init__(self, case: Case, ranks: Sequence[int] | None = None) -> None:
        self.case = case
        ranks = list(range(dist.get_world_size())) if ranks is None else ranks
        ddp = case.mode == "ddp"
        cuda.use(standin.Runtime(lockstep=ddp))
        with environment(HPCDIST_NCCL_BLOCKING_WAIT=str(int(case.mode == "blocking"))):
            self.group = dist.new_group(
                ranks,
                timedelta(seconds=20),
                pg_options=dist.NCCLOptions(check=case.checked),
                use_local_synchronization=True,
            )
        self.rank, self.size = self.group.rank(), self.group.size()
        self.victim = self.rank == self.size - 1
        dist.all_reduce(gpu(torch.ones(4)), group=self.group)  # makes the communicator
        self.model, self.count = None, 4
        if ddp:
            torch.manual_seed(1)
            net = standin.to_gpu(torch.nn.Linear(4, 3))
            self.model = dist.DistributedDataParallel(net, process_group=self.group)
            self.count = 15
            self._step()
        backend = serving(self.group.carrier, gpu(torch.ones(1)))
        standin.Stream(0).synchronize()
        self.number = backend.seq + 1
        if case.kind != "delay":
            # from here on: making groups and modules is not what is tried
            self.group.carrier.timeout = LIMIT

    def _step(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()

    def run(self) -> tuple[float, str]:
        """Let it go wrong.

        Returns
        -------
        tuple
            Seconds that this rank's error came after the timeout, and what is wrong about it; empty
            if nothing is.
        """
        case = self.case
        error: Exception | None = None
        which = f"{case.kind}:{self.size - 1}:{self.number}:0.1"
        with standin.fault(which) if case.kind in DONE_BY_NCCL else nullcontext():
            began = time.monotonic()
            if case.kind != "absent" or not self.victim:
                try:
                    self._provoke()
                except Exception as problem:
                    error = problem
            took = time.monotonic() - began
        types = wanted(case, self.victim)
        problem = ""
        if not types and error is not None:
            problem = f"should have gone well, but raised {error!r}"
        elif types and not isinstance(error, types):
            problem = f"wanted one of {[each.__name__ for each in types]}, got {error!r}"
        elif types and took > LIMIT + SLACK:
            problem = f"took {took:.2f} s with a timeout of {LIMIT} s: {error!r}"
        elif types and not re.search(r"#\d+", str(error)):
            problem = f"does not name the operation and its number: {error!r}"
        elif types and not re.search(rf"rank {self.rank}\b", str(error)):
            problem = f"does not name this rank, {self.rank}: {error!r}"
        return max(0.0, took - LIMIT) if types else 0.0, f"{case}: {problem}" if problem else ""

    def _provoke(self) -> None:
        if self.case.mode == "ddp" and not (self.case.kind in MISMATCHES and self.victim):
            self._step()
            self._step()
            return
        mode = "sync" if self.case.mode == "ddp" else self.case.mode
        work = self._call(mode == "async")
        if work is not None:
            work.wait(10.0)
        elif mode == "sync":
            # it waits on its stream; the next operation tells
            standin.Stream(0).synchronize()
            dist.all_reduce(gpu(torch.ones(1)), group=self.group)

    def _call(self, async_op: bool) -> Any:
        """The operation; the victim's differs where a mismatch is tried."""
        odd = self.case.kind if self.victim else ""
        op = dist.ReduceOp.AVG if self.model is not None else dist.ReduceOp.SUM
        if odd == "reduce-op":
            op = dist.ReduceOp.MAX
        dtype = torch.float64 if odd == "dtype" else torch.float32
        data = gpu(torch.ones(self.count - (odd == "count"), dtype=dtype))
        if self.case.kind == "root" or odd == "operation":
            root = self.size - 1 if odd == "root" else 0
            return dist.broadcast(data, group_src=root, group=self.group, async_op=async_op)
        return dist.all_reduce(data, op, group=self.group, async_op=async_op)

    def end(self) -> None:
        """Free the group; an error that nobody was told of comes out here."""
        dist.destroy_process_group(self.group)
