"""The loop: steps that all ranks commit, or all repeat."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from hpcdist.elastic.batch import Batch
from hpcdist.elastic.deaths import is_death
from hpcdist.elastic.state import State
from hpcdist.elastic.turns import Turns
from hpcdist.groups.world import world


class Step:
    """One attempt at a step; a context for its body.

    Attributes
    ----------
    index : int
        Number of the step, from 0; a step that is repeated has the same number again.
    share_count : int
        Shares of the batch: the number of ranks, or what it was at the start with `keep_batch`.
    """

    def __init__(self, state: State, index: int, commits: bool, keep_batch: bool = False) -> None:
        self.index = index
        self.share_count = state.batch.count if keep_batch else world.comm.size
        self._state = state
        self._commits = commits
        self._keeps = keep_batch
        self._turns: Turns | None = None
        self._entered = False

    def shares(self) -> Iterator[int]:
        """Iterate over this rank's shares of the batch, once in the step's body.

        Each turn of the loop runs forward and backward with the samples of its share. After the
        loop ``parameter.grad`` is the average over all shares, of all ranks: clip it, and step. All
        ranks must use the loop up.

        Returns
        -------
        iterator of int
            From 0 to ``share_count - 1``. Without `keep_batch` this rank's number alone.

        Raises
        ------
        RuntimeError
            If it was called in this step before.

        Examples
        --------
        >>> for share in step.shares():
        ...     mine = batch[share :: step.share_count]
        ...     loss(model(mine)).backward()
        >>> optimizer.step()
        """
        if self._turns is not None:
            raise RuntimeError("a step's body iterates over step.shares() once, not nested")
        self._turns = Turns(self._state.batch) if self._keeps else Turns(Batch(self._state, 1))
        return self._turns

    def __enter__(self) -> Step:
        """Begin; local to this process."""
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Commit, or roll back if a rank died; other exceptions leave the body."""
        ahead = self.index - self._state.step
        if self._turns is not None:
            self._turns.close()
        if error is None:
            self._check_turns()
            if self._commits:
                self._state.commit(ahead + 1)
            return False
        if not is_death(error):
            return False
        self._state.commit(ahead, yes=False)
        return True

    def _check_turns(self) -> None:
        """Raise if shares of the batch are missing, on all ranks that ran the same body."""
        if self._turns is None and self._keeps:
            raise RuntimeError(
                "with keep_batch=True a step's body iterates over step.shares(), and runs forward "
                "and backward for each"
            )
        if self._turns is not None and not self._turns.ended:
            raise RuntimeError("the loop over step.shares() ended before the last share")


def elastic(
    state: State, steps: int, *, every: int = 1, keep_batch: bool = False
) -> Iterator[Step]:
    """Iterate over the steps of a training run that goes on when ranks die.

    All ranks must iterate, and give each step's body the same collectives::

        for step in elastic(state, 1000):
            with step:
                loss = ...
                loss.backward()
                optimizer.step()

    If a rank dies, all others return to the last commit and repeat the steps since, without it. No
    step counts on some ranks and not on others: they agree at each commit.

    Parameters
    ----------
    state : State
        What the body changes.
    steps : int
        Steps to commit in all; ``state.step`` of them are done already, in an earlier start of the
        job for example (:meth:`State.resume`).
    every : int
        Steps from one commit to the next. A commit copies the state.
    keep_batch : bool
        Keep the batch when ranks die: its shares, as many as ranks at the start, are dealt to those
        that live. The body iterates over :meth:`Step.shares`. On one node the averages have the
        bits of a run without deaths.

    Yields
    ------
    Step
        A context; ``step.index`` is the step's number. Its body must depend on that, on `state` and
        on the default group's size and rank only; with `keep_batch` on the share and their number
        in place of rank and size.

    Raises
    ------
    RuntimeError
        If a step was not used as a context, or its body left shares out.
    StateLostError
        If a shard of an optimizer, or what a share alone has, is lost with all its copies.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    state.begin(keep_batch)
    index = state.step
    while state.step < steps:
        before = len(state.lost)
        step = Step(state, index, (index + 1) % every == 0 or index + 1 == steps, keep_batch)
        yield step
        if not step._entered:
            raise RuntimeError("the body of each step must be inside 'with step:'")
        index = index + 1 if len(state.lost) == before else state.step
