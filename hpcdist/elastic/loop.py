"""The loop: steps that all ranks commit, or all repeat."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from hpcdist.elastic.state import State, is_death


class Step:
    """One attempt at a step; a context for its body.

    Attributes
    ----------
    index : int
        Number of the step, from 0; a step that is repeated has the same number again.
    """

    def __init__(self, state: State, index: int, commits: bool) -> None:
        self.index = index
        self._state = state
        self._commits = commits
        self._entered = False

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
        if error is None:
            if self._commits:
                self._state.commit(ahead + 1)
            return False
        if not is_death(error):
            return False
        self._state.commit(ahead, yes=False)
        return True


def elastic(state: State, steps: int, *, every: int = 1) -> Iterator[Step]:
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

    Yields
    ------
    Step
        A context; ``step.index`` is the step's number. Its body must depend on that, on `state` and
        on the default group's size and rank only.

    Raises
    ------
    RuntimeError
        If a step was not used as a context.
    StateLostError
        If a shard of an optimizer is lost with all its copies.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    state.begin()
    index = state.step
    while state.step < steps:
        before = len(state.lost)
        step = Step(state, index, (index + 1) % every == 0 or index + 1 == steps)
        yield step
        if not step._entered:
            raise RuntimeError("the body of each step must be inside 'with step:'")
        index = index + 1 if len(state.lost) == before else state.step
