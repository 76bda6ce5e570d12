"""A State's commits that outlive the job: in the nodes' memory, and in a folder on disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from hpcdist.elastic.disk import Disk
from hpcdist.elastic.keep import Found, Keeper
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
