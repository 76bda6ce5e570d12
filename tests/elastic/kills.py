#!/usr/bin/env python
"""Kills ranks of training jobs at random moments, and compares how the jobs end.

    python tests/elastic/kills.py                   50 jobs of four ranks that lose one
    python tests/elastic/kills.py --victims 2       ... that lose two
    python tests/elastic/kills.py --spares 2        ... that have two spares, and so lose none
    python tests/elastic/kills.py --spares 2 --torch   ... with torch's own DDP and FSDP2
    python tests/elastic/kills.py --spares 2 --groups  ... with two groups that train a model each
    python tests/elastic/kills.py --keep-batch      ... whose batch stays; also with spares

Each job must end, with the parameters and the optimizer's state, bit for bit, of a run in which the
dead never began the step that they died in. With spares it is the run without any death, in which
nothing differs on any rank; a spare, and a former one that is about to join, may be among the
victims. So it is where the batch stays. Also shown: the seconds from a death until the others
have made their next step. Needs an MPI with fault tolerance. Exits with 0 only if all jobs passed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from kill_jobs import differing, differing_with_spares, draw, draw_with_spares, train  # noqa: E402

KINDS = ("sgd", "zero", "adam")
TORCH = ("torchsgd", "torchfsdp", "torchnorm", "torchfsdpnorm", "torchadam")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=50, help="jobs to run (50)")
    parser.add_argument("--victims", type=int, default=1, choices=(1, 2, 3), help="ranks to kill")
    parser.add_argument(
        "--minutes", type=float, default=60, help="begin no job later than that (60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--spares", type=int, default=0, help="spares beside the four ranks (0)")
    parser.add_argument("--torch", action="store_true", help="stock torch; needs spares")
    parser.add_argument("--groups", action="store_true", help="two groups; needs spares")
    parser.add_argument("--keep-batch", action="store_true", help="keep the batch without spares")
    options = parser.parse_args()
    if options.torch and not options.spares:
        parser.error("--torch needs --spares: torch's reducers begin anew with another group")
    if options.groups and (not options.spares or options.torch or options.keep_batch):
        parser.error("--groups needs --spares, and goes with neither --torch nor --keep-batch")
    if options.torch and options.keep_batch:
        parser.error("--keep-batch is of hpcdist's own DistributedDataParallel")
    whole = bool(options.spares or options.keep_batch)  # ends as without any death
    kinds = (*KINDS, "norm") if whole else KINDS
    if options.torch:
        kinds = TORCH
    if options.groups:
        kinds = ("halves",)
    rng = random.Random(f"{options.seed} {options.victims}")
    endings, bad, jobs = [], 0, 0
    until = time.monotonic() + 60 * options.minutes
    for number in range(options.jobs):
        if time.monotonic() > until:
            break
        jobs += 1
        kind = kinds[number % len(kinds)]
        if options.spares:
            deaths = draw_with_spares(rng, options.victims, options.spares)
        else:
            deaths = draw(rng, options.victims)
        try:
            endings.append(
                train(kind, deaths, spares=options.spares, keep_batch=options.keep_batch)
            )
            print(f"{number}: {kind} {deaths}: {endings[-1].again:.3f} s", flush=True)
        except AssertionError as error:
            bad += 1
            print(f"{number}: {kind} {deaths}: FAILED: {error}", flush=True)
    compare = differing_with_spares if whole else differing
    for each in compare(endings, 600) if endings else []:
        bad += 1
        print(f"{each.kind} {each.sizes}: DIFFERS\n{each.text}", flush=True)
    print(f"{jobs - bad} of {jobs} ended as the runs without the lost steps")
    if endings:
        again = sorted(each.again for each in endings)
        print(
            f"{sum(each.died for each in endings)} ranks killed; training again after: median "
            f"{statistics.median(again):.3f} s, at most {again[-1]:.3f} s"
        )
    return bool(bad) or not jobs


if __name__ == "__main__":
    sys.exit(main())
