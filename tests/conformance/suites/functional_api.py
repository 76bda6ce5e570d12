"""torch's functional collectives: by group, ranks, mesh and dimension of a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as f
from torch.distributed.device_mesh import init_device_mesh
from worlds import TORCH_ONLY, Case, World, error_of, filled, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


def group() -> Any:
    return td.distributed_c10d._get_default_group()


def whole(tensor: Any) -> torch.Tensor:
    """A plain tensor, after its operation."""
    return f.wait_tensor(tensor).clone()


@case(*TORCH_ONLY)
def reductions(world: World) -> Any:
    own = filled(world, 2, 3)
    found = {op: whole(f.all_reduce(own, op, group())) for op in ("sum", "max", "min", "product")}
    found["unchanged"] = own
    found["in a list"] = [whole(t) for t in f.all_reduce_coalesced([own, own * 2], "sum", group())]
    return found


@case(*TORCH_ONLY)
def gathers(world: World) -> Any:
    own = filled(world, 2, 2)
    return {
        "rows": whole(f.all_gather_tensor(own, 0, group())),
        "columns": whole(f.all_gather_tensor(own, 1, group())),
        "list": [whole(t) for t in f.all_gather_into_tensor_coalesced([own, own[:1]], group())],
    }


@case("bridge")
def scatters(world: World) -> Any:
    """gloo has no reduce_scatter: against a sum."""
    own = filled(world, 2 * world.size, 2)
    got = whole(f.reduce_scatter_tensor(own, "sum", 0, group()))
    total = own.clone()
    td.all_reduce(total)
    part = total[2 * world.rank : 2 * world.rank + 2]
    torch.testing.assert_close(got, part)
    columns = whole(f.reduce_scatter_tensor(own.t().contiguous(), "sum", 1, group()))
    torch.testing.assert_close(columns, part.t())
    lists = f.reduce_scatter_tensor_coalesced([own, own * 2], "sum", [0, 0], group())
    torch.testing.assert_close(whole(lists[1]), part * 2)
    return True


@case(*TORCH_ONLY)
def exchanges(world: World) -> Any:
    size, rank = world.size, world.rank
    own = filled(world, size * (size + 1) // 2)
    into = [rank + 1] * size
    return {
        "even": whole(f.all_to_all_single(filled(world, size), None, None, group())),
        "uneven": whole(f.all_to_all_single(own, into, [i + 1 for i in range(size)], group())),
        "broadcast": whole(f.broadcast(filled(world, 3), 0, group())),
    }


@case(*TORCH_ONLY, least=4)
def forms_of_a_group(world: World) -> Any:
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("a", "b"))
    own = filled(world, 2)
    flat = init_device_mesh("cpu", (world.size,))
    return {
        "mesh": whole(f.all_reduce(own, "sum", flat)),
        "first": whole(f.all_reduce(own, "sum", (mesh, 0))),
        "second": whole(f.all_reduce(own, "sum", (mesh, 1))),
        "slice": whole(f.all_reduce(own, "sum", mesh["b"])),
        "name": whole(f.all_reduce(own, "sum", group().group_name)),
        "two of them": error_of(lambda: f.all_reduce(own, "sum", mesh), ValueError, AssertionError),
    }


@case(*TORCH_ONLY)
def results_that_wait(world: World) -> Any:
    """An asynchronous result is waited for by its first use, as part of any expression."""
    one = f.all_reduce(filled(world, 4), "sum", group())
    two = f.all_reduce(one * 2, "max", group())
    view = f.all_gather_tensor(filled(world, 2), 0, group()).view(world.size, 2)
    return [one + 1, two.sum(), view[0], torch.cat([one, two])]


@case(*TORCH_ONLY)
def gradients(world: World) -> Any:
    found = {}
    calls = {
        "gather": lambda x: f.all_gather_tensor_autograd(x, 0, group()),
        "exchange": lambda x: f.all_to_all_single_autograd(
            x, [2] * world.size, [2] * world.size, group()
        ),
    }
    if world.side == "gloo":  # its gather's gradient is a reduce_scatter
        del calls["gather"]
    for name, call in calls.items():
        x = filled(world, 2 * world.size).requires_grad_()
        y = call(x)
        (y * torch.arange(1.0, y.numel() + 1)).sum().backward()
        found[name] = [f.wait_tensor(y).detach().clone(), x.grad]
    return {"exchange": found["exchange"]}


@case(*TORCH_ONLY)
def inside_a_graph(world: World) -> Any:
    """Traced to a graph by make_fx, and run from it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    name = group().group_name

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops._c10d_functional.all_reduce(x * 2, "sum", name)
        return torch.ops._c10d_functional.wait_tensor(y) + 1

    traced = make_fx(step)(filled(world, 3))
    calls = [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"]
    return [
        traced(filled(world, 3)),
        [call for call in calls if "c10d" in call or "reduce" in call],
    ]
