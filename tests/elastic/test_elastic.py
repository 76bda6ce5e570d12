"""Training goes on when ranks are killed, and ends with what it would have without them."""

from __future__ import annotations

import random

import pytest
from kill_jobs import differing, draw, train
from long_form import LONG, deadline, size
from patience import at_most
from ulfm import only_ulfm

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.rare,
    only_ulfm,
]

#: Seconds until the others train again; the short form may share its cores with anything.
AGAIN = 2.0 if LONG else 10.0


@pytest.mark.slow
@deadline(240, long=3600)
def test_it_ends_as_if_the_dead_had_never_begun_their_step(count):
    rng = random.Random()
    endings = [
        train(kind, draw(rng, victims), limit=80)
        for kind, victims in [("sgd", 1), ("zero", 2)] * size(1, 25)
    ]
    for ending in endings:
        assert ending.again < at_most(AGAIN), ending.text
        count(1, ending.again)
    assert not differing(endings, size(60, 600))
