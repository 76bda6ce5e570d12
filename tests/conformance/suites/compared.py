#!/usr/bin/env python
"""Compare torch.distributed over the bridge, and hpcdist, with torch.distributed over gloo.

    mpirun -n 4 python tests/conformance/suites/compared.py [--only TEXT] [SUITE ...]

The suites cover what the tests do that PyTorch does not ship in its wheel. Every case runs over
each side in one process; its results, an exception among them, are compared with gloo's on the
same rank. Rank 0 prints a line for each case and side, and the counts. Exits with 0 if nothing
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "torch")]
sys.path.append(str(HERE.parents[1] / "support"))

import torch  # noqa: E402
from sides import Bridge, Gloo, Native  # noqa: E402
from suite import Agreement, say  # noqa: E402
from trees import compare  # noqa: E402
from worlds import Case, World  # noqa: E402

SUITES = (
    "stores", "spawned", "joined", "hooks", "zero", "mesh", "functional_api", "checkpoint",
    "tensor_parallel",
)  # fmt: skip
SIDES = ("gloo", "bridge", "native")
#: Seconds for one case, and the timeout of the default groups.
DEADLINE, TIMEOUT = 60.0, 20.0


class Failure(str):
    """A traceback in place of results."""


def start(side: str) -> None:
    if side == "gloo":
        Gloo().start("", TIMEOUT)
    elif side == "native":
        Native().start("", TIMEOUT)
    else:
        import hpcdist.torch

        hpcdist.torch.init_process_group(timeout=timedelta(seconds=TIMEOUT))


def stop(side: str) -> None:
    (Native if side == "native" else Bridge)().stop()


def run_one(case: Case, world: World) -> Any:
    """Give a case's results, or the traceback of its error."""
    torch.manual_seed(17)
    os.makedirs(world.folder, exist_ok=True)
    try:
        return case.run(world)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # torch's CheckpointException is no Exception
        return Failure(traceback.format_exc())


def problem(result: Any, reference: Any) -> str:
    """Say what is wrong with a side's results; nothing if they are gloo's."""
    if isinstance(result, Failure):
        return str(result)
    if isinstance(reference, Failure) or reference is None:
        return ""
    try:
        compare(result, reference)
    except AssertionError as error:
        return str(error)
    return ""


class Suites:
    """The cases over one side after the other.

    Parameters
    ----------
    cases : dict
        By their names with the suites'.
    agreement : Agreement
        By which the ranks compare outcomes.
    folder : str
        That all ranks see.
    """

    def __init__(self, cases: dict[str, Case], agreement: Agreement, folder: str) -> None:
        self.cases, self.agreement, self.folder = cases, agreement, folder
        self.reference: dict[str, Any] = {}
        self.outcomes: dict[str, dict[str, str]] = {side: {} for side in SIDES}

    def run_side(self, side: str) -> None:
        """Run the cases, in a new default group after each one that failed."""
        started = False
        for name, case in self.cases.items():
            if side not in case.sides or case.least > self.agreement.size:
                continue
            if not started:
                start(side)
            started = self.passes(side, name, case)
            if not started:
                with contextlib.suppress(Exception):
                    stop(side)
        if started:
            stop(side)

    def passes(self, side: str, name: str, case: Case) -> bool:
        """Run a case, and print how it ended."""
        from hpcdist.testing import deadline

        agreement = self.agreement
        world = World(side, agreement.rank, agreement.size, os.path.join(self.folder, side, name))
        began = time.monotonic()
        with deadline(DEADLINE, f"{name} over {side}"):
            result = run_one(case, world)
            found = agreement.texts(problem(result, self.reference.get(name))[-3000:])
        if side == "gloo":
            self.reference[name] = Failure() if any(found) else result
        wrong = [f"[{rank}] {text}" for rank, text in enumerate(found) if text]
        kind = "failed" if wrong else "passed"
        self.outcomes[side][name] = kind
        if agreement.rank == 0:
            say(f"{kind} {time.monotonic() - began:6.2f} s  {side:7} {name}")
            for text in wrong:
                say(text)
        return not wrong

    def count(self, side: str, kind: str) -> int:
        return list(self.outcomes[side].values()).count(kind)


def save(outcomes: dict[str, dict[str, str]], ranks: int, path: Path) -> None:
    """Add the outcomes to a file, as run.py does."""
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved.setdefault("suites", {})[str(ranks)] = outcomes
    path.write_text(json.dumps(saved, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=list(SUITES))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--save", type=Path, metavar="FILE", help="add the outcomes to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    agreement = Agreement()
    made = tempfile.mkdtemp(prefix="hpcdist-suites.") if agreement.rank == 0 else ""
    folder = agreement.texts(made)[0]
    cases = {
        f"{suite}.{name}": case
        for suite in options.suites
        for name, case in importlib.import_module(suite).CASES.items()
        if options.only in name
    }
    suites = Suites(cases, agreement, folder)
    try:
        for side in SIDES:
            suites.run_side(side)
        if agreement.rank == 0:
            for side in SIDES:
                passed, failed = suites.count(side, "passed"), suites.count(side, "failed")
                say(f"{side}: {passed} passed, {failed} failed")
            if options.save:
                save(suites.outcomes, agreement.size, options.save)
        return int(any(suites.count(side, "failed") for side in SIDES))
    finally:
        agreement.texts("")
        if agreement.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
