"""Operations of CUDA tensors over MPI: what happens between the agreement and the data."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from over_mpi import CHUNK
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.parallel.reducer.failure import Failure
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi"), pytest.mark.mpi(min_size=2)]

VICTIM = 1


def ones() -> torch.Tensor:
    return gpu(torch.ones(2 * CHUNK))  # eight buffers


def tried(later: bool) -> tuple[float, BaseException | None]:
    """Seconds that an operation took with its ``wait()``, and what it raised."""
    began = time.monotonic()
    try:
        work = dist.all_reduce(ones(), async_op=later)
        if work is not None:
            work.wait()
    except (RuntimeError, KeyboardInterrupt) as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


@pytest.mark.parametrize(
    ("where", "later"), [("handler", False), ("handler", True), ("thread", True)]
)
def test_a_rank_that_cannot_begin_what_it_has_agreed_to(runtime, monkeypatch, where, later):
    """A handler's exception, or no thread: the others hear of it, and all go on."""
    dist.all_reduce(ones())
    time.sleep(2.5 if where == "thread" else 0.0)  # the lane's thread has ended
    record, comm = runtime.record, dist.group.WORLD.get_backend("cpu")

    def interrupted(stream: Any) -> Any:
        if comm.seq > before:  # agreed
            raise KeyboardInterrupt
        return record(stream)

    def unstarted(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    dist.barrier()
    before = comm.seq
    with monkeypatch.context() as patched:
        if dist.get_rank() == VICTIM and where == "handler":
            patched.setattr(runtime, "record", interrupted, raising=False)
        elif dist.get_rank() == VICTIM:
            patched.setattr(threading.Thread, "start", unstarted)
        seconds, error = tried(later)
    wanted: type[BaseException] = dist.DistBackendError
    if dist.get_rank() == VICTIM and where == "handler":
        wanted = KeyboardInterrupt
    parallel_assert(isinstance(error, wanted) and seconds < 10, lambda: f"{seconds} {error!r}")
    for again in (False, True):
        out = ones()
        work = dist.all_reduce(out, async_op=again)
        if work is not None:
            work.wait()
        parallel_assert(bool((cpu(out) == dist.get_world_size()).all()))


class Transfer:
    """Of a backward pass that owes its only bucket."""

    has_hook = False

    def __init__(self) -> None:
        self.comm = self.place = dist.group.WORLD.carrier

    def missing_calls(self, *counts: int) -> int:
        return 1


class Note:
    """A bucket, and where errors are recorded."""

    work, sparse = None, False

    def __init__(self) -> None:
        self.buffer = ones()

    def failed(self, error: BaseException) -> None:
        pass

    def let_go(self) -> None:
        pass


def test_a_backward_that_is_cut_off_tells_the_others() -> None:
    """It raised AttributeError there, and the others waited for their timeouts."""
    bucket = Note()
    failure: Any = Failure(Transfer(), bucket)  # type: ignore[arg-type]
    problem: BaseException | None = None
    seconds = 0.0
    if dist.get_rank() == VICTIM:
        try:
            failure.cut_off([bucket], 0, 0)
            failure.of_finish(dist.DistMismatchError(""), [bucket], 0)
        except AttributeError as error:
            problem = error
            dist.group.WORLD.carrier.refuse(error)
    else:
        seconds, raised = tried(False)
        problem = None if isinstance(raised, dist.DistMismatchError) else raised
    parallel_assert(problem is None and seconds < 10, lambda: f"{seconds} {problem!r}")
    dist.all_reduce(ones())
