"""What is left of a grid of ranks when some have died: a smaller grid, or none."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdist.mesh import layout, recovery
from hpcdist.mesh.recovery import shrunk

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def left_of(shape, dead):
    """The grid without the rows, columns and so on that died; None if that leaves others out."""
    grid = np.arange(np.prod(shape)).reshape(shape)
    living = ~np.isin(grid, list(dead))
    dims = range(len(shape))
    kept = [np.flatnonzero(living.any(axis=tuple(set(dims) - {d}))) for d in dims]
    return grid[np.ix_(*kept)] if living[np.ix_(*kept)].all() and living.any() else None


@pytest.mark.parametrize("shape", [(6,), (2, 3), (4, 2), (2, 2, 3)])
def test_every_loss_of_up_to_four_leaves_the_grid_it_should(shape):
    count = int(np.prod(shape))
    axes, grids = layout.axes_of(shape), 0
    for died in range(5):
        for dead in itertools.combinations(range(count), died):
            found, wanted = (
                shrunk(axes, [p not in dead for p in range(count)]),
                left_of(shape, dead),
            )
            assert (found is None) == (wanted is None), (dead, found)
            if found is None:
                continue
            grids += 1
            places, left = found
            assert left == layout.axes_of(wanted.shape), (dead, found)
            assert places == wanted.ravel().tolist(), (dead, found)
    assert grids > 1


def test_slices_and_joined_dimensions_lose_what_the_grid_loses():
    axes = layout.axes_of((2, 3, 2))
    without_column = [place // 2 % 3 != 1 for place in range(12)]
    left = layout.axes_of((2, 2, 2))
    places = [place for place in range(12) if without_column[place]]
    for chosen in ((0,), (1,), (2,), (0, 2), (1, 2)):
        found = shrunk(tuple(axes[i] for i in chosen), without_column)
        assert found == (places, tuple(left[i] for i in chosen)), chosen
    joined = (layout.flattened((axes[0], axes[1])), axes[2])
    assert shrunk(joined, without_column) == (places, (layout.flattened(left[:2]), left[2]))


def test_parts_of_different_sizes_are_no_grid():
    _, columns = layout.axes_of((2, 2))
    assert shrunk((columns,), [True, True, True, False]) is None
    assert shrunk((columns,), [True, True, False, False]) == ([0, 1], ((0, 1),))
    assert shrunk((columns,), [False] * 4) is None


class _Mesh:
    _generation = 0


def test_a_mesh_whose_groups_are_lost_follows_no_later_recovery(monkeypatch):
    lost, later = _Mesh(), _Mesh()
    later._generation = 1
    monkeypatch.setattr(recovery, "_meshes", {id(mesh): mesh for mesh in (lost, later)})
    recovery._renumber(SimpleNamespace(members=SimpleNamespace(generation=1)), None)
    assert list(recovery._meshes.values()) == [later]
