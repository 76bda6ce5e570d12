#!/usr/bin/env python
"""Write the outcomes over gloo, bridge and native module as one table.

    python tests/conformance/run.py --gloo --bridge --native --quiet --save outcomes.json
    mpirun -n 4 python tests/conformance/suites/compared.py --save outcomes.json
    python tests/conformance/side_by_side.py outcomes.json > tests/conformance/side_by_side.md

The table counts, and names each test that has not the same outcome on all sides.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from expected import Table

SIDES = ("gloo", "bridge", "native")
KINDS = ("passed", "failed", "crashed", "skipped")
#: A side's outcomes: of each test its kind and the suite's reason.
Outcomes = Mapping[str, tuple[str, str]]
#: How the suite's decorators ask for GPUs, or for NCCL.
ASKS = re.compile(r"skip_if_(no_gpu|lt_x_gpu)|require_n_gpus|BACKEND != 'nccl'|requires?_\w+.*nccl")


def of_gpus() -> set[str]:
    """Give the names of the tests that ask for GPUs or NCCL."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    suite = Path(torch.origin).parent / "testing/_internal/distributed/distributed_test.py"
    tree = ast.parse(suite.read_text())  # it cannot be imported outside of a job
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ASKS.search(ast.unparse(each)) for each in node.decorator_list)
    }


def counts(sides: Mapping[str, Outcomes], tests: list[str]) -> list[str]:
    """Give the rows of a table of outcomes, a column for each side."""
    rows = ["| | gloo | bridge | native |", "|---|---|---|---|"]
    for kind in KINDS:
        found = [sum(sides[side][test][0] == kind for test in tests) for side in SIDES]
        rows.append(f"| {kind} | " + " | ".join(map(str, found)) + " |")
    return rows


def differing(sides: Mapping[str, Outcomes], table: Table, np: int) -> list[str]:
    """Give a row for each test that does not end the same on all sides, with the reasons."""
    why = {
        (side, entry.test): entry.why
        for side in SIDES
        for entry in table.entries
        if entry.holds(side, np)
    }
    rows = ["| test | gloo | bridge | native | why |", "|---|---|---|---|---|"]
    for test in sides["bridge"]:
        kinds = [sides[side][test][0] for side in SIDES]
        if len(set(kinds)) > 1:
            reasons = {why.get((side, test)) for side in ("bridge", "native")} - {None}
            of_gloo = sides["gloo"][test][1][:110].replace("|", "/")
            said = "; ".join(sorted(map(str, reasons))) or f"gloo: {of_gloo}"
            rows.append(f"| `{test}` | " + " | ".join(kinds) + f" | {said} |")
    return rows


def of_suites(outcomes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Give the rows for hpcdist's own suites: how many of a suite's cases a side passes."""
    rows = ["| suite | gloo | bridge | native |", "|---|---|---|---|"]
    for suite in dict.fromkeys(name.split(".")[0] for side in SIDES for name in outcomes[side]):
        cells = []
        for side in SIDES:
            kinds = [k for name, k in outcomes[side].items() if name.split(".")[0] == suite]
            cells.append(f"{kinds.count('passed')} of {len(kinds)}" if kinds else "-")
        rows.append(f"| {suite} | " + " | ".join(cells) + " |")
    return rows


def page(saved: Mapping[str, Mapping[str, Outcomes]], table: Table) -> str:
    """Give the whole document."""
    lines = [
        "# PyTorch's suite over gloo, bridge and native module",
        "",
        f"Written by `side_by_side.py` with torch {version('torch')}; see [README.md](README.md).",
    ]
    asks = of_gpus()
    for np, sides in saved.items():
        if np == "suites":
            continue
        tests = list(sides["bridge"])
        freed = [test for test in tests if test in asks]
        lines += ["", f"## {np} ranks: all {len(tests)} tests", "", *counts(sides, tests)]
        lines += ["", f"## {np} ranks: the {len(freed)} tests that ask for GPUs or NCCL", ""]
        lines += ["They run on CPU tensors here.", "", *counts(sides, freed)]
        lines += ["", f"## {np} ranks: where they differ", "", *differing(sides, table, int(np))]
    for np, outcomes in saved.get("suites", {}).items():
        lines += ["", f"## {np} ranks: hpcdist's own suites", ""]
        lines += ["A case passes if its results are gloo's; a dash: torch's own groups only.", ""]
        lines += of_suites(outcomes)  # type: ignore[arg-type]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    table = Table.read(Path(__file__).with_name("expected.txt"))
    print(page(json.loads(Path(sys.argv[1]).read_text()), table), end="")
