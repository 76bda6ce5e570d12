"""Cases for tests/torch/bridge_same.py: functional collectives, and what may be in flight.

Each gives what its ranks ended with; the runner compares it with what gloo gave.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as functional
from bridge_calls import own, poisoned

CASES: dict[str, Any] = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def functional_collectives(folder: str) -> dict:
    size, world = td.get_world_size(), td.group.WORLD
    found = {
        "all_reduce": functional.all_reduce(own(4), "sum", world),
        "avg": functional.all_reduce(own(4), "max", world),
        "gather": functional.all_gather_tensor(own(2, 3), 1, world),
        "scatter": functional.reduce_scatter_tensor(own(2, 2 * size), "sum", 1, world),
        "broadcast": functional.broadcast(own(3), 1, world),
        "to_all": functional.all_to_all_single(own(size), [1] * size, [1] * size, world),
        "evenly": functional.all_to_all_single(own(2 * size), None, None, world),
        "reduced": functional.all_reduce_coalesced([own(2), own(3)], "sum", world),
        "gathered": functional.all_gather_into_tensor_coalesced([own(2), own(3)], world),
        "scattered": functional.reduce_scatter_tensor_coalesced(
            [own(size), own(2 * size)], "sum", [0, 0], world
        ),
        "permuted": functional.permute_tensor(own(3), [(r + 1) % size for r in range(size)], world),
    }
    found["out"] = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor_out(
            own(3), size, world.group_name, out=poisoned(3 * size)
        )
    )
    x = own(3).requires_grad_()
    y = functional.all_gather_tensor_autograd(x, 0, world)
    y.square().sum().backward()
    found["gradient"] = x.grad
    found["ranks"] = functional.all_reduce(own(2), "sum", list(range(size)))
    return {
        key: [t + 0 for t in value] if isinstance(value, list) else value + 0
        for key, value in found.items()
    }


@case
def results_of_functional_collectives(folder: str) -> dict:
    """Each may be in flight when the next call takes it."""
    rank, size, world = td.get_rank(), td.get_world_size(), td.group.WORLD

    def coming(n: int) -> torch.Tensor:
        found = functional.reduce_scatter_tensor(own(n * size), "sum", 0, world)
        assert type(found) is functional.AsyncCollectiveTensor
        return found

    found = {}
    for requires in (False, True):
        t = coming(4).requires_grad_(requires)
        td.all_reduce(t, td.ReduceOp.MAX)
        found[f"all_reduce {requires}"] = t.detach() + 0
    found["broadcast"] = t = coming(4)
    td.broadcast(t, 1)
    found["all_gather"] = outs = [poisoned(3) for _ in range(size)]
    td.all_gather(outs, coming(3))
    found["all_to_all"] = outs = [poisoned(2) for _ in range(size)]
    td.all_to_all(outs, list(coming(2 * size).split(2)))
    found["reduce_scatter_tensor"] = t = poisoned(2)
    td.reduce_scatter_tensor(t, coming(2 * size))
    found["came"] = t = poisoned(3)
    works = [td.isend(coming(3), (rank + 1) % size), td.irecv(t, (rank - 1) % size)]
    for work in works:
        work.wait()
    return {k: [t + 0 for t in v] if isinstance(v, list) else v + 0 for k, v in found.items()}


@case
def operations_that_wait_tensor_ends(folder: str) -> dict:
    """What begins outside of a compiled function may be waited for inside."""
    rank, size = td.get_rank(), td.get_world_size()
    late, found = size - 1, {}

    def begin(name: str, call, *tensors: torch.Tensor) -> None:
        td.barrier()
        time.sleep(0.02 * (rank == late))
        with functional.allow_inflight_collective_as_graph_input_ctx():
            call()
        ends = torch.ops._c10d_functional.wait_tensor
        found[name] = [ends(t).clone() for t in tensors]

    mine, each = own(3), own(size)
    t = own(3)
    begin("all_reduce", lambda: td.all_reduce(t, async_op=True), t)
    begin("broadcast", lambda: td.broadcast(mine, late, async_op=True), mine)
    parts = [poisoned(3) for _ in range(size)]
    begin("all_gather", lambda: td.all_gather(parts, own(3), async_op=True), *parts)
    whole, part = poisoned(size), poisoned(1)
    begin("single", lambda: td.all_gather_into_tensor(whole, own(1), async_op=True), whole)
    begin("scattered", lambda: td.reduce_scatter_tensor(part, each, async_op=True), part)
    begin("to all", lambda: td.all_to_all_single(whole, each, async_op=True), whole)
    came, sent = poisoned(3), own(3)
    ring = [
        td.P2POp(td.isend, sent, (rank + 1) % size),
        td.P2POp(td.irecv, came, (rank - 1) % size),
    ]
    begin("messages", lambda: td.batch_isend_irecv(ring), came, sent)
    return found
