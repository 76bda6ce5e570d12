"""The shards of a ZeroRedundancyOptimizer's state, with copies in the memory of neighbours."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import torch

from hpcdist.collectives.objects import all_gather_object
from hpcdist.elastic.exchange import gathered, spread
from hpcdist.elastic.parts import shapes
from hpcdist.errors import DistError
from hpcdist.groups.world import world
from hpcdist.parallel.zero import ZeroRedundancyOptimizer


class StateLostError(DistError):
    """A rank died together with all ranks that had a copy of its shard of the optimizer's state."""


def _pack(thing: Any) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(thing, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> Any:
    # tensors and plain values only: reading runs no code
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)


class Shards:
    """One optimizer's shards: this rank's, and copies of those of the ranks before it.

    Parameters
    ----------
    zero : ZeroRedundancyOptimizer
        Over any group. Shards are numbered by the ranks of that.
    copies : int
        How many of the next ranks of its group get a copy of each shard: so many may die at once.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer, copies: int) -> None:
        self._zero = zero
        self._copies = copies
        self._group = zero.process_group
        self._was_taken = False

    def group(self) -> Any:
        """Return the group that has them."""
        return self._group

    @property
    def of_world(self) -> bool:
        """Whether the default group has them, and not another one."""
        return self._group is world.pg

    def take(self, alone: bool = False) -> dict[str, Any]:
        """Return this rank's shard and its neighbours', by rank; all ranks must call it.

        Parameters
        ----------
        alone : bool
            Return this rank's only.
        """
        self._was_taken = True
        mine = copy.deepcopy(self._zero.shard_state())
        received = {} if alone else spread(_pack(mine), self._copies, self._group.carrier)
        held = {rank: _unpack(each) for rank, each in received.items()}
        return {
            "held": {self._group.rank(): mine} | held,
            "size": self._group.size(),
            "groups": copy.deepcopy(self._zero.shard_options()),
        }

    def layout(self) -> str:
        """Describe it, so that two of the same text can have each other's shards."""
        groups = "; ".join(shapes(group["params"]) for group in self._zero.param_groups)
        return f"a ZeroRedundancyOptimizer of {groups}, copies={self._copies}"

    def modules(self) -> list[torch.nn.Module]:
        """Return none, as an optimizer."""
        return []

    def stepped(self) -> list[torch.Tensor]:
        """Return the parameters that the ranks step."""
        return [p for group in self._zero.param_groups for p in group["params"]]

    @property
    def overlaps(self) -> bool:
        """Whether it steps in backward."""
        return self._zero.overlap_with_ddp

    def is_of(self, zero: ZeroRedundancyOptimizer) -> bool:
        """Whether these are the shards of an optimizer."""
        return self._zero is zero

    @staticmethod
    def own(taken: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank alone has of what :meth:`take` returned."""
        return {"shard": taken["held"][world.comm.rank], "groups": taken["groups"]}

    @staticmethod
    def copy_of(place: int, taken: dict[str, Any]) -> torch.Tensor:
        """Return as bytes the copy of a rank's shard in what :meth:`take` returned."""
        return _pack(taken["held"][place])

    def about(self, taken: dict[str, Any]) -> dict[str, Any]:
        """Return what a former spare needs of :meth:`take`'s beside the copies of neighbours.

        That is the shard itself where another group has too few ranks for all copies.
        """
        found = {name: taken[name] for name in ("size", "groups")}
        if not self.of_world and taken["size"] <= self._copies:
            found["shard"] = taken["held"][self._group.rank()]
        return found

    def join(
        self, place: int, packed: torch.Tensor | None, about: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what :meth:`take` would have on the rank whose shard it is, without copies.

        Parameters
        ----------
        place : int
            The rank.
        packed : torch.Tensor or None
            From :meth:`copy_of`; None where that is still with a neighbour in another group.
        about : dict
            From :meth:`about`.
        """
        held = {} if packed is None else {place: _unpack(packed)}
        if "shard" in about:
            held[self._group.rank()] = about["shard"]
        return {"held": held, "size": about["size"], "groups": about["groups"]}

    def resume(self, size: int, shards: dict[int, dict[str, Any]], same: bool) -> None:
        """Put back what :meth:`own` returned in an earlier start of the job.

        All ranks must call it.

        Parameters
        ----------
        size : int
            Ranks there were.
        shards : dict
            By former rank, those that this rank has; together the ranks have all.
        same : bool
            Whether every rank has exactly its own.
        """
        held = {rank: each["shard"] for rank, each in shards.items()}
        groups = next((each["groups"] for each in shards.values()), None)
        if not same:
            groups = next(each for each in gathered(groups) if each is not None)
        problem = self.restore({"held": held, "size": size, "groups": groups}, whole=not same)
        if problem:
            raise StateLostError(problem)

    def restore(self, taken: dict[str, Any], whole: bool = False) -> str:
        """Put the shards back; after a death the ranks that are left divide all of them anew.

        All ranks of the group must call it.

        Parameters
        ----------
        taken : dict
            From :meth:`take`.
        whole : bool
            Redistribute the shards even if the number of ranks has not changed.

        Returns
        -------
        str
            On all ranks of the group which shards are lost with all their copies; "" if none.
        """
        if self._was_taken:
            self._zero.keep_groups(len(taken["groups"]))  # without those of the failed step
        if not whole and taken["size"] == self._group.size():
            own = taken["held"][self._group.rank()]
            self._zero.load_shard(copy.deepcopy(own), copy.deepcopy(taken["groups"]))
            return ""
        found = self._collect(taken["held"])
        lost = sorted(set(range(taken["size"])) - set(found))
        if lost:
            where = "" if self.of_world else f" of the group {self._group.members.name!r}"
            return (
                f"the optimizer's shards of the former ranks {lost}{where} are lost: all "
                f"{self._copies + 1} ranks that had them died. Load a checkpoint from disk, or "
                "give State more copies"
            )
        if taken["size"] == self._group.size():  # a former spare has its shard from here on
            taken["held"].setdefault(self._group.rank(), found[self._group.rank()])
        state: dict[int, Any] = {}
        for shard in found.values():
            state.update(shard)
        self._zero.reshard(state, copy.deepcopy(taken["groups"]))
        return ""

    def _collect(self, held: dict[int, Any]) -> dict[int, Any]:
        """Return the shards that the members have together, by former rank in the group."""
        everyone: list[Any] = [None] * self._group.size()
        all_gather_object(everyone, _pack(held).numpy(), self._group)
        found: dict[int, Any] = {}
        for packed in everyone:
            found.update(_unpack(torch.from_numpy(packed)))
        return found


def put_back_all(
    parts: Mapping[str, Any], taken: Mapping[str, Any], rebuild: bool, whole: bool = False
) -> None:
    """Put all shards back; all ranks must call it, also those that have none.

    Parameters
    ----------
    parts : mapping
        Of a State, by name.
    taken : mapping
        By name, from :meth:`Shards.take`.
    rebuild : bool
        Whether shards may be over other groups, so that ranks know of different ones.
    whole : bool
        As for :meth:`Shards.restore`.

    Raises
    ------
    StateLostError
        On all ranks, if a shard and all its copies are lost.
    """
    shards = {name: part for name, part in parts.items() if isinstance(part, Shards)}
    problems = [part.restore(taken[name], whole) for name, part in shards.items()]
    problem = next(filter(None, problems), "")
    if rebuild:
        problem = next(filter(None, gathered(problem)), "")
    if problem:
        raise StateLostError(problem)
