"""The shares of a batch that stays when ranks die: which of them this rank has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from hpcdist.elastic.commit import Commit, packed, shares_of, unpacked
from hpcdist.elastic.dealing import deal, exchange
from hpcdist.elastic.exchange import gathered
from hpcdist.elastic.refusals import refuse_second
from hpcdist.elastic.shards import Shards
from hpcdist.groups.world import world
from hpcdist.parallel.ddp.module import DistributedDataParallel
from hpcdist.parallel.ddp.shares import refusal

#: The entry in a commit that outlives the job, beside the names of parts.
KEPT = "(shares)"


class Batch:
    """The shares of one State's batch, and what each of this rank's alone has.

    Random numbers, buffers and values belong to a share. Those of one share at a time are in place:
    of the first one, outside the loop over the shares.

    Parameters
    ----------
    state : State
        Whose.
    copies : int
        To how many of the next ranks a commit copies what the shares of each alone have.

    Attributes
    ----------
    count : int
        Shares; 0 where the batch does not stay.
    homes : list of (int or None)
        By rank, the share that was its own at the start.
    dealt : list of list of int
        By rank, its shares.
    live : int or None
        The share of which this rank has random numbers, buffers and values in place.
    others : dict
        By share, those of this rank's other shares.
    found : tuple
        The number of shares in an earlier start of the job, and what this rank has read of them.
    """

    def __init__(self, state: Any, copies: int) -> None:
        self._state, self._copies = state, copies
        self.count = 0
        self.homes: list[int | None] = []
        self.dealt: list[list[int]] = []
        self.live: int | None = None
        self.others: dict[int, Any] = {}
        self.found: tuple[int, dict[int, Any]] = (0, {})
        #: The values as they were put in place, or given to all of this rank's shares.
        self._values: dict[str, Any] = {}

    @property
    def mine(self) -> list[int]:
        """This rank's shares; its rank, where the batch does not stay."""
        return self.dealt[world.comm.rank] if self.count else [world.comm.rank]

    @property
    def is_plain(self) -> bool:
        """Whether each rank has the share of its number, and no other."""
        return not self.count or self.dealt == [[rank] for rank in range(self.count)]

    # -- when shares are dealt -------------------------------------------------------------------

    def open(self) -> None:
        """Let the batch stay from here on; all ranks must call it.

        Raises
        ------
        ValueError
            If the State contains what cannot be averaged by shares, or is a second one where ranks
            may die.
        """
        problem = self._problem()
        if problem:
            raise ValueError(f"keep_batch=True: {problem}")
        refuse_second(self._state.number, alone=self._state.survives)
        if self.count:
            return
        self._begin()

    def _begin(self) -> None:
        size = world.comm.size
        self.count, have = self.found if self.found[0] else (size, {})
        self.homes = [rank if rank < self.count else None for rank in range(size)]
        self.dealt, self.live = deal(self.count, self.homes), self.homes[world.comm.rank]
        if self.found[0]:
            self._get(have)
        self.found = (0, {})

    def renew(self, former: tuple[int, ...]) -> None:
        """Follow the ranks that live: by new rank, the former one; local."""
        if self.count:
            self.homes = [self.homes[rank] for rank in former]

    def deal(self) -> None:
        """Deal the shares anew after a recovery; all ranks must call it.

        The last commit is in place, on all ranks.

        Raises
        ------
        StateLostError
            On all ranks, if what a share alone had is lost.
        """
        commit = self._state.committed
        have = shares_of(commit.own(self._state.parts))
        for each in commit.copies.values():
            have = shares_of(unpacked(each)) | have
        if not any(gathered(bool(have))):
            self._begin()  # the commit is older than the shares
            return
        self.dealt = deal(self.count, self.homes)
        own = self._get(have)
        # had from here on, whoever else dies before the next commit
        commit.others |= {share: had for share, had in own.items() if share != commit.live}

    def _get(self, have: dict[int, Any]) -> dict[int, Any]:
        """Get what this rank's shares alone have, and put that of the first in place."""
        own = exchange(have, self.dealt, self._copies)
        self.others = dict(own)
        if own:
            self.live = min(own)
            self._put(self.others.pop(self.live))
        return own

    def put_back(self, commit: Commit) -> None:
        """The State has put a commit back; local."""
        self.live, self.others = commit.live, dict(commit.others)
        self._values = copy.deepcopy(self._state.values.__dict__)

    # -- in a step -------------------------------------------------------------------------------

    def turn_to(self, share: int) -> None:
        """Put in place what a share of this rank alone has, and put away that of the other one."""
        if share == self.live or not self.count:
            return
        if self.live is not None:
            self.others[self.live] = self._take()
        self.live = share
        self._put(self.others.pop(share))

    def spread(self) -> None:
        """Give all of this rank's shares the values that changed outside the loop; local."""
        now = self._state.values.__dict__
        if not self.others:
            return
        new = {name: now[name] for name in now if not _alike(name, now, self._values)}
        for share, own in self.others.items():
            kept = {n: v for n, v in own["values"].items() if n in now or n not in self._values}
            self.others[share] = own | {"values": kept | copy.deepcopy(new)}
        self._values = copy.deepcopy(now)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for name, part in self._state.parts.items():
            if not isinstance(part, Shards):
                yield name, part

    @torch.no_grad()
    def _take(self) -> dict[str, Any]:
        return {
            "parts": {name: part.take_own() for name, part in self._parts()},
            "values": copy.deepcopy(self._state.values.__dict__),
            "random": self._state.random.take(),
        }

    @torch.no_grad()
    def _put(self, own: dict[str, Any]) -> None:
        for name, part in self._parts():
            part.restore_own(own["parts"][name])
        self._state.set_values(own["values"])
        self._values = own["values"]
        self._state.random.restore(own["random"])

    # -- models ----------------------------------------------------------------------------------

    def models(self) -> list[DistributedDataParallel]:
        """Return the State's models whose gradients are averaged, each once."""
        return [m for m in self._modules() if isinstance(m, DistributedDataParallel)]

    def _modules(self) -> list[torch.nn.Module]:
        found: dict[int, torch.nn.Module] = {}
        for part in self._state.parts.values():
            for thing in part.modules():
                found |= {id(module): module for module in thing.modules()}
        return list(found.values())

    def _problem(self) -> str:
        """Return what of the State cannot be averaged by shares."""
        models = self.models()
        if not models:
            return (
                "the State has no DistributedDataParallel, so there is nothing to average by "
                "shares: pass it the model that you call"
            )
        for model in models:
            why = refusal(model)
            if why:
                return f"{why}, so its gradients cannot be averaged by shares"
        for name, part in self._parts():
            if part.sharded():
                return f"{name} has a shard on each rank, and a share of the batch has none"
        averaged = {id(p) for model in models for p in model.parameters()}
        for name, part in self._state.parts.items():
            if isinstance(part, Shards) and part.overlaps:
                return f"{name} steps in backward (overlap_with_ddp), before all shares are there"
            if any(p.requires_grad and id(p) not in averaged for p in part.stepped()):
                return (
                    f"{name} steps parameters of no DistributedDataParallel in the State, whose "
                    "gradients nothing averages by shares"
                )
        return ""


def _alike(name: str, now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a value is what it was."""
    return name in before and torch.equal(packed(now[name]), packed(before[name]))
