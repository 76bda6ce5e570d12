"""Times of things that alternate in one run: medians over rounds of the slowest rank's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .job import MpiJob

#: Runs the thing that is measured so many times.
Batch = Callable[[int], None]

#: Seconds that one measurement should take, so that the clock and the barrier do not matter.
_ENOUGH = 0.002
_MOST_CALLS = 10_000


@dataclass(frozen=True)
class Times:
    """Seconds of one call, over all rounds; in each round the slowest rank's.

    Parameters
    ----------
    seconds : numpy.ndarray
        One value a round.
    calls : int
        Calls that each value is the mean of.
    """

    seconds: np.ndarray
    calls: int

    @property
    def median(self) -> float:
        """float: the middle, in seconds."""
        return float(np.median(self.seconds))

    @property
    def least(self) -> float:
        """float: the fastest round, in seconds."""
        return float(self.seconds.min())

    @property
    def most(self) -> float:
        """float: the slowest round, in seconds."""
        return float(self.seconds.max())

    @property
    def spread(self) -> float:
        """float: distance of the quartiles, as a share of the median."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float((high - low) / self.median) if self.median else 0.0


def interleave(
    job: MpiJob,
    contenders: Mapping[str, Batch],
    rounds: int,
    warmup: int = 2,
    calls: int | None = None,
) -> dict[str, Times]:
    """Measure several things in turn, so that other load on the machine affects all equally.

    In each round every contender has its turn, and the rounds begin with another one each: one call
    that is not timed, a barrier, then the calls that are. All ranks must call it.

    Parameters
    ----------
    job : MpiJob
        The ranks.
    contenders : mapping
        Name -> function that makes a number of calls.
    rounds, warmup : int
        Rounds that count, and rounds before them that do not.
    calls : int, optional
        Calls in a measurement; None means as many as take about two milliseconds, found by trying.

    Returns
    -------
    dict
        Name -> Times, the same on all ranks.
    """
    names = list(contenders)
    counts = {name: calls or _calls_for(job, contenders[name]) for name in names}
    spent = np.zeros((len(names), warmup + rounds))
    clock = time.perf_counter
    for turn in range(warmup + rounds):
        for step in range(len(names)):
            index = (turn + step) % len(names)
            batch, count = contenders[names[index]], counts[names[index]]
            batch(1)
            job.barrier()
            began = clock()
            batch(count)
            spent[index, turn] = (clock() - began) / count
    worst = job.worst(spent)[:, warmup:]
    return {name: Times(worst[i], counts[name]) for i, name in enumerate(names)}


def _calls_for(job: MpiJob, batch: Batch) -> int:
    """How many calls fill a measurement; the same on all ranks."""
    count, spent = 1, 0.0
    batch(1)
    while True:
        job.barrier()
        began = time.perf_counter()
        batch(count)
        spent = float(job.worst([time.perf_counter() - began])[0])
        if spent >= _ENOUGH / 4 or count >= _MOST_CALLS:
            break
        count = min(_MOST_CALLS, count * 8)
    return max(1, min(_MOST_CALLS, round(_ENOUGH / (spent / count))))
