"""DeviceMesh: its shapes, slices, groups, and collectives in them."""

from __future__ import annotations

from typing import Any

import torch
from worlds import Case, World, error_of, filled, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


def grid(world: World, *names: str) -> Any:
    """A mesh of two rows."""
    shape = (2, world.size // 2)
    return world.at("device_mesh").init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def described(mesh: Any) -> list[Any]:
    return [
        list(mesh.shape), mesh.ndim, mesh.size(), mesh.mesh.tolist(), mesh.mesh_dim_names,
        mesh.get_coordinate(), mesh.get_rank(), mesh.device_type,
    ]  # fmt: skip


def members(world: World, group: Any) -> list[int]:
    return list(world.dist.get_process_group_ranks(group))


@case()
def one_dimension(world: World) -> Any:
    mesh = world.at("device_mesh").init_device_mesh("cpu", (world.size,))
    return [described(mesh), members(world, mesh.get_group()), mesh.get_local_rank()]


@case(least=4)
def two_dimensions(world: World) -> Any:
    mesh = grid(world, "dp", "tp")
    found: list[Any] = [described(mesh), mesh.size(0), mesh.size(1)]
    for name in ("dp", "tp"):
        found += [members(world, mesh.get_group(name)), mesh.get_local_rank(name)]
        found += [described(mesh[name])]
    found += [[members(world, group) for group in mesh.get_all_groups()]]
    return found


@case(least=4)
def slices_and_flattened(world: World) -> Any:
    mesh = grid(world, "dp", "tp")
    both = mesh["dp", "tp"]
    flat = both._flatten("all") if not world.native else both._flatten("all")
    return [described(both), described(flat), members(world, flat.get_group())]


@case(least=4)
def sums_along_it(world: World) -> Any:
    mesh = grid(world, "dp", "tp")
    found = []
    for name in ("dp", "tp"):
        tensor = filled(world, 3)
        world.dist.all_reduce(tensor, group=mesh.get_group(name))
        found.append(tensor)
        parts = [torch.empty(3) for _ in range(mesh[name].size())]
        world.dist.all_gather(parts, filled(world, 3), group=mesh[name].get_group())
        found.append(torch.stack(parts))
    return found


@case(least=4)
def ranks_in_another_order(world: World) -> Any:
    order = torch.arange(world.size).flip(0).reshape(2, -1)
    mesh = world.at("device_mesh").DeviceMesh("cpu", order, mesh_dim_names=("a", "b"))
    tensor = filled(world, 2)
    world.dist.all_reduce(tensor, group=mesh.get_group("a"))
    if world.native:  # the mesh numbers a group's ranks: in torch only with preserve_rank_order
        places = [mesh.get_local_rank("a"), mesh.get_local_rank("b")]
        assert places == list(mesh.get_coordinate()), places
    return [described(mesh), tensor]


@case(least=4)
def three_dimensions(world: World) -> Any:
    shape = (world.size // 4, 2, 2)
    names = ("pp", "dp", "tp")
    mesh = world.at("device_mesh").init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = [described(mesh), described(mesh["dp", "tp"])]
    return found + [members(world, mesh.get_group(name)) for name in names]


@case(least=2)
def from_groups(world: World) -> Any:
    group = world.dist.new_group(list(range(world.size)))
    mesh = world.at("device_mesh").DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    tensor = filled(world, 2)
    world.dist.all_reduce(tensor, group=mesh.get_group())
    return [list(mesh.shape), mesh.mesh.tolist(), tensor]


@case(least=2)
def wrong_use(world: World) -> Any:
    module = world.at("device_mesh")
    mesh = module.init_device_mesh("cpu", (world.size,), mesh_dim_names=("x",))

    def refused(shape: tuple[int, ...], *names: str, device: str = "cpu") -> bool:
        """Whether a mesh is refused, as ValueError here and partly RuntimeError in torch."""
        said = error_of(
            lambda: module.init_device_mesh(device, shape, mesh_dim_names=names or None),
            ValueError,
            RuntimeError,
        )
        return said != "no error"

    return [
        error_of(lambda: mesh["none"], KeyError),
        refused((world.size,), "a", "b"),
        refused((2, world.size), "a", "a"),
        refused((world.size,), device="cpu:0"),
        refused((world.size, 2)),
    ]
