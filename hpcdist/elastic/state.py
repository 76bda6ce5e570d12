"""What is committed and rolled back."""

from __future__ import annotations

import copy
import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

from hpcdist import _engine, log
from hpcdist.elastic import handover, refusals
from hpcdist.elastic.alone import names_of
from hpcdist.elastic.archive import Archive, contents, put_back
from hpcdist.elastic.batch import Batch
from hpcdist.elastic.commit import Commit, modes_of
from hpcdist.elastic.deaths import is_death
from hpcdist.elastic.exchange import gathered
from hpcdist.elastic.parts import Part, RandomNumbers, part_of
from hpcdist.elastic.shards import Shards, put_back_all
from hpcdist.errors import DistError
from hpcdist.groups import joining
from hpcdist.groups.rebuild import with_spares
from hpcdist.groups.reconfigure import ReconfigureOptions, agree, follow, reconfigure
from hpcdist.groups.world import NOT_INITIALIZED, world
from hpcdist.parallel.zero import ZeroRedundancyOptimizer

_log = log.get_logger("elastic")
#: Why a failed step cannot be taken back where State.survives is False.
_NO_RETURN = (
    "there is no commit to return to: this job ends when a rank dies, "
    "and keeps commits for its next start only"
)

#: Bits of a vote: the state may be committed; no rank is known to have died.
STATE, ALIVE = 1, 2
#: The number of each State of the program, in the order in which it makes them.
_made = itertools.count()


def _comm() -> Any:
    """Return MPI's communicator of the default group, or None."""
    if world.pg is None:
        raise ValueError(NOT_INITIALIZED)
    return world.pg.carrier.native


class State:
    """What a training step changes: committed by all ranks together, or rolled back.

    Parameters
    ----------
    copies : int
        Copies of each shard of a :class:`~hpcdist.optim.ZeroRedundancyOptimizer`'s state, in the
        memory of the next ranks of its group: so many ranks may die at the same time.
    memory_every : int
        Every how many commits one is kept in the nodes' memory, for the next start of the job:
        under ``python -m hpcdist launch --max-restarts``, under torchrun with restarts, and where
        ``HPCDIST_COMMIT_JOB`` is set. Each rank then keeps its last two there.
    folder : path-like, optional
        Folder on a disk that all ranks can reach, for commits as well: the last two of those kept.
        The loop goes on from there if no newer commit is in the nodes' memory; give another run,
        and another State of this one, another folder.
    folder_every : int
        Every how many commits one is kept there.
    rebuild : bool
        After a death make all groups again from their members that live, as ``rebuild`` of
        :meth:`~hpcdist.ProcessGroup.reconfigure` does, and with the spares that have taken places;
        otherwise they are lost.
    **parts : object
        Modules (also DistributedDataParallel), optimizers, tensors, and anything with
        ``state_dict()`` and ``load_state_dict()``. They must be the same on all ranks, unless ranks
        with `rebuild` train different models in groups of their own.

    Attributes
    ----------
    step : int
        Steps committed so far.
    began : int
        Steps that an earlier start of the job had committed.
    values : types.SimpleNamespace
        Other values of the program, such as numbers and lists; copied and rolled back, too.
    looked : bool
        Whether :meth:`resume` was called.
    lost : list of tuple of int
        For each recovery, the ranks that died, as they were numbered then.
    repeated : int
        Steps that were begun and rolled back on this rank.
    number : int
        How many States the program had made before this one.
    rebuild : bool
        As given.
    seconds : float
        Time that recoveries took on this rank.

    Notes
    -----
    A program may have several, one after another or side by side. Each start of the job must resume
    them in the same order: that tells which commits are whose.

    torch's random numbers are rolled back as well. Where the job ends when a rank dies
    (``supports_reconfigure`` is False) and is not started again, nothing is copied. Source:
    ``State`` of Horovod's elastic mode, with its ``commit`` and ``restore``.
    """

    def __init__(
        self,
        *,
        copies: int = 1,
        memory_every: int = 1,
        folder: str | os.PathLike[str] | None = None,
        folder_every: int = 100,
        rebuild: bool = False,
        **parts: Any,
    ) -> None:
        numbers = {"copies": copies, "memory_every": memory_every, "folder_every": folder_every}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.step = self.began = 0
        self.values = SimpleNamespace()
        self.lost: list[tuple[int, ...]] = []
        self.repeated = 0
        self.seconds = 0.0
        self.number = next(_made)
        self.parts: dict[str, Part | Shards] = {
            name: Shards(thing, copies)
            if isinstance(thing, ZeroRedundancyOptimizer)
            else part_of(thing, name)
            for name, thing in parts.items()
        }
        refusals.refuse_folder(self.parts, folder)
        self.random = RandomNumbers()
        #: The last commit, and the next one until all ranks have voted for it.
        self.committed: Commit | None = None
        self._ready: Commit | None = None
        self._copies = copies
        self.rebuild = rebuild
        #: Its shares, where it stays when ranks die.
        self.batch = Batch(self, copies)
        #: Whether the commit is to be kept for the next start once the ranks have recovered.
        self._keeps = False
        #: Commits before any step that this rank has made: begin()'s, and those after resume().
        #: And those of the others when this rank joined them, which it skips.
        self._openings = self._openings_before = 0
        #: The group's collectives since which a commit is one of these.
        self._opens_at: int | None = None
        self.looked = False
        #: Where commits are kept for the next start.
        self.archive = Archive(folder, folder_every, memory_every, self._agreed, is_death)

    @property
    def survives(self) -> bool:
        """Whether this job goes on when a rank dies."""
        return world.pg is not None and world.pg.supports_reconfigure

    @property
    def progress(self) -> dict[str, Any]:
        """What a rank that joins the others must know beside their commit."""
        return {
            "began": self.began,
            "lost": self.lost,
            "repeated": self.repeated,
            "keeps": self._keeps,
            # those that this rank itself has not come to yet, as a former spare, count too
            "openings": max(self._openings, self._openings_before),
            "archive": self.archive.progress,
            "batch": (self.batch.count, self.batch.homes),
        }

    def follow(self, progress: dict[str, Any]) -> None:
        """Go on with the commits of the others, whose :attr:`progress` this is; local."""
        self.began, self.repeated = progress["began"], progress["repeated"]
        self.lost = [tuple(ranks) for ranks in progress["lost"]]
        self._keeps, self._openings_before = progress["keeps"], progress["openings"]
        self.archive.follow(progress["archive"])
        self.batch.count, self.batch.homes = progress["batch"]

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
        RuntimeError
            If `yes` is false where the job ends when a rank dies: it has nothing to return to.
        """
        if world.joining is not None:
            self._join()
            return True
        if self._skips_this(steps, yes):
            return True
        if not self.survives:
            if not yes:
                raise RuntimeError(f"the steps of this rank have failed, and {_NO_RETURN}")
            self.step += steps
            self._keep()
            return True
        vote = self._vote(yes)
        if vote & STATE:
            self.step += steps
            self._accept()
        else:
            self.repeated += steps + (not yes)
        self._keeps = bool(vote & STATE)
        if vote != STATE | ALIVE:
            self._recover()
        if self._keeps:
            self._keep()
        return bool(vote & STATE)

    def _skips_this(self, steps: int, yes: bool) -> bool:
        """Whether the others have made this commit before this rank joined them."""
        opens_at, self._opens_at = self._opens_at, None
        if opens_at is None or steps or not yes:
            return False
        self._openings += 1
        # A former spare that has made a collective since is in its first step.
        return self._openings <= self._openings_before and _comm().seq == opens_at

    def begin(self, keep_batch: bool = False) -> None:
        """Resume, unless that was done, and commit; all ranks must call it before their steps."""
        if not self.looked:
            self.resume()
        if keep_batch:
            self.batch.open()
        self._open()
        self.commit()

    def _open(self) -> None:
        """Take the next commit for one before any step; local."""
        self._opens_at = _comm().seq if world.spares else None

    def _join(self) -> None:
        """Join the others, which are in :meth:`_recover`: this process has a dead rank's place."""
        self.archive.open()
        with joining.opened():
            self._recover(joins=True)
        self.looked = True  # not if it has failed: begin() then joins again
        if self._keeps:
            self._keep()

    def resume(self) -> bool:
        """Go on from the newest commit that an earlier start of this job has left.

        All ranks must call it; :func:`elastic` does. The number of ranks may differ from then.
        Commits are kept for the next start from then on. A former spare gets the last commit of the
        others, which wait for that.

        Returns
        -------
        bool
            Whether there was one. It is in place then, and ``step`` and ``began`` are its steps.

        Raises
        ------
        StateLostError
            A shard of an optimizer is in none of the files.
        ValueError
            The commit has other parts; the ranks resume different States; or another State of this
            program has the folder.
        """
        if world.joining is not None:
            self._join()
            self._open()
            return True
        self._open()
        keeps = self.archive.open()
        if keeps:
            refusals.refuse_kept(self.parts)
        self.looked = True
        if not keeps:
            return False
        began = time.monotonic()
        found, where = self.archive.find()
        if found is None:
            return False
        put_back(self, found)
        self.seconds += time.monotonic() - began
        if world.comm.rank == 0:
            _log.warning(
                "training goes on from step %d, which %d ranks had committed to %s, with %d ranks; "
                "found after %.3f s",
                *(self.step, found.size, where, world.comm.size, time.monotonic() - began),
            )
        return True

    def _keep(self) -> None:
        """Keep this commit for the next start of the job, if it is its turn."""
        turns = self.archive.turns()
        if not turns:
            return
        commit = self.committed
        if commit is None:
            commit = self._take(alone=True)
        own, shards = contents(self, commit)
        for each in turns:
            each.keep(self.step, own, shards)

    def _agreed(self, flag: bool) -> bool:
        """Whether all ranks gave a true flag."""
        return bool(agree(flag)) if self.survives else all(gathered(flag))

    def rollback(self) -> None:
        """Return to the last commit; all ranks must call it.

        Raises
        ------
        RuntimeError
            If there was none, as where the job ends when a rank dies.
        """
        if self.committed is None:
            raise RuntimeError(
                "there is no commit to return to: call commit() first"
                if self.survives
                else _NO_RETURN
            )
        self.put_back()

    def put_back(self, sharded: bool = True) -> None:
        """Put the last commit in place; with `sharded` all ranks must call it."""
        commit = self.committed
        assert commit is not None
        self.step = commit.step
        for name, part in self.parts.items():
            if not isinstance(part, Shards):
                part.restore(commit.parts[name])
        if sharded:
            put_back_all(self.parts, commit.parts, self.rebuild)
        self.set_values(commit.values)
        self.random.restore(commit.random)
        commit.put_modes_back()
        self.batch.put_back(commit)

    def set_values(self, values: dict[str, Any]) -> None:
        """Put a copy of these in the place of :attr:`values`; local."""
        self.values.__dict__.clear()
        self.values.__dict__.update(copy.deepcopy(values))

    def _take(self, alone: bool = False) -> Commit:
        parts = {
            name: part.take(alone) if isinstance(part, Shards) else part.take()
            for name, part in self.parts.items()
        }
        values, size = copy.deepcopy(self.values.__dict__), world.comm.size
        random, places = self.random.take(), list(range(size))
        self.batch.spread()
        live, others = self.batch.live, dict(self.batch.others)
        mine = self._alone()
        return Commit(
            parts, values, random, size, places, live=live, others=others, alone=mine,
            modes=modes_of(self.parts),
        )  # fmt: skip

    def _alone(self) -> frozenset[str] | None:
        """Return the names of the parts that differ between ranks; all ranks must call it.

        None where all ranks have the same: without groups of their own, and where the batch stays.
        """
        if not (self.rebuild and world.spares) or self.batch.count:
            return None
        if self.committed is not None and self.committed.alone is not None:
            return self.committed.alone
        return frozenset().union(*gathered(sorted(names_of(self.parts))))

    def _accept(self) -> None:
        assert self._ready is not None
        self._ready.step = self.step
        self.committed, self._ready = self._ready, None
        if world.spares:
            _engine.mind_spares(_comm())

    def _vote(self, yes: bool) -> int:
        """Copy the state, unless this rank has failed, and decide together what holds."""
        refusals.refuse_second(self.number)
        refusals.refuse_lost(self.parts, self.rebuild)
        if yes:
            try:
                self._ready = self._take()
                if self.batch.count or (world.spares and _engine.world_place(_comm())[2]):
                    self._ready.copy_to_neighbours(self.parts, self._copies)
            except DistError as error:
                if not is_death(error):
                    raise
                yes = False
        # That a rank has died is decided together, too: ranks hear of it at different times.
        dead = _engine.is_broken(_comm()) or _engine.lost_ranks(_comm())
        return agree(STATE * yes | ALIVE * (not dead))

    def _recover(self, joins: bool = False) -> None:
        """Go on without the dead: from the last commit, which the neighbours then copy again.

        A former spare that `joins` has recovered already when it got its place.
        """
        began = time.monotonic()
        vote = 0
        while vote != STATE | ALIVE:
            if not joins:
                self._reconfigure()
            joins = False
            renewed = time.monotonic()
            try:
                yes = self._return()
            except DistError as error:
                if not is_death(error):
                    raise
                yes = False
            vote = self._vote(yes)
            if vote & STATE:
                self._accept()
                joining.joined()
            _engine.record_return(time.monotonic() - renewed)
        self.seconds += time.monotonic() - began

    def _reconfigure(self) -> None:
        pg = world.pg
        assert pg is not None
        options = ReconfigureOptions(rebuild=self.rebuild)
        renewed = reconfigure(pg, options, None, followed=False)
        self.lost.append(renewed.lost)
        if self.committed is not None:
            places = self.committed.places
            self.committed.places = [places[former] for former in renewed.ranks]
        self.batch.renew(renewed.ranks)

    def _return(self) -> bool:
        """Return to the last commit, together with the ranks that have none yet.

        False if a rank has died meanwhile.
        """
        rebuilds = self.rebuild if world.joining is None else world.joining.rebuilds
        if world.spares and rebuilds and not with_spares(world.pg):
            return False
        follow(world.pg)
        if not world.spares:
            if self.committed is not None:
                refusals.refuse_fewer(self.parts, self.committed.size, world.comm.size)
            self.rollback()
        elif self.committed is None and world.joining is None:
            raise RuntimeError(
                "a rank died before the first commit: there is no state that the spare in its "
                "place could get. Start the job again"
            )
        else:
            handover.restore(self)
        if self.batch.count:
            self.batch.deal()
        return True
