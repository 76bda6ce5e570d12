"""Cases that are wrong on purpose, to see what compared.py says. They run only if named."""

from __future__ import annotations

from typing import Any

from worlds import Case, World, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


@case()
def other_results(world: World) -> Any:
    return [world.side == "gloo"]


@case()
def an_error(world: World) -> Any:
    return 1 // (1 if not world.native else 0)
