"""Training jobs of which ranks are killed at random moments, and what they end with."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from jobs import run_job

PROGRAM = str(Path(__file__).parents[1] / "elastic" / "training.py")
RANKS, STEPS = 4, 40
END = re.compile(r"^(\w+) end sizes (\d+) parameters (\w+) optimizer (\w+)", re.MULTILINE)


@dataclass
class Ending:
    """How one job ended.

    Attributes
    ----------
    kind, sizes, parameters, optimizer : str
        What was trained, with how many ranks in each step, and hashes of the result.
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


def train(kind: str, deaths: list[str], limit: float = 120) -> Ending:
    """Run one job.

    Raises
    ------
    AssertionError
        If it did not end in time, or without a result.
    """
    command = [PROGRAM, kind, str(STEPS), str(len(deaths)), *deaths]
    ended = run_job(RANKS, *command, limit=limit, env={"HPCDIST_FT": "1"}, ft=True)
    found = END.search(ended.text)
    assert found and not ended.orphans, (deaths, ended.orphans, ended.text)
    moments = {name: [float(t) for t in re.findall(rf"^{name} (\S+)", ended.text, re.MULTILINE)]
               for name in ("dies", "again")}  # fmt: skip
    assert moments["again"], (deaths, ended.text)
    again = max(t - max(d for d in moments["dies"] if d <= t) for t in moments["again"])
    return Ending(*found.groups(), again, len(moments["dies"]), ended.text)


def differing(endings: list[Ending], limit: float = 120) -> list[Ending]:
    """Return those that differ from the run that never had the lost steps."""
    # the shards of a ZeroRedundancyOptimizer are those of the whole optimizer
    plain = {"sgd": "sgd", "adam": "adam", "zero": "adam"}
    wanted = sorted({f"{plain[each.kind]}:{each.sizes}" for each in endings})
    ended = run_job(RANKS, PROGRAM, "reference", str(STEPS), *wanted, limit=limit)
    found = {(kind, sizes): rest for kind, sizes, *rest in END.findall(ended.text)}
    assert len(found) == len(wanted), ended.text
    return [
        each
        for each in endings
        if found[plain[each.kind], each.sizes] != [each.parameters, each.optimizer]
    ]
