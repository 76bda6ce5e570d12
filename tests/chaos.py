#!/usr/bin/env python
"""Attack hpcdist: random operations with random faults, for as long as you like.

    python tests/chaos.py --minutes 60                       an hour of everything
    python tests/chaos.py --minutes 5 --rows stops signals   some rows
    python tests/chaos.py --seed S --episode K               one episode again (same --rows, --np)

Each episode is a job under mpirun that runs a program drawn from the seed: collectives, messages,
objects, groups, windows and training with communication hooks, with ranks that come late, are
stopped, get signals, pass wrong arguments or die. Each rank writes down what came of each call;
afterwards the lines of all ranks are compared.
For each operation either all ranks that return a result return the right one, or every rank that
returns at all returns an error; every call ends within its deadline and a second; nothing crashes,
and nothing is left behind. Exits with 0 only if that was so.

mpirun is the one beside this Python, else the one on PATH.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from chaos.rows import PLANTS, ROWS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = "\n".join(f"{row.name}: {row.about}" for row in ROWS.values())
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M")
    parser.add_argument("--seed", default="", help="drawn and printed when it is not given")
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help=rows
    )
    parser.add_argument("--np", default="2,3,4", metavar="N,N", help="numbers of ranks")
    parser.add_argument("--episode", type=int, nargs="+", metavar="K", help="these alone")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of an episode")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="episodes side by side")
    parser.add_argument(
        "--slack", type=float, default=1.0, metavar="S",
        help="beyond a deadline; stretched where processes share cores",
    )  # fmt: skip
    parser.add_argument("--mpirun", metavar="PATH", help="another mpirun")
    parser.add_argument("--keep", action="store_true", help="keep the journals")
    parser.add_argument(
        "--damage", type=float, default=0.0, metavar="P", help="call results wrong, to try this"
    )
    parser.add_argument("--plant", default="", choices=PLANTS, help="a mistake, to try this")
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    ranks = [int(each) for each in options.np.split(",")]
    if options.rank:
        from chaos import program, rank

        drawn = program.episode(
            options.seed, options.episode[0], options.rows, ranks, options.seconds
        )
        rank.main(options.rank, drawn, options.damage, options.plant)
        return 0
    import run as runner
    from chaos import driver, job

    mpirun = runner.find_mpirun(options.mpirun)
    name, mpi_arguments, mpi_env = runner.mpi_arguments(mpirun)
    seed = options.seed or str(random.randrange(10**6))
    private = job.may_mount()
    settings = driver.Settings(
        seed, options.rows, ranks, options.seconds, [mpirun, *mpi_arguments],
        {**driver.environment(), **mpi_env}, private, options.slack, options.damage, options.keep,
        options.plant,
    )  # fmt: skip
    print(f"{name}, seed {seed}, rows {' '.join(options.rows)}", flush=True)
    if not private:
        print("no private /dev/shm (unshare -m is not permitted): what is left there is not seen")
    return driver.run(settings, options.episode, options.minutes, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
