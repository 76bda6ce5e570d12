"""Faults between two nodes, which are namespaces: killed and stopped ranks, links that are cut.

docs/reliability.md says what must come of each.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import nodes
import pytest
from long_form import LONG, deadline

sys.path.insert(0, str(Path(__file__).parents[1] / "nodes"))

from faults import FAULTS, OPERATIONS, Case, is_possible, run  # noqa: E402
from link import pair  # noqa: E402

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

#: The short form: what depends on the engine and not on MPI, and one that passes.
SHORT = [
    Case("daemon", "small"),
    Case("cut", "small", 2, "catch"),
    Case("cut", "start", 1, "catch"),
    Case("cut_1s", "large"),
    Case("ft_ranks", "small", 2),
    Case("ft_daemon", "small", 2),
]
#: Seconds on top of each limit in the short form, which may share its cores with anything.
SLACK = 20.0


@pytest.fixture(scope="module")
def two_nodes():
    lacking = nodes.missing()
    if lacking and os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, so two nodes have to start here: {lacking}")
    if lacking:
        pytest.skip(lacking)
    with pair() as found:
        yield found


def cases(rng: random.Random, mpirun: str) -> list[Case]:
    all_of_them = [
        Case(fault, operation, rng.choice((1, 2)), rng.choice(("raise", "catch")))
        for fault in FAULTS
        for operation in OPERATIONS
    ]
    chosen = all_of_them if LONG else [replace(each, slack=SLACK) for each in SHORT]
    return [each for each in chosen if is_possible(mpirun, each.fault, each.operation)]


@deadline(240, long=7200)
def test_faults_between_nodes(two_nodes, count):
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    tried = cases(rng, two_nodes.mpirun)
    failed, slowest = [], 0.0
    for number, case in enumerate(tried):
        count.progress(number, len(tried))
        out = run(two_nodes, case, rng)
        slowest = max(slowest, out.error)
        if out.problems:
            failed.append(f"{case}, seed {seed}: {'; '.join(out.problems)}\n{out.text[-4000:]}")
    assert not failed, "\n\n".join(failed)
    count(len(tried), slowest)
