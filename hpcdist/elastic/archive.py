"""A State's commits that outlive the job: in the nodes' memory, and in a folder on disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from hpcdist.elastic import refusals
from hpcdist.elastic.batch import KEPT
from hpcdist.elastic.commit import Commit, shares_of
from hpcdist.elastic.disk import Disk
from hpcdist.elastic.keep import Found, Keeper
from hpcdist.elastic.refusals import layouts_of
from hpcdist.elastic.shards import Shards
from hpcdist.groups.world import NOT_INITIALIZED, world
from hpcdist.startup.commits import job_of_this_process

#: A State's number, in the order in which they resume: the same in every start of the job.
_numbers = itertools.count()


class Archive:
    """Chooses which commits are kept where, and which of them is the newest.

    Parameters
    ----------
    folder : path-like or None
        On disk, as for State.
    folder_every, memory_every : int
        Every how many commits one is kept there, and in the nodes' memory.
    agree, is_death : callable
        As for :class:`~hpcdist.elastic.keep.Keeper`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        folder_every: int,
        memory_every: int,
        agree: Callable[[bool], bool],
        is_death: Callable[[BaseException], bool],
    ) -> None:
        self._disk = Disk(folder, agree) if folder is not None else None
        self._keeper: Keeper | None = None
        self._folder_every, self._memory_every = folder_every, memory_every
        self._agree, self._is_death = agree, is_death
        self._claimed = False
        self._commits = 0

    def open(self) -> bool:
        """Keep commits from here on; return whether there is a place for them. Local."""
        job = job_of_this_process()
        if not job and self._disk is None:
            return False
        if world.pg is None:
            raise ValueError(NOT_INITIALIZED)
        if self._disk is not None and not self._claimed:
            self._disk.claim()
            self._claimed = True
        if job and self._keeper is None:
            self._keeper = Keeper(job, next(_numbers), self._agree, self._is_death)
        return True

    def find(self) -> tuple[Found | None, str]:
        """Return the newest commit, or None, and where it was; all ranks must call it."""
        found = self._keeper.find() if self._keeper is not None else None
        if self._disk is not None:
            newer = self._disk.find(-1 if found is None else found.step)
            if newer is not None:
                return newer, "disk"
        return found, "the nodes' memory"

    def turns(self) -> list[Any]:
        """Count a commit, and return what has to keep it."""
        number, self._commits = self._commits, self._commits + 1
        turns: list[Any] = []
        if self._keeper is not None and number % self._memory_every == 0:
            turns.append(self._keeper)
        if self._disk is not None and number and number % self._folder_every == 0:
            turns.append(self._disk)
        return turns

    @property
    def progress(self) -> tuple[int, tuple[int, str] | None]:
        """What a rank that joins the others must know to keep commits with them."""
        return self._commits, self._keeper.progress if self._keeper is not None else None

    def follow(self, progress: tuple[int, tuple[int, str] | None]) -> None:
        """Go on with the commits of the others, whose :attr:`progress` this is; local."""
        self._commits, kept = progress
        if kept is None:
            self._keeper = None  # the others have not resumed: they keep none
        elif self._keeper is not None:
            self._keeper.follow(kept)


def contents(state: Any, commit: Commit) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is kept of a commit: what this rank has, and its shards by name; local."""
    parts = commit.parts
    shards: dict[str, Any]
    shards = {n: p.own(parts[n]) for n, p in state.parts.items() if isinstance(p, Shards)}
    own = {
        "parts": {name: parts[name] for name in parts if name not in shards},
        "layouts": layouts_of(state.parts),
        # What differs from rank to rank, as buffers do: on disk the rest is rank 0's.
        "private": {
            name: part.divide(parts[name])[1]
            for name, part in state.parts.items()
            if not isinstance(part, Shards) and not part.sharded()
        },
        "shards": sorted(shards),
        "values": commit.values,
        "random": commit.random,
        "lost": state.lost,
        "repeated": state.repeated,
        "batch": state.batch.count,
    }
    if state.batch.count:
        shards[KEPT] = shares_of(commit.own(state.parts))
    return own, shards


def put_back(state: Any, found: Found) -> None:
    """Put a commit of an earlier start in place; all ranks must call it."""
    own = found.own
    refusals.refuse_other_parts(state.parts, found)
    refusals.refuse_another_size(state.parts, found.size, world.comm.size)
    for name, part in state.parts.items():
        if isinstance(part, Shards):
            shards = {rank: each[name] for rank, each in found.shards.items()}
            part.resume(found.size, shards, found.same)
        else:
            taken, private = own["parts"][name], own.get("private", {}).get(name)
            if private is not None:
                taken = part.join(part.divide(taken)[0], private)
            part.restore(taken)
    state.set_values(own["values"])
    if world.comm.rank < found.size:  # no two ranks draw the same numbers
        state.random.restore(own["random"])
    kept = [each.get(KEPT, {}) for each in found.shards.values()]
    state.batch.found = own.get("batch", 0), {s: each[s] for each in kept for s in each}
    state.lost, state.repeated = [tuple(ranks) for ranks in own["lost"]], own["repeated"]
    state.step = state.began = found.step
