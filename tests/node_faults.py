#!/usr/bin/env python
"""Faults between two nodes that are namespaces: killed and stopped ranks, links that are cut.

    sudo python tests/node_faults.py                                  each fault with each operation
    sudo python tests/node_faults.py --faults cut down --operations large start
    sudo python tests/node_faults.py --rounds 5 --seed 7

A line for each case: the latest error after its deadline (T + s), the end of the last rank after
the fault, and how long daemons of launchers stayed after that; what was not as docs/reliability.md
says, and then what the job printed. mpirun is the one beside this Python. Needs root, iproute2 and
util-linux.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "nodes")]

from faults import FAULTS, OPERATIONS, Case, is_possible, run  # noqa: E402
from link import pair  # noqa: E402
from nodes import missing  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="FAULT",
                        help=", ".join(FAULTS))  # fmt: skip
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS,
                        metavar="OPERATION", help=", ".join(OPERATIONS))  # fmt: skip
    parser.add_argument("--per-node", nargs="+", type=int, choices=(1, 2), default=(1, 2),
                        help="ranks of a node, drawn from these")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    if lacking := missing():
        sys.exit(f"node_faults.py: {lacking}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    rng = random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    bad = total = 0
    with pair() as nodes:
        for _ in range(options.rounds):
            for fault in options.faults:
                for operation in options.operations:
                    if not is_possible(nodes.mpirun, fault, operation):
                        continue
                    case = Case(fault, operation, rng.choice(options.per_node),
                                rng.choice(("raise", "catch")))  # fmt: skip
                    found = run(nodes, case, rng)
                    total += 1
                    bad += bool(found.problems)
                    print(f"{fault:<10}{operation:<14} 2 x {case.per_node} {case.end:<6}"
                          f" T + {found.error:5.2f} s, end {found.end:6.2f} s, daemons"
                          f" {found.daemons:5.2f} s  {'; '.join(found.problems) or 'passed'}",
                          flush=True)  # fmt: skip
                    if found.problems:
                        print(found.text, flush=True)
    print(f"{total - bad} of {total} passed", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
