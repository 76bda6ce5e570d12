#!/usr/bin/env python
"""Run hpcdist with versions of torch and Python that CI does not: by hand, over the network.

    python tests/matrix.py                              torch 2.10, 2.11, 2.12 and 2.14, Open MPI
    python tests/matrix.py --torch 2.15 --mpi mpich     another version, another MPI
    python tests/matrix.py --torch 2.13 --mpi impi --parts training suite     Intel MPI, all tests
    python tests/matrix.py --torch 2.13 --mpi impi --parts training short     and its short form
    python tests/matrix.py --torch 2.13 --python python3.12 python3.14t

For each it makes an empty environment, installs torch as pip resolves it (with CUDA's libraries,
2.5 GB, several minutes), builds hpcdist from a copy of this tree, and runs training, the bridge's
programs, PyTorch's own suite and the tests of NCCL's stand-in. A version of torch that has no build
for a Python is told and counts as not run. Exits with 0 only if something ran and nothing failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = ("2.10", "2.11", "2.12", "2.14")
#: Name -> command, behind the environment's Python or mpirun, and its seconds at most.
PARTS = {
    "unit": (["python", "-m", "pytest", "-q", "tests/torch/test_compat.py"], 600),
    "training": (["mpirun", "-n", "2", "python", "examples/train_digits.py"], 600),
    "bridge": (["python", "-m", "pytest", "-q", "tests/torch/test_bridge.py"], 1800),
    "conformance": (["python", "tests/conformance/run.py", "--bridge", "--np", "2"], 1800),
    "nccl": (
        [
            "mpirun",
            "-n",
            "2",
            "python",
            "-m",
            "pytest",
            "-q",
            "--with-mpi",
            "-m",
            "standin",
            "tests/backends",
        ],
        1200,
    ),
}
#: Only if they are named. The suite takes about an hour on two cores.
NAMED = {
    "suite": (["python", "tests/run.py", "--np", "1", "2", "3", "4"], 7200),
    "short": (
        [
            "python",
            "tests/run.py",
            *("--np", "2"),
            *(f"tests/collectives/test_{name}.py" for name in ("broadcast", "reduce", "p2p")),
            *("tests/engine/test_agreement.py", "tests/groups/test_new_group.py"),
            *("tests/test_loader.py", "tests/test_libmpi.py"),
        ],
        600,
    ),
}
#: What is in no copy of the tree.
LEFT_OUT = shutil.ignore_patterns(".git", "build", "*.so", "__pycache__", "*.egg-info", ".venv")


@dataclass
class Cell:
    """One Python with one torch, and what came of it."""

    python: str
    torch: str
    found: str = ""
    results: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(result not in ("yes", "no build") for result in self.results.values())


def run(command: list[str], limit: float, log: Path, **more: object) -> tuple[bool, str]:
    """Run a command with its output in a file; whether it passed, and its last lines."""
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode())
        out.flush()
        try:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                timeout=limit, check=False, **more,
            )  # fmt: skip
            passed = done.returncode == 0
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            out.write(f"{error}\n".encode())
            passed = False
    return passed, "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def environment(folder: Path) -> dict[str, str]:
    """As after ``activate``, and nothing of the caller's that chooses an MPI."""
    ours = {"HPCDIST_MPI", "HPCDIST_MPICC", "MPICC", "PYTHONPATH"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"VIRTUAL_ENV": str(folder), "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{folder / 'bin'}{os.pathsep}{env['PATH']}"}
    # containers run as root, which Open MPI refuses unless told twice; more ranks than cores
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    env |= {"I_MPI_PIN": "off"}
    return env


def test(cell: Cell, mpi: str, parts: list[str], work: Path) -> None:
    """Fill in what comes of one cell."""
    folder, tree = work / "venv", work / "tree"
    log = work.parent / f"{Path(cell.python).name}-torch-{cell.torch}-{mpi}.log"
    env = environment(folder)
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    for what, command in (
        ("venv", [cell.python, "-m", "venv", str(folder)]),
        ("torch", ["pip", "install", f"torch=={cell.torch}.*"]),
        ("hpcdist", ["pip", "install", f".[{mpi},test]"]),
    ):
        inside = command if what == "venv" else [str(folder / "bin" / "python"), "-m", *command]
        passed, last = run(inside, 1800, log, env=env, cwd=tree)
        if not passed:
            missing = "No matching distribution found for torch" in last
            cell.results["install"] = "no build" if missing else f"no ({what})"
            print(last, flush=True)
            return
    cell.results["install"] = "yes"
    # the tests import what is installed, never the unbuilt tree
    shutil.rmtree(tree / "hpcdist")
    version = "import torch, sys; print(torch.__version__, sys.version.split()[0])"
    python = str(folder / "bin" / "python")
    cell.found = subprocess.run(
        [python, "-c", version], capture_output=True, text=True, env=env, check=False
    ).stdout.strip()
    for name in parts:
        command, limit = (PARTS | NAMED)[name]
        began = time.monotonic()
        passed, last = run([str(folder / "bin" / command[0]), *command[1:]], limit, log,
                           env=env, cwd=tree)  # fmt: skip
        cell.results[name] = "yes" if passed else "no"
        print(f"  {name}: {cell.results[name]}, {time.monotonic() - began:.0f} s", flush=True)
        if not passed:
            print(last, flush=True)


def table(cells: list[Cell], parts: list[str]) -> str:
    """What docs/support.md shows."""
    columns = ["install", *parts]
    lines = ["| torch, Python | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for cell in cells:
        shown = [cell.results.get(name, "–") for name in columns]
        lines.append(
            f"| {cell.found or f'{cell.torch}, {cell.python}'} | " + " | ".join(shown) + " |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/matrix.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="X.Y")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH")
    parser.add_argument("--mpi", choices=["openmpi", "mpich", "impi"], default="openmpi")
    parser.add_argument("--parts", nargs="+", choices=PARTS | NAMED, default=list(PARTS))
    parser.add_argument("--logs", type=Path, default=Path("matrix-logs"), metavar="FOLDER")
    options = parser.parse_args()
    logs = options.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    cells = [Cell(python, torch) for python in options.python for torch in options.torch]
    for cell in cells:
        print(f"{cell.python}, torch {cell.torch}, {options.mpi}", flush=True)
        with tempfile.TemporaryDirectory(prefix="cell-", dir=logs) as work:
            test(cell, options.mpi, options.parts, Path(work))
    print(f"\n{table(cells, options.parts)}\n\nlogs: {logs}")
    ran = sum(cell.results.get("install") == "yes" for cell in cells)
    failed = sum(cell.failed for cell in cells)
    print(f"{ran - failed} passed, {failed} failed", flush=True)
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
