"""Random calls with random arguments: they end well or with a documented exception."""

from collections import Counter

import hypothesis
import pytest
from cases import here
from fuzz import Runner, programs
from long_form import deadline
from long_form import size as how_many

import hpcdist as dist

pytestmark = pytest.mark.ranks

#: Calls for each number of ranks.
CALLS = how_many(100, 10_000)
AVERAGE = 6  # steps of a program
#: Seconds that a rank waits for one that went another way. Not less: half a second later the
#: watchdog ends a job whose data does not move, as it may not for that long on a busy machine.
PATIENCE = 1.0


@deadline(120, long=3600)
def test_random_programs(rng, count):
    rank, size = here()
    seed = int(rng.integers(1 << 62))
    runner = Runner(PATIENCE)
    try:
        if rank:
            runner.follow()
            assert not runner.problem, runner.problem
        else:
            settings = hypothesis.settings(
                max_examples=max(1, CALLS // AVERAGE),
                database=None,
                deadline=None,
                print_blob=False,
                # a program that fails may wait for its timeouts: shrinking it would take hours
                phases=(hypothesis.Phase.generate,),
                suppress_health_check=list(hypothesis.HealthCheck),
            )

            @hypothesis.seed(seed)
            @settings
            @hypothesis.given(programs)
            def run(program):
                count.progress(runner.calls, CALLS)
                if runner.calls < CALLS:
                    runner.lead(program)

            try:
                run()
                while runner.calls < CALLS:  # short programs were drawn: go on with another seed
                    seed += 1
                    hypothesis.seed(seed)(run)()
            finally:
                runner.stop()
        outcomes = Counter(runner.outcomes)
        assert outcomes["done"] > runner.calls / 10 and len(outcomes) > 2, outcomes
        count(runner.calls)
        dist.barrier()
    finally:
        runner.close()
