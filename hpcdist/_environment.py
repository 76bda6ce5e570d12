"""Environment variables that hold for a while. Only the standard library is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def variables(changed: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of this process, and put the old ones back afterwards.

    Parameters
    ----------
    changed : mapping
        Their values; None hides one.
    """
    before = {name: os.environ.get(name) for name in changed}
    _set(changed)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
