#!/usr/bin/env python
"""Injects hangs and mismatches, each in a job of its own, and counts those that are explained.

    python tests/recordings/fifty.py                    each kind of hangs.py three times: 51 jobs
    python tests/recordings/fifty.py --over bridge      those of hangs_bridge.py, over stock torch
    python tests/recordings/fifty.py --over nccl        those of hangs_nccl.py, over NCCL's stand-in
    python tests/recordings/fifty.py --rounds 1

Explained means: without any other setting, the error on rank 0 names rank 1, the operation, its
number and the line, and the text of the job has the line where rank 1 is; and ``analyze`` names the
first divergence of the recorders that the ranks leave behind (HPCDIST_DUMP, which says where). Run
it once with each MPI. Exits with 0 only if all were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import hangs  # noqa: E402
import hangs_bridge  # noqa: E402
import hangs_nccl  # noqa: E402
from jobs import run_job  # noqa: E402
from test_reports import names_everything  # noqa: E402

OVER = {"mpi": hangs, "bridge": hangs_bridge, "nccl": hangs_nccl}


def analyzed(folder: str, kind: str) -> None:
    """The divergence that ``analyze`` finds is the call that was made go wrong."""
    command = [sys.executable, "-m", "hpcdist", "analyze", folder, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, (done.returncode, done.stdout, done.stderr)
    first = json.loads(done.stdout)["divergences"][0]
    assert any(f" in {kind}" in one["call"] for one in first["calls"]), first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that each kind is injected")
    parser.add_argument(
        "--over", choices=OVER, default="mpi", help="what the program is written for"
    )
    options = parser.parse_args()
    module = OVER[options.over]
    program = Path(str(module.__file__))
    explained = 0
    for _ in range(options.rounds):
        for kind in module.KINDS:
            with tempfile.TemporaryDirectory() as folder:
                ended = run_job(2, str(program), kind, limit=90, env={"HPCDIST_DUMP": folder})
                try:
                    assert ended.code == 0, ended.text
                    names_everything(ended.text, kind, program)
                    if kind not in ("no_send", "no_receive"):  # messages have no number to compare
                        analyzed(folder, kind)
                    explained += 1
                except AssertionError as error:
                    print(f"{kind}: {error}", flush=True)
    print(f"{explained} of {options.rounds * len(module.KINDS)} explained")
    return explained != options.rounds * len(module.KINDS)


if __name__ == "__main__":
    sys.exit(main())
