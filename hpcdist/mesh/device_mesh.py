"""``DeviceMesh``: ranks in a grid, with a group along each dimension, sliced and flattened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hpcdist.backends import cuda
from hpcdist.groups import joining
from hpcdist.groups import state as _group
from hpcdist.groups.comparison import same_arguments
from hpcdist.groups.new_group import part_of_world
from hpcdist.groups.queries import get_node_local_rank
from hpcdist.groups.resolve import default_group
from hpcdist.groups.state import ProcessGroup
from hpcdist.mesh import layout as _layout
from hpcdist.mesh import recovery
from hpcdist.mesh.grid import Grid
from hpcdist.mesh.overrides import Override, override, overrides
from hpcdist.startup.init import init_process_group


class DeviceMesh(Grid):
    """Ranks of the world in an n-dimensional grid.

    This rank has one group per dimension: the ranks that differ from it in that coordinate only. A
    rank outside the mesh has none. All ranks of the world must make the same meshes in the same
    order; only the members of a group communicate to make it.

    Parameters
    ----------
    device_type : str
        ``"cpu"`` or ``"cuda"``, without an index.
    mesh : array-like of int
        Ranks of the world, in the shape of the grid, each at most once.
    mesh_dim_names : sequence of str, optional
        A name for each dimension; needed for slicing and flattening.
    backend_override : sequence, optional
        Per dimension, a pair (backend, pg_options) for its groups; None means the default.
    preserve_rank_order : bool
        Accepted for compatibility with torch: the order in the mesh always numbers a group's ranks.

    Raises
    ------
    ValueError
        If the shape, the ranks or the names do not fit.
    DistMismatchError
        On all ranks, if a mesh of the whole world differs between them.
    DistTimeoutError
        If a member of a group does not call within the timeout.

    Notes
    -----
    If there is no default group yet, one is made. With ``"cuda"``, a program that has not chosen a
    current device gets one: init_process_group's `device_id`, else LOCAL_RANK or the local rank
    modulo the number of GPUs that it sees. The order in the mesh numbers a group's ranks, so that a
    coordinate and the rank in the group are the same number. After a death that groups survived
    (``reconfigure(rebuild=True)``) the mesh has the ranks that live, if these form a grid; else its
    use raises :class:`~hpcdist.DistError`, and its groups work. Source:
    ``torch.distributed.device_mesh.DeviceMesh``.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[Override] | None = None,
        preserve_rank_order: bool = False,
    ) -> None:
        if device_type not in ("cpu", "cuda"):
            raise ValueError(
                f"device_type must be 'cpu' or 'cuda', without an index, not {device_type!r}"
            )
        shape, ranks = _layout.grid(mesh)
        names = _layout.dimension_names(mesh_dim_names, shape)
        super().__init__(device_type, ranks, _layout.axes_of(shape), names)
        self._start(None)
        pairs = tuple(backend_override or ((None, None),) * len(shape))
        if len(pairs) != len(shape):
            raise ValueError(
                f"backend_override has {len(pairs)} entries for {len(shape)} dimensions"
            )
        if not _group.is_initialized():
            init_process_group()
        if device_type == "cuda":
            local_rank = os.environ.get("LOCAL_RANK") or get_node_local_rank()
            cuda.choose(int(local_rank), _group.world.device)
        size = _group.get_world_size()
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise ValueError(
                f"the mesh must hold each rank at most once, from 0 to {size - 1}: got shape "
                f"{list(shape)} with {len(ranks)} ranks up to {max(ranks)}"
            )
        if len(ranks) == size and not joining.is_closed(default_group()):
            facts = {"device_type": device_type, "mesh_dim_names": names, "shape": shape}
            same_arguments(default_group(), "DeviceMesh", {**facts, "mesh": ranks})
        self._groups: list[Any] = [
            self._make_group(place, pair) for place, pair in enumerate(pairs)
        ]

    def _start(self, root: DeviceMesh | None) -> None:
        """Start without groups."""
        recovery.register(self)
        self._root = root or self
        self._flattened: dict[str, DeviceMesh] = {}
        self._groups = []

    def _make_group(self, place: int, pair: Override = (None, None)) -> Any:
        """Make this rank's group along one axis; None outside the mesh."""
        own = _group.get_rank()
        members = _layout.part_of(own, (self._axes[place],), self._rank_map)
        if members is None:
            return None
        everyone = tuple(range(_group.get_world_size()))
        if members == everyone and pair == (None, None):
            return default_group()
        backend, options = pair
        return part_of_world(
            members,
            None,
            backend,
            options,
            f"mesh_{self._names[place] if self._names else f'dim_{place}'}",
            len(self._rank_map) == len(everyone),
        )

    @classmethod
    def _derive(cls, source: DeviceMesh, axes: _layout.Axes, names: tuple[str, ...]) -> DeviceMesh:
        """A mesh over the same ranks along other axes, without groups yet."""
        mesh = object.__new__(cls)
        Grid.__init__(mesh, source._device_type, source._rank_map, axes, names)
        mesh._start(source._root)
        return mesh

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return this rank's group along a dimension.

        Parameters
        ----------
        mesh_dim : int or str, optional
            Number or name of a dimension, or name of a flattened mesh; may be omitted if there is
            only one dimension.

        Returns
        -------
        ProcessGroup
            Its ranks are the coordinates along the dimension.

        Raises
        ------
        ValueError
            If there are several dimensions and none is named, or this rank is not in the mesh.
        KeyError, IndexError
            If there is no such dimension.
        """
        if mesh_dim is None:
            if self.ndim > 1:
                raise ValueError(
                    f"the mesh has {self.ndim} dimensions: name one, or use get_all_groups()"
                )
            mesh_dim = 0
        if isinstance(mesh_dim, str) and mesh_dim in self._root._flattened:
            return self._root._flattened[mesh_dim].get_group()
        pg = self._groups[self._place(mesh_dim)]
        if pg is None:
            raise ValueError(f"rank {_group.get_rank()} is not in this mesh: it has no groups here")
        return pg

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return this rank's groups along all dimensions.

        Returns
        -------
        list of ProcessGroup
            In the order of the dimensions.

        Raises
        ------
        ValueError
            If this rank is not in the mesh.
        """
        return [self.get_group(place) for place in range(self.ndim)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this process's rank along a dimension.

        Parameters
        ----------
        mesh_dim : int or str, optional
            See :meth:`get_group`.

        Returns
        -------
        int
            Its coordinate along the dimension.

        Raises
        ------
        ValueError, KeyError, IndexError
            See :meth:`get_group`.
        """
        return self.get_group(mesh_dim).rank()

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Slice out dimensions by name, also flattened ones, in the given order."""
        if self._names is None:
            raise ValueError("a mesh without mesh_dim_names cannot be sliced")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if not names:
            raise ValueError(f"name at least one dimension of {', '.join(self._names)}")
        if names == self._names:
            return self
        found = []
        for name in names:
            if name in self._names:
                place = self._names.index(name)
                found.append((self._axes[place], self._groups[place]))
            elif name in self._root._flattened and self._root is self:
                flat = self._root._flattened[name]
                found.append((flat._axes[0], flat._groups[0]))
            else:
                known = (*self._names, *(self._root._flattened if self._root is self else ()))
                raise KeyError(f"the mesh has no dimension {name!r}; it has: {', '.join(known)}")
        axes = tuple(axis for axis, _ in found)
        if not _layout.distinct(axes):
            raise ValueError(f"the dimensions {list(names)} overlap")
        mesh = self._derive(self, axes, names)
        mesh._groups = [pg for _, pg in found]
        return mesh

    def flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """Join all dimensions into one, and make its group.

        All ranks of the world must call it, on the same mesh.

        Parameters
        ----------
        mesh_dim_name : str, optional
            Name of the new dimension; None means the names joined by ``_``. The root mesh can be
            sliced by that name afterwards.
        backend_override : str, object or tuple, optional
            The backend of the new group, its ``pg_options``, or a pair of both.

        Returns
        -------
        DeviceMesh
            One-dimensional. Flattening twice to the same name returns the same mesh.

        Raises
        ------
        ValueError
            If the mesh has no names, or the name is taken.
        DistTimeoutError
            If a member does not call within the timeout.
        """
        if self._names is None:
            raise ValueError("a mesh without mesh_dim_names cannot be flattened")
        name = mesh_dim_name or "_".join(self._names)
        if self.ndim == 1 and name == self._names[0]:
            return self
        root = self._root
        axis = _layout.flattened(self._axes)
        if name in root._flattened and root._flattened[name]._axes == (axis,):
            return root._flattened[name]
        if name in root._flattened or name in (root._names or ()):
            raise ValueError(f"the root mesh has a dimension {name!r} already; choose another name")
        mesh = self._derive(root, (axis,), (name,))
        mesh._groups = [mesh._make_group(0, override(backend_override))]
        root._flattened[name] = mesh
        return mesh

    _flatten = flatten

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: dict[int | str, Any] | None = None,
    ) -> DeviceMesh:
        """Divide one dimension into several, and make their groups; the others keep theirs.

        All ranks of the world must call it, on the same mesh. Source:
        ``torch.distributed.device_mesh.DeviceMesh._unflatten``.
        """
        place = self._place(dim)
        names = _layout.dimension_names(mesh_dim_names, tuple(mesh_sizes))
        if names is None or self._names is None:
            raise ValueError("the mesh and the new dimensions need names")
        axes = _layout.split(self._axes[place], tuple(mesh_sizes))
        pairs = overrides(backend_override, len(axes), names)
        every = (*self._names[:place], *names, *self._names[place + 1 :])
        _layout.dimension_names(every, tuple(0 for _ in every))
        mesh = self._derive(self, (*self._axes[:place], *axes, *self._axes[place + 1 :]), every)
        mesh._root = mesh
        made = [mesh._make_group(place + i, pair) for i, pair in enumerate(pairs)]
        mesh._groups = [*self._groups[:place], *made, *self._groups[place + 1 :]]
        return mesh

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Put the dimensions of several slices of one mesh into one mesh; local.

        Source: ``torch.distributed.device_mesh.DeviceMesh._concatenate``.
        """
        meshes = list(device_mesh_list)
        if not meshes:
            raise ValueError("_concatenate needs at least one mesh")
        if any(each._rank_map != meshes[0]._rank_map for each in meshes):
            raise ValueError("the meshes are not slices of one mesh: their ranks differ")
        if any(each._names is None for each in meshes):
            raise ValueError("meshes without mesh_dim_names cannot be concatenated")
        axes = tuple(axis for each in meshes for axis in each._axes)
        if not _layout.distinct(axes):
            raise ValueError("the dimensions of the meshes overlap")
        names = tuple(name for each in meshes for name in each._names or ())
        _layout.dimension_names(names, tuple(0 for _ in names))
        mesh = DeviceMesh._derive(meshes[0], axes, names)
        mesh._groups = [pg for each in meshes for pg in each._groups]
        return mesh

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Make a mesh from existing groups, without communication.

        Parameters
        ----------
        group : ProcessGroup or sequence of ProcessGroup
            One group, for a mesh of one dimension; or this rank's group along each dimension.
        device_type : str
            See :class:`DeviceMesh`.
        mesh : array-like of int, optional
            Ranks of the world in the shape of the grid; needed for several groups.
        mesh_dim_names : sequence of str, optional
            Names of the dimensions; needed for several groups.

        Returns
        -------
        DeviceMesh
            A mesh with these groups.

        Raises
        ------
        ValueError
            If the mesh does not fit the groups.
        """
        groups = [group] if isinstance(group, ProcessGroup) else list(group)
        if not groups:
            raise ValueError("from_group needs at least one group")
        if isinstance(group, ProcessGroup):
            shape, ranks = _layout.grid(list(group.members.ranks) if mesh is None else mesh)
        elif mesh is None or mesh_dim_names is None:
            raise ValueError("several groups need mesh and mesh_dim_names too")
        else:
            shape, ranks = _layout.grid(mesh)
        if len(shape) != len(groups):
            raise ValueError(f"{len(groups)} group(s) for a mesh of {len(shape)} dimension(s)")
        made = object.__new__(DeviceMesh)
        names = _layout.dimension_names(mesh_dim_names, shape)
        Grid.__init__(made, device_type, ranks, _layout.axes_of(shape), names)
        made._start(None)
        for place, pg in enumerate(groups):
            along = _layout.part_of(_group.get_rank(), (made._axes[place],), ranks)
            if along != pg.members.ranks:
                raise ValueError(
                    f"dimension {place} of the mesh has ranks {along} here, its group "
                    f"{pg.members.ranks}"
                )
        made._groups = groups
        return made
