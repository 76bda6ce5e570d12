#!/usr/bin/env python
"""Injects hangs and mismatches, each in a job of its own, and counts those that are explained.

    python tests/recordings/fifty.py              51 jobs: each kind of hangs.py three times
    python tests/recordings/fifty.py --rounds 1

Explained means: without any setting, the error on rank 0 names rank 1, the operation, its number
and the line, and the text of the job has the line where rank 1 is. Run it once with each MPI. Exits
with 0 only if all were.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from hangs import KINDS  # noqa: E402
from jobs import run_job  # noqa: E402
from test_reports import PROGRAM, names_everything  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that each kind is injected")
    options = parser.parse_args()
    explained = 0
    for _ in range(options.rounds):
        for kind in KINDS:
            ended = run_job(2, str(PROGRAM), kind, limit=90)
            try:
                assert ended.code == 0, ended.text
                names_everything(ended.text, kind, ended.text)
                explained += 1
            except AssertionError as error:
                print(f"{kind}: {error}", flush=True)
    print(f"{explained} of {options.rounds * len(KINDS)} explained")
    return explained != options.rounds * len(KINDS)


if __name__ == "__main__":
    sys.exit(main())
