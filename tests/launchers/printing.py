"""The program of test_lines.py: every rank prints many lines, piece by piece, to both streams."""

from __future__ import annotations

import os
import sys

LINES = 400


def print_lines(rank: int) -> None:
    """Of 80 and of 3,000 characters."""
    for line in range(LINES):
        filling = "x" * (3000 if line % 50 == 0 else 40)
        print("rank", rank, "line", line, "of", filling, "end")
        print("rank", rank, "error", line, "of", filling, "end", file=sys.stderr)


def main(rank: int) -> None:
    print_lines(rank)
    environment = (os.environ.get(name, "-") for name in ("PYTHONUNBUFFERED", "PYTHONPATH"))
    print("rank", rank, "has", *environment, sum("launchers/lines" in p for p in sys.path))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import hpcdist

        hpcdist.spawn(main, nprocs=2)
    else:
        main(int(os.environ["RANK"]))
