"""Training jobs of which ranks are killed at random moments, and what they end with."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs import run_job

PROGRAM = str(Path(__file__).parents[1] / "elastic" / "training.py")
RANKS, STEPS = 4, 40
END = re.compile(
    r"^(\w+) end sizes (\d+) parameters (\w+) optimizer (\w+)(?: own (\w+))?", re.MULTILINE
)


@dataclass
class Ending:
    """How one job ended.

    Attributes
    ----------
    kind, sizes, parameters, optimizer, own : str
        What was trained, with how many ranks in each step, and hashes of the result; `own` is of
        what differs per rank.
    again : float
        The most seconds from a death to the next step of the others.
    died : int
        How many ranks were killed: fewer than planned if one was to die in a recovery that ended
        too soon.
    text : str
        What the job printed.
    """

    kind: str
    sizes: str
    parameters: str
    optimizer: str
    own: str
    again: float
    died: int
    text: str


def draw(rng: random.Random, victims: int) -> list[str]:
    """Draw who dies when: later ones in another step, with the first, or in a recovery."""
    ranks = rng.sample(range(RANKS), victims)
    step, delay = rng.randrange(2, STEPS - 15), rng.random() * 0.02
    deaths = [f"{ranks[0]}={step}+{delay:.5f}"]
    for rank in ranks[1:]:
        how = rng.randrange(3)
        if how == 0:
            deaths.append(f"{rank}={rng.randrange(2, STEPS - 15)}+{rng.random() * 0.02:.5f}")
        elif how == 1:
            deaths.append(f"{rank}={step}+{max(0, delay + rng.uniform(-0.002, 0.002)):.5f}")
        else:
            deaths.append(f"{rank}=recovery+{rng.random() * 0.01:.5f}")
    return deaths


def draw_with_spares(rng: random.Random, victims: int, spares: int) -> list[str]:
    """Draw who dies when in a job with spares, among which a victim may be; or who joins."""
    ranks = rng.sample(range(RANKS + spares), victims)
    step, deaths = rng.randrange(2, STEPS - 15), []
    for number, rank in enumerate(ranks):
        near = step if rng.randrange(2) else rng.randrange(2, STEPS - 15)
        when = str(near) if number else str(step)
        if number and rank < RANKS and rng.randrange(3) == 0:
            when = "recovery"
        elif number and ranks[0] < RANKS and rng.randrange(3) == 0:
            rank, when = ranks[0], "joined"  # the spare in the place of the first victim
        deaths.append(f"{rank}={when}+{rng.random() * (0.1 if when == 'joined' else 0.02):.5f}")
    return deaths


def train(
    kind: str, deaths: list[str], limit: float = 120, spares: int = 0, keep_batch: bool = False
) -> Ending:
    """Run one job, with `spares` ranks more than it trains with.

    Raises
    ------
    AssertionError
        If it did not end in time, or without a result.
    """
    command = [PROGRAM, kind, str(STEPS), str(max(len(deaths), 1)), *deaths]
    with TemporaryDirectory() as folder:
        env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": str(spares), "HPCDIST_TEST_FOLDER": folder}
        env |= {"HPCDIST_TEST_KEEP_BATCH": "1"} if keep_batch else {}
        ended = run_job(RANKS + spares, *command, limit=limit, env=env, ft=True)
    found = END.search(ended.text)
    assert found and not ended.orphans, (deaths, ended.orphans, ended.text)
    moments = {name: [float(t) for t in re.findall(rf"^{name} (\S+)", ended.text, re.MULTILINE)]
               for name in ("dies", "again")}  # fmt: skip
    assert moments["again"] or not moments["dies"], (deaths, ended.text)
    after = [t - max(d for d in moments["dies"] if d <= t) for t in moments["again"]]
    again = max(after, default=0.0)
    return Ending(*found.groups(), again, len(moments["dies"]), ended.text)


def differing(endings: list[Ending], limit: float = 120) -> list[Ending]:
    """Return those that differ from the run that never had the lost steps."""
    # the shards of a ZeroRedundancyOptimizer are those of the whole optimizer
    plain = {"sgd": "sgd", "adam": "adam", "zero": "adam"}
    wanted = sorted({f"{plain[each.kind]}:{each.sizes}" for each in endings})
    ended = run_job(RANKS, PROGRAM, "reference", str(STEPS), *wanted, limit=limit)
    found = {(kind, sizes): rest[:2] for kind, sizes, *rest in END.findall(ended.text)}
    assert len(found) == len(wanted), ended.text
    return [
        each
        for each in endings
        if found[plain[each.kind], each.sizes] != [each.parameters, each.optimizer]
    ]


def differing_with_spares(endings: list[Ending], limit: float = 120) -> list[Ending]:
    """Return those that differ from a run without deaths and without spares.

    Also of jobs whose batch stays: what differs per rank there differs per share.
    """
    kinds = sorted({each.kind for each in endings})
    wanted = {kind: train(kind, [], limit) for kind in kinds}
    return [
        each
        for each in endings
        if any(
            getattr(each, name) != getattr(wanted[each.kind], name)
            for name in ("sizes", "parameters", "optimizer", "own")
        )
    ]
