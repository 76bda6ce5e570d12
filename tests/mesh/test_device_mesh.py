"""Ranks in a grid, and the groups along its dimensions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from group_cases import place

import hpcdist as dist
from hpcdist import DeviceMesh, init_device_mesh
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks

four = pytest.mark.mpi(min_size=4)


def ranks_in(group) -> list[int]:
    """The members of a group, by asking them."""
    found = torch.full((group.size(),), -1)
    dist.all_gather_single(found, torch.tensor([dist.get_rank()]), group=group)
    return found.tolist()


@pytest.fixture(autouse=True)
def tidy():
    """Free what a test's meshes leave behind."""
    before = set(dist.group.world.groups)
    yield
    if dist.group.WORLD in before:
        for group in [each for each in dist.group.world.groups if each not in before][::-1]:
            dist.destroy_process_group(group)


def test_one_dimension():
    rank, size = place()
    mesh = init_device_mesh("cpu", (size,))
    parallel_assert(mesh.shape == (size,) and mesh.ndim == 1 and mesh.size() == size)
    parallel_assert(mesh.get_group() is dist.group.WORLD)
    parallel_assert(mesh.get_rank() == mesh.get_local_rank() == rank)
    parallel_assert(mesh.get_coordinate() == (rank,))
    parallel_assert(mesh.mesh_dim_names is None and mesh.device_type == "cpu")
    parallel_assert(mesh.mesh.tolist() == list(range(size)) and mesh.mesh.dtype == torch.int32)


def test_shapes():
    """Every way to write the world's size as a product of two."""
    rank, size = place()
    for rows in (each for each in range(1, size + 1) if size % each == 0):
        columns = size // rows
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))
        row, column = divmod(rank, columns)
        parallel_assert(mesh.get_coordinate() == (row, column))
        parallel_assert((mesh.get_local_rank("dp"), mesh.get_local_rank(1)) == (row, column))
        parallel_assert((mesh.size(0), mesh.size("tp"), mesh.size()) == (rows, columns, size))
        grid = np.arange(size).reshape(rows, columns)
        parallel_assert(ranks_in(mesh.get_group("dp")) == grid[:, column].tolist())
        parallel_assert(ranks_in(mesh.get_group("tp")) == grid[row].tolist())
        parallel_assert(mesh.get_all_groups() == [mesh.get_group(0), mesh.get_group(1)])
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.get_group("tp"))
        parallel_assert(int(total) == columns)


@four
def test_three_dimensions_and_slices():
    """Of an odd number of ranks the last is outside, and has nothing to say."""
    rank, size = place()
    half = size // 2
    mesh = init_device_mesh("cpu", (2, 1, half), mesh_dim_names=("a", "b", "c"))
    inside = mesh.get_coordinate() is not None
    parallel_assert(inside == (rank < 2 * half))
    wrong = []
    if inside:
        a, c = divmod(rank, half)
        grid = np.arange(2 * half).reshape(2, half)
        one, two, turned = mesh["a"], mesh["a", "c"], mesh["c", "a"]
        facts = {
            "coordinate": mesh.get_coordinate() == (a, 0, c),
            "shape of a slice": one.shape == (2,) and one.mesh_dim_names == ("a",),
            "group of a slice": one.get_group() is mesh.get_group("a"),
            "ranks of a slice": one.mesh.tolist() == grid[:, c].tolist(),
            "coordinate in a slice": one.get_coordinate() == (a,),
            "two dimensions": two.mesh.tolist() == grid.tolist(),
            "coordinate in two": two.get_coordinate() == (a, c),
            "turned": turned.mesh.tolist() == grid.T.tolist(),
            "coordinate in the turned": turned.get_coordinate() == (c, a),
            "group of the turned": turned.get_group("c") is mesh.get_group("c"),
            "slice of a slice": two["c"].mesh.tolist() == grid[a].tolist(),
            "all dimensions": mesh["a", "b", "c"] is mesh,
        }
        wrong = [name for name, right in facts.items() if not right]
    parallel_assert(not wrong, f"{wrong}")


@four
def test_flatten():
    rank, size = place()
    half = size // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "tp"))
    flat, part = mesh.flatten(), mesh["tp"].flatten("columns")
    turned = mesh["tp", "dp"].flatten("turned")
    wrong = []
    if mesh.get_coordinate() is not None:
        grid = np.arange(2 * half).reshape(2, half)
        row = grid[rank // half].tolist()
        facts = {
            "name and shape": (flat.mesh_dim_names, flat.shape) == (("dp_tp",), (2 * half,)),
            "ranks": flat.mesh.tolist() == list(range(2 * half)),
            "coordinate": flat.get_coordinate() == (rank,),
            "members": ranks_in(flat.get_group()) == list(range(2 * half)),
            "once": mesh.flatten() is flat and mesh._flatten("dp_tp") is flat,
            "slice of the root": mesh["dp_tp"] == flat,
            "group of the root": mesh.get_group("dp_tp") is flat.get_group(),
            "part": part.mesh.tolist() == row and ranks_in(part.get_group()) == row,
            "itself": mesh["tp"].flatten("tp").get_group() is mesh.get_group("tp"),
            "turned": turned.mesh.tolist() == grid.T.ravel().tolist(),
            "members of the turned": ranks_in(turned.get_group()) == grid.T.ravel().tolist(),
            "rank in the turned": turned.get_local_rank() == turned.get_coordinate()[0],
        }
        wrong = [name for name, right in facts.items() if not right]
    parallel_assert(not wrong, f"{wrong}")
    with parallel_raises(ValueError, match="'dp' already"):
        mesh.flatten("dp")
    with parallel_raises(ValueError, match="'columns' already"):
        mesh.flatten("columns")
    with parallel_raises(ValueError, match="overlap"):
        mesh["dp", "dp_tp"]


@four
def test_unflatten_and_concatenate():
    rank, size = place()
    half = size // 2
    line = DeviceMesh(
        "cpu", list(range(2 * half)), mesh_dim_names=("all",), preserve_rank_order=True
    )
    grid = line._unflatten(0, (2, half), ("dp", "tp"))
    same = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "tp"))
    both = DeviceMesh._concatenate([grid["tp"], grid["dp"]])
    again = grid._unflatten("tp", (half, 1), ("x", "y"), {"y": "mpi"})
    wrong = []
    if grid.get_coordinate() is not None:
        facts = {
            "like the grid": grid == same and grid.get_coordinate() == same.get_coordinate(),
            "columns": ranks_in(grid.get_group("dp")) == ranks_in(same.get_group("dp")),
            "rows": ranks_in(grid.get_group("tp")) == ranks_in(same.get_group("tp")),
            "concatenated": both.mesh_dim_names == ("tp", "dp") and both.shape == (half, 2),
            "its groups": both.get_group("dp") is grid.get_group("dp"),
            "its ranks": both.mesh.tolist() == same["tp", "dp"].mesh.tolist(),
            "names": again.mesh_dim_names == ("dp", "x", "y"),
            "kept": again.get_group("dp") is grid.get_group("dp"),
            "alone": again.get_group("y").size() == 1,
            "row": ranks_in(again.get_group("x")) == ranks_in(grid.get_group("tp")),
        }
        wrong = [name for name, right in facts.items() if not right]
    parallel_assert(not wrong, f"{wrong}")
    turned = same["tp", "dp"].flatten("turned")
    checks = [
        ("do not divide", lambda: line._unflatten(0, (2, half + 1), ("a", "b"))),
        ("different names", lambda: line._unflatten(0, (2, half), ("a", "a"))),
        ("different names", lambda: grid._unflatten("tp", (half, 1), ("dp", "b"))),
        ("overlap", lambda: DeviceMesh._concatenate([grid["dp"], grid["dp"]])),
        ("at least one", lambda: DeviceMesh._concatenate([])),
        ("ranks differ", lambda: DeviceMesh._concatenate([grid["dp"], DeviceMesh("cpu", [0])])),
    ]
    if half == 3:
        checks.append(("do not follow", lambda: turned._unflatten(0, (2, 3), ("a", "b"))))
    for text, call in checks:
        with parallel_raises(ValueError, match=text):
            call()


def test_order_of_the_mesh_is_the_order_of_its_groups():
    """Coordinates and group ranks are one number, however the mesh is permuted."""
    rank, size = place()
    mesh = DeviceMesh("cpu", list(range(size))[::-1])
    parallel_assert(mesh.get_coordinate() == (size - 1 - rank,))
    parallel_assert(mesh.get_local_rank() == size - 1 - rank)
    parallel_assert(ranks_in(mesh.get_group()) == list(range(size))[::-1])


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_mesh_from_arrays(make):
    rank, size = place()
    mesh = DeviceMesh("cpu", make([[r] for r in range(size)]), mesh_dim_names=("x", "y"))
    parallel_assert(mesh.shape == (size, 1) and mesh.get_coordinate() == (rank, 0))
    parallel_assert(mesh.get_group("y").size() == 1)


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_the_mesh():
    rank, size = place()
    mesh = init_device_mesh("cpu", (size - 1,), mesh_dim_names=("x",))
    outside = rank == size - 1
    parallel_assert((mesh.get_coordinate() is None) == outside)
    parallel_assert(mesh.mesh.tolist() == list(range(size - 1)))
    text = ""
    try:
        mesh.get_group()
    except ValueError as error:
        text = str(error)
    parallel_assert(("not in this mesh" in text) == outside, text)
    parallel_assert(outside or ranks_in(mesh.get_group()) == list(range(size - 1)))


def test_from_group():
    rank, size = place()
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    parallel_assert(mesh.get_group() is group and mesh.mesh.tolist() == list(range(size)))
    parallel_assert(mesh.get_coordinate() == (rank,))
    alone = dist.new_group([rank])
    both = DeviceMesh.from_group(
        [group, alone], "cpu", [[r] for r in range(size)], mesh_dim_names=("x", "y")
    )
    parallel_assert(both["y"].get_group() is alone and both.get_group("x") is group)
    with parallel_raises(ValueError, match="at least one"):
        DeviceMesh.from_group([], "cpu")
    with parallel_raises(ValueError, match="need mesh and mesh_dim_names"):
        DeviceMesh.from_group([group, alone], "cpu")
    backwards = [[r] for r in range(size)][::-1]
    hint = "dimension 0 of the mesh has ranks" if size > 1 else "1 group"
    with parallel_raises(ValueError, match=hint):
        DeviceMesh.from_group([group, alone][:size], "cpu", backwards, mesh_dim_names=("x", "y"))
    with parallel_raises(ValueError, match="1 group.* 2 dimension"):
        DeviceMesh.from_group(group, "cpu", [[r] for r in range(size)])


def test_backend_override():
    rank, size = place()
    level = dist.MPIOptions(check="off")
    mesh = init_device_mesh(
        "cpu", (size, 1), mesh_dim_names=("x", "y"), backend_override={"x": level, 1: "mpi"}
    )
    parallel_assert(mesh.get_group("x") is not dist.group.WORLD)
    parallel_assert(mesh.get_group("x").carrier.check == 0)
    parallel_assert(dist.get_backend(mesh.get_group("y")) == "mpi")
    with parallel_raises(ValueError, match="by number and by name"):
        init_device_mesh(
            "cpu", (size,), mesh_dim_names=("x",), backend_override={"x": "mpi", 0: "mpi"}
        )
    with parallel_raises(ValueError, match="not there"):
        init_device_mesh("cpu", (size,), backend_override={"z": "mpi"})


def test_makes_the_world_if_there_is_none():
    dist.destroy_process_group()
    mesh = init_device_mesh("cpu", (1,))
    made = dist.is_initialized()
    parallel_assert(made and mesh.size() == 1)


class Gpus:
    """Stands for torch.cuda: what a mesh may ask for and change."""

    def __init__(self, monkeypatch, count: int, current: int | None) -> None:
        self.current = current
        changed = {
            "device_count": lambda: count,
            "is_initialized": lambda: self.current is not None,
            "current_device": lambda: self.current,
            "set_device": self.set_device,
        }
        for name, function in changed.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def set_device(self, index: int) -> None:
        self.current = index


def test_a_mesh_of_gpus_chooses_the_device(monkeypatch):
    """As torch's: that of LOCAL_RANK or the local rank, if the program has chosen none."""
    here, size = dist.get_node_local_rank(), dist.get_world_size()
    for count, before, variable, named, wanted in [
        (3, None, "5", None, 2),
        (2, None, None, None, here % 2),
        (1, None, "7", None, 0),  # where the launcher shows each rank its own
        (8, 6, "5", None, 6),
        (8, 0, "5", None, 0),
        (8, None, "5", 3, 3),
        (8, 0, "5", 3, 3),  # the group's communicator was made on it
        (8, 6, "5", 3, 6),
        (0, None, "5", None, None),
    ]:
        gpus = Gpus(monkeypatch, count, before)
        monkeypatch.setattr(dist.groups.world.world, "device", named)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if variable:
            monkeypatch.setenv("LOCAL_RANK", variable)
        init_device_mesh("cpu", (size,))
        unchanged = gpus.current
        init_device_mesh("cuda", (size,))
        parallel_assert((unchanged, gpus.current) == (before, wanted), f"{gpus.current}, {wanted}")


def test_equality_and_text():
    rank, size = place()
    one = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    two = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    three = init_device_mesh("cpu", (size,), mesh_dim_names=("y",))
    parallel_assert(one == two and hash(one) == hash(two) and one != three and one != "x")
    parallel_assert(repr(one) == f"DeviceMesh('cpu', (x={size}))")


@pytest.mark.mpi(min_size=2)
def test_ranks_that_arrange_the_world_differently():
    rank, size = place()
    odd, order = rank == size - 1, list(range(size))
    shape = (1, size) if odd else (size, 1)
    backwards, name = order[::-1] if odd else order, "y" if odd else "x"
    with parallel_raises(dist.DistMismatchError, match=r"'shape' with value \(1, "):
        init_device_mesh("cpu", shape)
    with parallel_raises(dist.DistMismatchError, match=rf"rank {size - 1} has argument 'mesh'"):
        DeviceMesh("cpu", backwards)
    with parallel_raises(dist.DistMismatchError, match="'mesh_dim_names'"):
        init_device_mesh("cpu", (size,), mesh_dim_names=(name,))
    parallel_assert(ranks_in(init_device_mesh("cpu", (size,)).get_group()) == order)


def test_refusals():
    rank, size = place()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("x", "y"))
    bare = init_device_mesh("cpu", (size, 1))
    checks = [
        (ValueError, "name one", lambda: mesh.get_group()),
        (ValueError, "name one", lambda: mesh.get_local_rank()),
        (KeyError, "no dimension 'z'", lambda: mesh.get_group("z")),
        (KeyError, "no dimension 'z'", lambda: mesh["z"]),
        (KeyError, "no dimension 'x'", lambda: bare.get_group("x")),
        (IndexError, "dimension 2", lambda: mesh.get_group(2)),
        (ValueError, "overlap", lambda: mesh["x", "x"] if size > 1 else mesh["y", "nothing"]),
        (ValueError, "cannot be sliced", lambda: bare["x"]),
        (ValueError, "cannot be flattened", lambda: bare.flatten()),
        (ValueError, "at least one dimension of x, y", lambda: mesh[()]),
        (ValueError, "without an index", lambda: init_device_mesh("cuda:0", (size,))),
        (ValueError, "'cpu' or 'cuda'", lambda: DeviceMesh("nonsense", list(range(size)))),
        (ValueError, "positive", lambda: init_device_mesh("cpu", ())),
        (ValueError, "positive", lambda: init_device_mesh("cpu", (0,))),
        (ValueError, "at most once", lambda: init_device_mesh("cpu", (size + 1,))),
        (ValueError, "at most once", lambda: DeviceMesh("cpu", [0, 0])),
        (ValueError, "ragged", lambda: DeviceMesh("cpu", [[0], [0, 0]])),
        (ValueError, "empty", lambda: DeviceMesh("cpu", [])),
        (ValueError, "at least one dimension", lambda: DeviceMesh("cpu", 3)),
        (
            ValueError,
            "2 different names",
            lambda: init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "a")),
        ),
        (
            ValueError,
            "1 different names",
            lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("a", "b")),
        ),
    ]
    if size == 1:
        checks = [check for check in checks if check[1] != "overlap"]
    for kind, hint, call in checks:
        with parallel_raises(kind, match=hint):
            call()
