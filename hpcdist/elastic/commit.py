"""One commit of a State, in the memory of its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcdist import codec
from hpcdist.elastic.exchange import spread
from hpcdist.elastic.parts import Part
from hpcdist.elastic.shards import Shards
from hpcdist.parallel.host import on_cpu


@dataclass
class Commit:
    """What a rank has committed, or is about to.

    Attributes
    ----------
    parts : dict
        By name, the copy of each part.
    values : dict
        The State's ``values``.
    random : Any
        torch's random numbers.
    size : int
        Ranks that committed.
    places : list of int
        By rank, the one of whose part of this commit it has: its own number then.
    copies : dict
        By rank, what ranks before this one alone had, as bytes of :meth:`own`; only in jobs with
        spares, of which one may take such a rank's place, and where the batch stays.
    live : int or None
        Where the batch stays, the share whose buffers, values and random numbers these are.
    others : dict
        By share, those of this rank's other shares.
    step : int
        Steps committed.
    alone : frozenset of str or None
        Parts of which the ranks have different copies, see :mod:`hpcdist.elastic.alone`; None where
        no part is looked at for that.
    modes : list of tuple
        Modules, and whether each was in training mode on this rank. A step that fails in a
        validation leaves them in evaluation mode, and the repeated one would train so. Empty on a
        former spare until its next commit: its program is at its beginning.
    """

    parts: dict[str, Any]
    values: dict[str, Any]
    random: Any
    size: int
    places: list[int]
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    live: int | None = None
    others: dict[int, Any] = field(default_factory=dict)
    step: int = -1
    alone: frozenset[str] | None = None
    modes: list[tuple[torch.nn.Module, bool]] = field(default_factory=list)

    def put_modes_back(self) -> None:
        """Put the modules into their modes, each alone: some do more in ``train()``; local."""
        for module, training in self.modes:
            if module.training != training:
                module.training = training

    def divide(self, parts: Mapping[str, Part | Shards]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return of the parts what all ranks have, and what this rank alone has.

        Shards have copies of their own, but for those of a group that is too small for that.
        """
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, part in parts.items():
            taken = self.parts[name]
            if isinstance(part, Shards):
                where = shared if part.of_world else own
                where[name] = part.about(taken)
            elif name in (self.alone or ()):
                own[name] = taken
            else:
                shared[name], own[name] = part.divide(taken)
        return shared, own

    def own(self, parts: Mapping[str, Part | Shards]) -> dict[str, Any]:
        """Return what this rank alone has."""
        return {
            "parts": self.divide(parts)[1],
            "layouts": {n: part.layout() for n, part in parts.items() if n in (self.alone or ())},
            "values": self.values,
            "random": self.random,
            "live": self.live,
            "others": self.others,
        }

    def copy_to_neighbours(self, parts: Mapping[str, Part | Shards], copies: int) -> None:
        """Give the next ranks what this one alone has; all ranks must call it."""
        self.copies = spread(packed(self.own(parts)), copies)


def modes_of(parts: Mapping[str, Part | Shards]) -> list[tuple[torch.nn.Module, bool]]:
    """Return what :attr:`Commit.modes` is to be; local."""
    found = [part.modules() for part in parts.values() if not isinstance(part, Shards)]
    return [(m, m.training) for modules in found for each in modules for m in each.modules()]


def shares_of(own: Mapping[str, Any]) -> dict[int, Any]:
    """Return of what :meth:`Commit.own` returned what each share of the batch alone has."""
    live = {name: own[name] for name in ("parts", "values", "random")}
    return own["others"] if own["live"] is None else {own["live"]: live, **own["others"]}


def packed(thing: Any) -> torch.Tensor:
    """Return an object as bytes, as the codec makes them."""
    return torch.frombuffer(codec.encode(on_cpu(thing)), dtype=torch.uint8)


def unpacked(received: torch.Tensor) -> Any:
    """Return the object that :func:`packed` got."""
    return codec.decode(received.numpy())
