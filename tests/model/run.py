#!/usr/bin/env python
"""Check the models of the engine's protocols with SPIN: every order of every step.

    python tests/model/run.py               the sizes that CI checks
    python tests/model/run.py --long        larger ones: gigabytes and minutes
    python tests/model/run.py -k check      those whose name has "check"

A model is checked in some sizes, in which no assertion may fail, and with mutations, in each of
which one must: they show that the checker can find what it looks for. Needs `spin` and `gcc`.
Exits with 0 only if everything came out as it should.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Seconds for one check.
LIMIT = 3600
#: The verifier that SPIN writes: safety only, states compressed without loss.
FLAGS = ["-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=1024"]


@dataclass(frozen=True)
class Model:
    """A Promela file with the definitions it is checked with."""

    name: str
    sizes: tuple[str, ...]
    long: tuple[str, ...]
    mutations: tuple[str, ...]


MODELS = (
    Model(
        name="check",
        sizes=(
            "RANKS=2 CHECKS=5 PASSES=5",
            "RANKS=3 CHECKS=3 PASSES=1",
            "RANKS=4 CHECKS=2 PASSES=0",
        ),
        long=("RANKS=3 CHECKS=4 PASSES=1", "RANKS=4 CHECKS=3 PASSES=0"),
        mutations=(
            "RANKS=2 CHECKS=3 PASSES=0 EARLY",
            "RANKS=3 CHECKS=3 PASSES=0 FORGET",
            "RANKS=3 CHECKS=3 PASSES=1 BLIND",
            "RANKS=2 CHECKS=3 PASSES=0 LATE",
        ),
    ),
    Model(
        name="check_mpi",
        sizes=(
            "RANKS=2 CHECKS=4 PASSES=4",
            "RANKS=3 CHECKS=3 PASSES=1",
            "RANKS=4 CHECKS=1 PASSES=1",
            "RANKS=4 CHECKS=1 PASSES=1 NEVER",
            "RANKS=2 CHECKS=4 PASSES=2 FAST=9",
            "RANKS=2 CHECKS=3 PASSES=3 FAST=2",
            "RANKS=3 CHECKS=2 PASSES=1 FAST=9",
        ),
        long=(
            "RANKS=3 CHECKS=4 PASSES=2",
            "RANKS=4 CHECKS=2 PASSES=1",
            "RANKS=3 CHECKS=3 PASSES=0 FAST=9",
        ),
        mutations=(
            "RANKS=2 CHECKS=1 PASSES=0 ONCE",
            "RANKS=2 CHECKS=2 PASSES=0 LATER",
            "RANKS=2 CHECKS=1 PASSES=0 FICKLE",
            "RANKS=4 CHECKS=1 PASSES=0 NEVER MUTE",
            "RANKS=2 CHECKS=2 PASSES=0 FAST=9 APART",
            "RANKS=2 CHECKS=3 PASSES=2 FAST=9 LAST",
            "RANKS=2 CHECKS=2 PASSES=0 FAST=9 LATER",
        ),
    ),
    Model(
        name="check_nodes",
        sizes=(
            "NODES=2 EACH=2 CHECKS=1 PASSES=1",
            "NODES=2 EACH=2 CHECKS=2 PASSES=0",
            "NODES=1 EACH=3 CHECKS=3 PASSES=1",
            "NODES=1 EACH=2 CHECKS=4 PASSES=4",
            "NODES=2 EACH=2 CHECKS=2 PASSES=0 FAST",
            "NODES=1 EACH=3 CHECKS=3 PASSES=0 FAST",
        ),
        long=("NODES=2 EACH=2 CHECKS=2 PASSES=1", "NODES=1 EACH=4 CHECKS=2 PASSES=1"),
        mutations=(
            "NODES=2 EACH=2 CHECKS=1 PASSES=0 EAGER",
            "NODES=2 EACH=2 CHECKS=1 PASSES=0 HASTY",
            "NODES=1 EACH=3 CHECKS=2 PASSES=0 VERDICT",
            "NODES=1 EACH=3 CHECKS=2 PASSES=0 TWICE",
            "NODES=1 EACH=2 CHECKS=2 PASSES=2 FORGOT",
            "NODES=2 EACH=2 CHECKS=2 PASSES=0 FAST TORN",
        ),
    ),
    Model(
        name="node",
        sizes=(
            "R=2 OPS=3 PIECES=2 CHECKED=1",
            "R=2 OPS=3 PIECES=2 CHECKED=0",
            "R=3 OPS=2 PIECES=2 CHECKED=1",
            "R=3 OPS=2 PIECES=2 CHECKED=0",
            "R=4 OPS=1 PIECES=1 CHECKED=1",
            "R=2 OPS=3 PIECES=3 CHECKED=1 SLOTS=1",
            "R=2 OPS=3 PIECES=3 CHECKED=0 SLOTS=1",
            "R=3 OPS=2 PIECES=2 CHECKED=1 SLOTS=1",
        ),
        long=("R=4 OPS=2 PIECES=1 CHECKED=1", "R=4 OPS=2 PIECES=1 CHECKED=0"),
        mutations=(
            *(f"R=2 OPS=2 PIECES=2 CHECKED=0 MUTANT={n}" for n in range(1, 8)),
            *(f"R=2 OPS=3 PIECES=3 CHECKED=0 SLOTS=1 MUTANT={n}" for n in (1, 3, 4, 5, 6)),
        ),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What the verifier said."""

    errors: int
    states: int
    complete: bool
    text: str


def verify(model: Model, defines: str) -> Outcome:
    """Check one model in one size.

    Parameters
    ----------
    model : Model
        Which.
    defines : str
        What the preprocessor is given, separated by blanks.

    Returns
    -------
    Outcome
    """
    with tempfile.TemporaryDirectory() as folder:
        macros = [f"-D{define}" for define in defines.split()]
        source = str(HERE / f"{model.name}.pml")
        for command in (["spin", "-a", *macros, source], ["gcc", *FLAGS, "-o", "pan", "pan.c"]):
            made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if made.returncode or not Path(folder, "pan.c").exists():
                sys.exit(f"{' '.join(command)} failed:\n{made.stdout}{made.stderr}")
        # A rank that waits for one that never comes is no error, except where NEVER asks for that.
        ends = [] if "NEVER" in defines else ["-E"]
        text = subprocess.run(
            ["./pan", *ends, "-m2000000", "-w24"],
            cwd=folder, capture_output=True, text=True, timeout=LIMIT,
        ).stdout  # fmt: skip
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+(?:\.\d+)?(?:e\+\d+)?) states, stored", text)
    complete = "Search not completed" not in text and "error: max search depth" not in text
    if not errors or not states:
        sys.exit(f"{model.name} {defines}: the verifier did not finish:\n{text}")
    return Outcome(int(errors[1]), int(float(states[1])), complete, text)


def check_all(models: tuple[Model, ...], long: bool) -> Iterator[str]:
    """Check sizes and mutations, print a line for each, and yield what went wrong."""
    for model in models:
        sizes = [(size, False) for size in (*model.sizes, *(model.long if long else ()))]
        for defines, mutated in [*sizes, *((mutation, True) for mutation in model.mutations)]:
            began = time.monotonic()
            found = verify(model, defines)
            right = found.errors > 0 if mutated else found.errors == 0 and found.complete
            wanted = "caught" if mutated else "holds"
            print(
                f"{model.name:10s} {defines:36s} {found.states:12,d} states "
                f"{time.monotonic() - began:6.1f} s  {wanted if right else 'FAILED'}",
                flush=True,
            )
            if not right:
                yield f"{model.name} {defines}:\n{found.text}"


def main() -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--long", action="store_true", help="larger sizes, too")
    parser.add_argument("-k", metavar="TEXT", default="", help="models whose name has TEXT")
    options = parser.parse_args()
    missing = [tool for tool in ("spin", "gcc") if not shutil.which(tool)]
    if missing:
        sys.exit(f"tests/model/run.py needs {' and '.join(missing)}: apt-get install -y spin gcc")
    models = tuple(model for model in MODELS if options.k in model.name)
    if not models:
        sys.exit(f"no model's name has {options.k!r}: {', '.join(m.name for m in MODELS)}")
    failures = list(check_all(models, options.long))
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
