"""What a mesh's groups are made with: a pair (backend, pg_options) per dimension."""

from __future__ import annotations

from typing import Any

Override = tuple[Any, Any]


def override(value: Any) -> Override:
    """Return the pair that a backend's name, its options, or a pair of both stands for."""
    if isinstance(value, str):
        return value, None
    return value if isinstance(value, tuple) else (None, value)


def overrides(
    given: dict[int | str, Any] | None, ndim: int, names: tuple[str, ...] | None
) -> tuple[Override, ...]:
    """Return a pair per dimension, from a dict by number or name of the dimension."""
    left: dict[Any, Any] = dict(given or {})
    pairs: list[Override] = []
    for place in range(ndim):
        keys = [key for key in (place, names[place] if names else None) if key in left]
        if len(keys) > 1:
            raise ValueError(f"backend_override names dimension {place} by number and by name")
        pairs.append(override(left.pop(keys[0])) if keys else (None, None))
    if left:
        raise ValueError(f"backend_override names dimensions that are not there: {list(left)}")
    return tuple(pairs)
