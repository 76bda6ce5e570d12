"""A grid of ranks: its shape, its names, and this process's place in it."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from hpcdist.errors import DistError
from hpcdist.groups import state as _group
from hpcdist.mesh import layout as _layout

if TYPE_CHECKING:
    import torch


class Grid:
    """A mesh without its groups.

    Parameters
    ----------
    device_type : str
        Type of the devices; only stored.
    ranks : tuple of int
        Ranks of the world, each at most once.
    axes : tuple of tuple of int
        The axes, see :mod:`hpcdist.mesh.layout`; those of a slice do not reach all ranks.
    names : tuple of str or None
        One name per axis.
    """

    def __init__(
        self,
        device_type: str,
        ranks: tuple[int, ...],
        axes: _layout.Axes,
        names: tuple[str, ...] | None,
    ) -> None:
        self._device_type = device_type
        self._rank_map = ranks
        self._along = axes
        self._names = names
        #: What a recovery has made of it: see :mod:`hpcdist.mesh.recovery`.
        self._generation = 0
        self._lost: tuple[int, ...] = ()
        self._broken = ""

    @property
    def _axes(self) -> _layout.Axes:
        """The axes; DistError if ranks have died, and the others form no grid."""
        if self._broken:
            raise DistError(self._broken)
        return self._along

    @property
    def device_type(self) -> str:
        """Type of the devices, for example ``"cpu"``."""
        return self._device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the dimensions, or None."""
        return self._names

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each dimension."""
        return tuple(len(axis) for axis in self._axes)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._along)

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks of the grid, int32; for a slice, those of this rank's part."""
        import torch

        return torch.tensor(self._own_ranks(), dtype=torch.int32, device="cpu").reshape(self.shape)

    def _own_ranks(self) -> tuple[int, ...]:
        """World ranks of the grid this rank is in, the last dimension fastest."""
        if self.size() == len(self._rank_map):
            parts = _layout.parts(self._axes, len(self._rank_map))
            return tuple(self._rank_map[place] for place in parts[0])
        members = _layout.part_of(_group.get_rank(), self._axes, self._rank_map)
        if members is None:
            raise ValueError(
                f"rank {_group.get_rank()} is not in this mesh: a slice has ranks only where it is"
            )
        return members

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks, in total or along one dimension.

        Parameters
        ----------
        mesh_dim : int or str, optional
            Number or name of a dimension; None means the whole mesh.

        Returns
        -------
        int
            At least 1.

        Raises
        ------
        KeyError, IndexError
            If there is no such dimension.
        """
        return math.prod(self.shape) if mesh_dim is None else self.shape[self._place(mesh_dim)]

    def get_rank(self) -> int:
        """Return this process's rank in the world.

        Returns
        -------
        int
            The same as :func:`hpcdist.get_rank`.
        """
        return _group.get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this process's place in the grid.

        Returns
        -------
        tuple of int or None
            One coordinate per dimension; None outside the mesh.
        """
        members = _layout.part_of(_group.get_rank(), self._axes, self._rank_map)
        if members is None:
            return None
        return _layout.unravel(members.index(_group.get_rank()), self.shape)

    def _place(self, mesh_dim: int | str) -> int:
        """Return the number of a dimension, given its number or name."""
        if isinstance(mesh_dim, str):
            if self._names is None or mesh_dim not in self._names:
                known = ", ".join(self._names or ())
                raise KeyError(f"the mesh has no dimension {mesh_dim!r}; it has: {known}")
            return self._names.index(mesh_dim)
        place = operator.index(mesh_dim)
        if not -self.ndim <= place < self.ndim:
            raise IndexError(f"dimension {place} of a mesh of {self.ndim} dimensions")
        return place % self.ndim

    def _key(self) -> tuple[Any, ...]:
        return self._device_type, self._rank_map, self._along, self._names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self._device_type, self._names, self.ndim))  # the ranks change in recoveries

    def __repr__(self) -> str:
        if self._broken:
            return f"<{type(self).__name__}: {self._broken}>"
        sizes = [str(size) for size in self.shape]
        if self._names:
            sizes = [f"{name}={size}" for name, size in zip(self._names, sizes, strict=True)]
        return f"{type(self).__name__}({self._device_type!r}, ({', '.join(sizes)}))"
