"""What is committed and rolled back."""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

from hpcdist import _engine
from hpcdist.elastic.parts import Part, RandomNumbers, part_of
from hpcdist.elastic.shards import Shards, StateLostError
from hpcdist.errors import DistError, RankFailedError
from hpcdist.groups.reconfigure import agree
from hpcdist.groups.world import NOT_INITIALIZED, world
from hpcdist.parallel.zero import ZeroRedundancyOptimizer

__all__ = ["State", "is_death"]

#: Bits of a vote: the state may be committed; no rank is known to have died.
STATE, ALIVE = 1, 2


def _comm() -> Any:
    """Return MPI's communicator of the default group, or None."""
    if world.pg is None:
        raise ValueError(NOT_INITIALIZED)
    found = [each for each in world.pg._backends.values() if isinstance(each, _engine.Comm)]
    return found[0] if found else None


def is_death(error: BaseException) -> bool:
    """Whether an error of a step comes from the death of a rank that the job survives."""
    if not isinstance(error, DistError) or isinstance(error, StateLostError):
        return False
    if world.pg is None or not world.pg.supports_reconfigure:
        return False
    return (isinstance(error, RankFailedError) and bool(error.ranks)) or _engine.is_broken(_comm())


class State:
    """What a training step changes: committed by all ranks together, or rolled back.

    Parameters
    ----------
    copies : int
        Copies of each shard of a :class:`~hpcdist.optim.ZeroRedundancyOptimizer`'s state, in the
        memory of the next ranks: so many ranks may die at the same time.
    **parts : object
        Modules (also DistributedDataParallel), optimizers, tensors, and anything with
        ``state_dict()`` and ``load_state_dict()``. They must be the same on all ranks.

    Attributes
    ----------
    step : int
        Steps committed so far.
    values : types.SimpleNamespace
        Other values of the program, such as numbers and lists; copied and rolled back, too.
    lost : list of tuple of int
        For each recovery, the ranks that died, as they were numbered then.
    repeated : int
        Steps that were begun and rolled back.
    seconds : float
        Time that recoveries took on this rank.

    Notes
    -----
    torch's random numbers are rolled back as well. Where the job ends when a rank dies
    (``supports_reconfigure`` is False), nothing is copied. Source: ``State`` of Horovod's elastic
    mode, with its ``commit`` and ``restore``.
    """

    def __init__(self, *, copies: int = 1, **parts: Any) -> None:
        if copies < 1:
            raise ValueError(f"copies must be at least 1, not {copies}")
        self.step = 0
        self.values = SimpleNamespace()
        self.lost: list[tuple[int, ...]] = []
        self.repeated = 0
        self.seconds = 0.0
        self._parts: dict[str, Part] = {
            name: Shards(thing, copies)
            if isinstance(thing, ZeroRedundancyOptimizer)
            else part_of(thing, name)
            for name, thing in parts.items()
        }
        self._random = RandomNumbers()
        self._committed: Any = None
        self._ready: Any = None

    @property
    def survives(self) -> bool:
        """Whether this job goes on when a rank dies."""
        return world.pg is not None and world.pg.supports_reconfigure

    def commit(self, steps: int = 0, yes: bool = True) -> bool:
        """Make the present state the one to which ranks return, if all ranks can.

        All ranks must call it. Where the job ends when a rank dies, it only counts.

        Parameters
        ----------
        steps : int
            How many steps the state is ahead of the last commit.
        yes : bool
            False on a rank whose steps have failed.

        Returns
        -------
        bool
            Whether all ranks have committed. If not, all have rolled back, without the ranks that
            died.

        Raises
        ------
        StateLostError
            A shard of an optimizer is lost with all its copies.
        DistTimeoutError
            Not all ranks called in time.
        """
        if not self.survives:
            self.step += steps
            return True
        vote = self._vote(yes)
        if vote & STATE:
            self.step += steps
            self._accept()
        else:
            self.repeated += steps + (not yes)
        if vote != STATE | ALIVE:
            self._recover()
        return bool(vote & STATE)

    def rollback(self) -> None:
        """Return to the last commit; all ranks must call it.

        Raises
        ------
        RuntimeError
            If there was none.
        """
        if self._committed is None:
            raise RuntimeError("there is no commit to return to: call commit() first")
        parts, values, random, self.step = self._committed
        for name, part in self._parts.items():
            part.restore(parts[name])
        self.values.__dict__.clear()
        self.values.__dict__.update(copy.deepcopy(values))
        self._random.restore(random)

    def _take(self) -> None:
        parts = {name: part.take() for name, part in self._parts.items()}
        self._ready = parts, copy.deepcopy(self.values.__dict__), self._random.take()

    def _accept(self) -> None:
        self._committed, self._ready = (*self._ready, self.step), None

    def _vote(self, yes: bool) -> int:
        """Copy the state, unless this rank has failed, and decide together what holds."""
        if yes:
            try:
                self._take()
            except DistError as error:
                if not is_death(error):
                    raise
                yes = False
        # That a rank has died is decided together, too: ranks hear of it at different times.
        return agree(STATE * yes | ALIVE * (not _engine.is_broken(_comm())))

    def _recover(self) -> None:
        """Go on without the dead: from the last commit, which the neighbours then copy again."""
        began = time.monotonic()
        vote = 0
        while vote != STATE | ALIVE:
            pg = world.pg
            assert pg is not None
            self.lost.append(pg.reconfigure().lost)
            yes = True
            try:
                self.rollback()
            except DistError as error:
                if not is_death(error):
                    raise
                yes = False
            vote = self._vote(yes)
            if vote & STATE:
                self._accept()
        self.seconds += time.monotonic() - began
