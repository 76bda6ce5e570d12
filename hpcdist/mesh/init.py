"""``init_device_mesh``: arranges the first ranks of the world in a mesh."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from hpcdist.mesh.device_mesh import DeviceMesh
from hpcdist.mesh.layout import dimension_names
from hpcdist.mesh.overrides import overrides


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: dict[int | str, Any] | None = None,
) -> DeviceMesh:
    """Arrange the first ranks of the world in a grid.

    All ranks of the world must call it. If there is no default group yet, one is made.

    Parameters
    ----------
    device_type : str
        ``"cpu"`` or ``"cuda"``, without an index.
    mesh_shape : sequence of int
        Ranks along each dimension; the last dimension runs fastest.
    mesh_dim_names : sequence of str, optional
        A name for each dimension.
    backend_override : dict, optional
        Number or name of a dimension to the backend of its groups, its ``pg_options``, or a pair of
        both.

    Returns
    -------
    DeviceMesh
        With this rank's group along each dimension.

    Raises
    ------
    ValueError
        If the shape needs more ranks than there are, or the names do not fit.
    DistTimeoutError
        If a member of a group does not call within the timeout.

    Notes
    -----
    Source: ``torch.distributed.device_mesh.init_device_mesh``.
    """
    shape = tuple(operator.index(size) for size in mesh_shape)
    if not shape or min(shape) < 1:
        raise ValueError(f"mesh_shape must be a tuple of positive numbers, not {mesh_shape!r}")
    names = dimension_names(mesh_dim_names, shape)
    pairs = overrides(backend_override, len(shape), names)
    ranks: Any = list(range(math.prod(shape)))
    for size in reversed(shape[1:]):
        ranks = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=pairs)
