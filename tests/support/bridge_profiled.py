"""Cases for bridge_same.py: what torch's profiler shows of the operations."""

from __future__ import annotations

import threading
import time
from collections import Counter

import torch
import torch.distributed as td
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

CASES: dict = {}
#: Seconds until gloo's threads have ended their ranges, which they do after an operation's end.
GLOO_ENDS = 0.3


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def events(profiled) -> dict:
    """The events under the backend's name: how many there are of each kind and shapes."""
    given = profiled.events() if callable(getattr(profiled, "events", None)) else None
    own = f"{td.get_backend()}:"
    found = Counter(
        f"{event.name.removeprefix(own)} {event.input_shapes} {event.is_async}"
        for event in (profiled.function_events if given is None else given)
        if event.name.startswith(own) and not event.name.startswith(f"{own}:")
    )
    return dict(sorted(found.items()))


def calls() -> None:
    rank, size = td.get_rank(), td.get_world_size()
    own = torch.full((3, 2), float(rank))
    parts = [torch.empty(3, 2) for _ in range(size)]
    td.all_reduce(own)
    td.broadcast(own, 0)
    td.reduce(own, 0)
    td.all_gather(parts, own)
    td.gather(own, parts if rank == 0 else None)
    td.barrier()
    pending = [td.all_reduce(own.clone(), async_op=True) for _ in range(3)]
    for work in pending:
        work.wait()
    if rank == 0:
        td.send(own, 1)
        td.isend(own, 1, tag=5).wait()
    elif rank == 1:
        td.recv(own)
        td.irecv(own, 0, tag=5).wait()


@case
def profiler_shapes_and_names(folder: str) -> dict:
    found = {}
    with torch.autograd.profiler.profile(record_shapes=True) as old:
        calls()
        time.sleep(GLOO_ENDS)
    found["autograd.profiler"] = events(old)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as new:
        with record_function("outer"):
            calls()
        time.sleep(GLOO_ENDS)
    found["torch.profiler"] = events(new)
    assert found["torch.profiler"], "no operation was shown"
    return found


@case
def profiler_of_DDP(folder: str) -> dict:
    torch.manual_seed(5)
    model = DDP(torch.nn.Linear(4, 4))
    data = torch.ones(2, 4)
    with profile(activities=[ProfilerActivity.CPU]) as first:
        for _ in range(6):
            model(data).sum().backward()
        time.sleep(GLOO_ENDS)
    with profile(activities=[ProfilerActivity.CPU]) as second:
        model(data).sum().backward()
        time.sleep(GLOO_ENDS)
    found = {"first": events(first), "second": events(second)}
    assert any(name.startswith("all_reduce") for name in found["second"]), found
    return found


@case
def profiler_on_one_rank_and_in_threads(folder: str) -> dict:
    """Operations that outlive a profiler, of another thread, that fail, and on one rank only."""
    own = torch.ones(1 << 18)
    found: dict = {}
    for _ in range(3 if td.get_backend() == "hpcdist" else 0):  # gloo writes into freed memory
        with profile(activities=[ProfilerActivity.CPU]) as left:
            work = td.all_reduce(own.clone(), async_op=True)
        assert list(events(left).values()) == [1]
        with profile(activities=[ProfilerActivity.CPU]):
            work.wait()
    with profile(activities=[ProfilerActivity.CPU]) as main:
        other = threading.Thread(target=td.all_reduce, args=(own.clone(),))
        other.start()
        other.join()
        td.barrier()
    found["of another thread"] = sum("all_reduce" in name for name in events(main))
    if td.get_rank() == 0:
        with profile(activities=[ProfilerActivity.CPU]) as alone:
            td.all_reduce(own)
        found["alone"] = events(alone)
    else:
        td.all_reduce(own)
    with profile(activities=[ProfilerActivity.CPU]):
        try:
            td.all_reduce("no tensor")
        except Exception as error:
            found["refused"] = type(error).__name__
        td.all_reduce(own)
    found["sum"] = own[:3].clone()
    return found
