"""Index arithmetic of a grid: divides it along some of its axes.

A grid of N ranks is a list of N places. An axis is the tuple of its places relative to its first
one: in a 2 x 3 grid the axes are (0, 3) and (0, 1, 2). Joining two axes means adding every pair, so
a flattened axis is again an axis, whatever its strides. This module is a leaf.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

Axis = tuple[int, ...]
Axes = tuple[Axis, ...]


def axes_of(shape: Sequence[int]) -> Axes:
    """Return the axes of a grid, the last dimension fastest."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return tuple(
        tuple(index * stride for index in range(size))
        for size, stride in zip(shape, strides, strict=True)
    )


def flattened(axes: Axes) -> Axis:
    """Join several axes into one that runs through all their places, the last one fastest."""
    return tuple(sum(offsets) for offsets in itertools.product(*axes))


def split(axis: Axis, sizes: Sequence[int]) -> Axes:
    """Divide one axis into several that join to it again, the last one fastest."""
    if not sizes or min(sizes) < 1 or math.prod(sizes) != len(axis):
        raise ValueError(f"the sizes {list(sizes)} do not divide a dimension of {len(axis)} ranks")
    found = tuple(tuple(axis[place] for place in part) for part in axes_of(sizes))
    if flattened(found) != axis:
        raise ValueError(
            f"the dimension of {len(axis)} ranks was flattened from others, which the sizes "
            f"{list(sizes)} do not follow"
        )
    return found


def distinct(axes: Axes) -> bool:
    """Return whether several axes together reach no place twice."""
    reached = flattened(axes)
    return len(set(reached)) == len(reached)


def parts(axes: Axes, count: int) -> list[tuple[int, ...]]:
    """Divide the places 0 .. count-1 into the grids that these axes span.

    The smallest place not taken yet begins a new part, because offsets are never negative.
    """
    offsets = flattened(axes)
    taken = [False] * count
    found = []
    for first in range(count):
        if taken[first]:
            continue
        part = tuple(first + offset for offset in offsets)
        for place in part:
            taken[place] = True
        found.append(part)
    return found


def part_of(rank: int, axes: Axes, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the world ranks of the grid that a rank is in, or None if it is in none."""
    if rank not in ranks:
        return None
    own = ranks.index(rank)
    for part in parts(axes, len(ranks)):
        if own in part:
            return tuple(ranks[place] for place in part)
    return None


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a place in a grid, the last dimension fastest."""
    coordinates = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def dimension_names(names: Iterable[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the names as a tuple of distinct names, one per dimension."""
    if names is None:
        return None
    found = tuple(names)
    if len(found) != len(shape) or len(set(found)) != len(found):
        raise ValueError(
            f"mesh_dim_names={list(found)}: {len(shape)} different names are needed, one for each "
            "dimension"
        )
    return found


def grid(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and ranks of nested lists, a tensor or an array."""
    nested = mesh.tolist() if hasattr(mesh, "tolist") else mesh
    shape: list[int] = []
    level = nested
    while isinstance(level, (list, tuple)):
        shape.append(len(level))
        if not level:
            raise ValueError("the mesh is empty")
        level = level[0]
    if not shape:
        raise ValueError(f"the mesh must have at least one dimension, not {mesh!r}")
    flat = [nested]
    for size in shape:
        if not all(isinstance(row, (list, tuple)) and len(row) == size for row in flat):
            raise ValueError(f"the mesh is ragged: {nested}")
        flat = [item for row in flat for item in row]
    return tuple(shape), tuple(operator.index(rank) for rank in flat)
