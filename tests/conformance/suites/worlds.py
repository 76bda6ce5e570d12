"""What a case is given: torch.distributed over gloo or the bridge, or hpcdist under its names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

__all__ = ["SOON", "TORCH_ONLY", "Case", "World", "error_of", "filled", "suite"]

#: The sides of a case about something that takes torch's own groups only.
TORCH_ONLY = ("gloo", "bridge")
#: The timeout of waits that nothing ends.
SOON = timedelta(seconds=0.2)


@dataclass(frozen=True)
class World:
    """One side, with its default group started.

    Attributes
    ----------
    side : str
        "gloo", "bridge" or "native".
    rank, size : int
        In the default group.
    folder : str
        Where this case may write; all ranks see it.
    """

    side: str
    rank: int
    size: int
    folder: str

    @property
    def native(self) -> bool:
        return self.side == "native"

    @property
    def dist(self) -> Any:
        """torch.distributed, or hpcdist."""
        return importlib.import_module("hpcdist" if self.native else "torch.distributed")

    def at(self, path: str) -> Any:
        """Import the module of this path below torch.distributed, or hpcdist's of this path."""
        return importlib.import_module(f"{self.dist.__name__}.{path}")

    @property
    def DDP(self) -> Any:  # noqa: N802
        if self.native:
            return self.dist.DistributedDataParallel
        return torch.nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class Case:
    """A function of a world; its results are compared with gloo's, rank by rank."""

    run: Callable[[World], Any]
    sides: tuple[str, ...]
    least: int


def suite(cases: dict[str, Case]) -> Callable[..., Any]:
    """Give the decorator that adds a function to these cases."""

    def case(*sides: str, least: int = 1) -> Callable[..., Any]:
        def add(function: Callable[[World], Any]) -> Callable[[World], Any]:
            cases[function.__name__] = Case(function, sides or ("gloo", "bridge", "native"), least)
            return function

        return add

    return case


def filled(world: World, *shape: int) -> torch.Tensor:
    """Make a tensor that differs between ranks and between places."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape) + 10.0 * (world.rank + 1)


def error_of(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """Name the first of these kinds that a call's error belongs to; "no error" if it has none."""
    try:
        call()
    except BaseException as error:  # torch's CheckpointException is no Exception
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), repr(error))
    return "no error"
