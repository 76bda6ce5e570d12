"""What the programs of injected hangs share: times, kinds by name, and what they print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SECONDS = 1.2  # the timeout
LONGER = 2.6  # what rank 1 does in place of the call


def by_name(*kinds: Callable[..., None]) -> dict[str, Callable[..., None]]:
    return {kind.__name__: kind for kind in kinds}


def run(
    kind: Callable[..., None], rank: int, data: Any, errors: tuple[type[Exception], ...]
) -> None:
    """Run one kind, and print what came of it as test_reports.py reads it."""
    said = "nothing"
    try:
        kind(rank, data)
    except errors as error:
        said = f"{type(error).__name__} {error}"
    print(f"<<{kind.__name__} {rank} {said}>>", flush=True)
