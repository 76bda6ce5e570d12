"""What becomes of the meshes when ranks have died and their groups are made again."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

from hpcdist.groups import kept
from hpcdist.groups.world import world
from hpcdist.mesh import layout as _layout
from hpcdist.mesh.grid import Grid

#: All meshes of this process by their identity, because equal ones are several.
_meshes: weakref.WeakValueDictionary[int, Grid] = weakref.WeakValueDictionary()


def register(mesh: Grid) -> None:
    """Let a mesh follow recoveries from now on; those before it do not concern it."""
    if _renumber not in kept.renumbering:
        kept.renumbering.append(_renumber)
    mesh._generation = _generation()
    _meshes[id(mesh)] = mesh


def _generation() -> int:
    return 0 if world.pg is None else world.pg.members.generation


def _renumber(pg: Any, places: Sequence[int] | None) -> None:
    """Number the ranks of the meshes again, unless their groups are lost; local."""
    generation = pg.members.generation
    late = [mesh for mesh in list(_meshes.values()) if mesh._generation != generation]
    if places is None:  # they keep the former ranks, and follow no later recovery
        for mesh in late:
            _meshes.pop(id(mesh), None)
        return
    new = {former: rank for rank, former in enumerate(places)}
    for mesh in late:
        _shrink(mesh, new, pg.rank(), generation)


def _shrink(mesh: Grid, new: dict[int, int], own: int, generation: int) -> None:
    former = mesh._rank_map
    ranks = tuple(new.get(rank, -1) for rank in former)
    died = [was for was, rank in zip(former, ranks, strict=True) if was >= 0 > rank]
    lost, why, along = (*mesh._lost, *died), "", mesh._along
    found = shrunk(along, [rank >= 0 for rank in ranks])
    part = _layout.part_of(own, along, ranks) if found is None and len(along) == 1 else None
    if found is not None:
        places, along = found
        ranks = tuple(ranks[place] for place in places)
    elif part is not None:  # a slice, whose parts differ now
        ranks = tuple(rank for rank in part if rank >= 0)
        along = (tuple(range(len(ranks))),)
    else:
        who = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        why = (
            f"the ranks of this mesh form no grid any more: {who} of it died (as numbered then), "
            "and not the whole row or column. Its groups can be used: get_group(), "
            "get_all_groups(). Make another mesh of the ranks that are left"
        )
    lost = lost if why else ()
    mesh._rank_map, mesh._along = ranks, along  # no call from here on: handlers run at calls
    mesh._lost, mesh._broken, mesh._generation = lost, why, generation


def shrunk(axes: _layout.Axes, living: Sequence[bool]) -> tuple[list[int], _layout.Axes] | None:
    """Return what is left of a grid: the places that live, and the axes of a grid of these.

    Parameters
    ----------
    axes : tuple of tuple of int
        See :mod:`hpcdist.mesh.layout`. They divide the places into parts.
    living : sequence of bool
        By place.

    Returns
    -------
    tuple or None
        None if some part is no grid any more, or the parts differ.
    """
    shape = tuple(len(axis) for axis in axes)
    parts = [part for part in _layout.parts(axes, len(living)) if any(living[p] for p in part)]
    kept: list[set[int]] = [set() for _ in shape]
    for part in parts:
        for index, place in enumerate(part):
            for along, coordinate in zip(kept, _layout.unravel(index, shape), strict=True):
                along.update({coordinate} if living[place] else ())
    size = math.prod(len(along) for along in kept)
    if not parts or any(sum(living[place] for place in part) != size for part in parts):
        return None
    places = [place for place in range(len(living)) if living[place]]
    number = {place: i for i, place in enumerate(places)}
    left = [[number[place] for place in part if living[place]] for part in parts]
    strides = [math.prod(len(along) for along in kept[i + 1 :]) for i in range(len(kept))]
    found = tuple(
        tuple(left[0][i * stride] - left[0][0] for i in range(len(along)))
        for along, stride in zip(kept, strides, strict=True)
    )
    offsets = _layout.flattened(found)
    same = all(part == [part[0] + offset for offset in offsets] for part in left)
    return (places, found) if same and min(itertools.chain(*found)) >= 0 else None
