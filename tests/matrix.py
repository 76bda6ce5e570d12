#!/usr/bin/env python
"""Run hpcdist with versions of torch and Python that CI does not: by hand, over the network.

    python tests/matrix.py                          torch 2.10, 2.11, 2.12 and 2.14, two MPIs
    python tests/matrix.py --torch 2.15 --mpi mpich
    python tests/matrix.py --torch 2.13 --mpi impi --parts training suite
    python tests/matrix.py --torch 2.13 --mpi impi --parts training short
    python tests/matrix.py --torch 2.13 --python python3.12 python3.14t --parts training local ranks

For each Python and torch it makes an environment with torch as pip resolves it (with CUDA's
libraries, 2.5 GB, several minutes), and for each MPI one beside it, which sees that torch. There
hpcdist, built from a copy of this tree, runs the parts: training, the bridge's programs, PyTorch's
own suite, the tests of NCCL's stand-in. A torch that has no build for a Python counts as not run.

--venvs keeps the environments in a folder, and uses those with a torch that are there already.
Exits with 0 only if something ran and nothing failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "matrix"
TORCH = ("2.10", "2.11", "2.12", "2.14")
#: Name -> command, behind the environment's programs, and its seconds at most.
PARTS = {
    "unit": ("python tests/run.py tests/torch/test_compat.py", 600),
    "training": ("mpirun -n 2 python examples/train_digits.py --epochs 5", 600),
    "bridge": ("python tests/run.py tests/torch/test_bridge.py", 1800),
    "conformance": ("python tests/conformance/run.py --bridge --np 2", 1800),
    "nccl": ("python tests/run.py --kinds standin --np 2", 1200),
}
#: Only if they are named. The suite takes about an hour on two cores.
MORE = {
    "local": ("python tests/run.py --kinds local", 1800),
    "ranks": ("python tests/run.py --kinds ranks --np 2", 3600),
    "suite": ("python tests/run.py --np 1 2 3 4", 10800),
    "short": (
        "python tests/run.py tests/collectives/test_broadcast.py tests/collectives/test_reduce.py"
        " tests/collectives/test_p2p.py tests/engine/test_agreement.py"
        " tests/groups/test_new_group.py tests/test_loader.py tests/test_libmpi.py --np 2",
        600,
    ),
}
#: What is in no copy of the tree.
LEFT_OUT = shutil.ignore_patterns(".git", "build", "*.so", "__pycache__", "*.egg-info", ".venv")
#: What a part prints about its tests: tests/run.py, and tests/conformance/run.py.
COUNTS = (
    re.compile(r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed", re.M),
    re.compile(r"^(?:bridge|native) +\d+ +(?P<passed>\d+) +(?P<failed>\d+)", re.M),
)


@dataclass
class Cell:
    """One Python with one torch and one MPI, and what came of it."""

    python: str
    torch: str
    mpi: str
    found: str = ""
    results: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        fine = ("yes", "no build")
        return any(not result.startswith(fine) for result in self.results.values())


@dataclass
class Place:
    """Where environments, the copy of the tree, wheels built from it and logs are."""

    venvs: Path
    tree: Path
    wheels: Path
    logs: Path

    def base(self, cell: Cell) -> Path:
        """The environment that has torch, for all MPIs."""
        return self.venvs / f"{Path(cell.python).name}-torch-{cell.torch}"

    def venv(self, cell: Cell) -> Path:
        """The environment that has hpcdist and an MPI."""
        return Path(f"{self.base(cell)}-{cell.mpi}")

    def wheel(self, cell: Cell) -> Path:
        """The folder of hpcdist's wheel: it depends on Python and MPI, not on torch."""
        return self.wheels / f"{Path(cell.python).name}-{cell.mpi}"

    def log(self, cell: Cell) -> Path:
        return self.logs / f"{self.venv(cell).name}.log"


def copy_tree(target: Path, folders: Collection[Path | None]) -> None:
    """Copy this tree without what git leaves out and without our own folders, wherever they are."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        ours = {name for name in names if Path(folder, name) in folders}
        return LEFT_OUT(folder, names) | ours

    shutil.copytree(ROOT, target, ignore=left_out)


def run(command: list[str], limit: float, log: Path, **more: object) -> tuple[bool, str]:
    """Run a command with its output in a file; whether it passed, and what it wrote."""
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(command)}\n".encode())
        out.flush()
        begin = out.tell()
        try:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                timeout=limit, check=False, **more,
            )  # fmt: skip
            passed = done.returncode == 0
        except (subprocess.TimeoutExpired, OSError) as error:
            out.write(f"{error}\n".encode())
            passed = False
    return passed, log.read_bytes()[begin:].decode(errors="replace")


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])


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


def asked(folder: Path, code: str) -> str:
    """What an environment's Python prints; empty if it cannot."""
    return subprocess.run(
        [str(folder / "bin" / "python"), "-c", code],
        capture_output=True, text=True, env=environment(folder), check=False,
    ).stdout.strip()  # fmt: skip


def steps(cell: Cell, place: Place) -> Iterator[tuple[str, Path, list[str]]]:
    """What makes a cell's two environments: names, environments, commands, each after the last."""
    base, venv = place.base(cell), place.venv(cell)
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    if not (base.exists() and asked(base, "import torch; print(torch.__version__)")):
        yield "venv", base, [cell.python, "-m", "venv", "--clear", str(base)]
        yield "torch", base, ["python", "-m", "pip", "install", "numpy", f"torch=={cell.torch}.*"]
    yield "venv", venv, [cell.python, "-m", "venv", "--clear", str(venv)]
    Path(asked(venv, site), "torch_of_the_base.pth").write_text(asked(base, site) + "\n")
    wheels = place.wheel(cell)
    if not wheels.exists():
        made = ["--no-deps", "-w", str(wheels), f".[{cell.mpi}]"]
        yield "build", venv, ["python", "-m", "pip", "wheel", *made]
    (built,) = wheels.glob("hpcdist-*.whl")
    yield "install", venv, ["python", "-m", "pip", "install", f"{built}[{cell.mpi},test]"]


def install(cell: Cell, place: Place) -> str:
    """Make a cell's two environments; return "yes", or why there are none."""
    for what, folder, command in steps(cell, place):
        if command[0] == "python":
            command = [str(folder / "bin" / "python"), *command[1:]]
        passed, text = run(command, 1800, place.log(cell), env=environment(folder), cwd=place.tree)
        if not passed:
            print(last_lines(text), flush=True)
            missing = "No matching distribution found for torch" in text
            return "no build" if missing else f"no ({what})"
    return "yes"


def outcome(passed: bool, text: str) -> str:
    """A part's result, with the number of its tests where it has counted them."""
    for pattern in COUNTS:
        if found := pattern.search(text):
            return f"{'yes' if passed else 'no'}: {found['passed']}, {found['failed']} failed"
    return "yes" if passed else "no"


def test(cell: Cell, parts: list[str], place: Place) -> None:
    """Fill in what comes of one cell."""
    cell.results["install"] = install(cell, place)
    if cell.results["install"] != "yes":
        return
    folder = place.venv(cell)
    version = "import torch, sys; print(f'{torch.__version__}, {sys.version.split()[0]}')"
    cell.found = asked(folder, version)
    for name in parts:
        command, limit = (PARTS | MORE)[name]
        program, *arguments = command.split()
        began = time.monotonic()
        passed, text = run(
            [str(folder / "bin" / program), *arguments], limit, place.log(cell),
            env=environment(folder), cwd=place.tree,
        )  # fmt: skip
        cell.results[name] = outcome(passed, text)
        print(f"  {name}: {cell.results[name]}, {time.monotonic() - began:.0f} s", flush=True)
        if not passed:
            print(last_lines(text), flush=True)


def table(cells: list[Cell], parts: list[str]) -> str:
    """The results, a row per cell."""
    columns = ["install", *parts]
    lines = [
        "| torch, Python | MPI | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for cell in cells:
        row = [cell.found or f"{cell.torch}, {cell.python}", cell.mpi]
        row += [cell.results.get(name, "–") for name in columns]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="tests/matrix.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="X.Y")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH")
    known = ["openmpi", "mpich", "impi"]
    parser.add_argument("--mpi", nargs="+", choices=known, default=known[:2])
    parser.add_argument("--parts", nargs="+", choices=PARTS | MORE, default=list(PARTS))
    parser.add_argument("--venvs", type=Path, metavar="FOLDER", help="keep environments there")
    parser.add_argument(
        "--logs", type=Path, default=LOGS, metavar="FOLDER", help="default: build/matrix"
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    logs = options.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    cells = []
    with tempfile.TemporaryDirectory(prefix="work-", dir=logs) as work:
        tree, wheels = Path(work, "tree"), Path(work, "wheels")
        copy_tree(tree, {logs, options.venvs and options.venvs.resolve()})
        for python, torch in itertools.product(options.python, options.torch):
            # the environments of one torch at a time: each is as large as several GB
            with tempfile.TemporaryDirectory(prefix="venvs-", dir=logs) as venvs:
                place = Place((options.venvs or Path(venvs)).resolve(), tree, wheels, logs)
                for mpi in options.mpi:
                    print(f"{python}, torch {torch}, {mpi}", flush=True)
                    cells.append(Cell(python, torch, mpi))
                    test(cells[-1], options.parts, place)
    print(f"\n{table(cells, options.parts)}\n\nlogs: {logs}")
    failed = sum(cell.failed for cell in cells)
    passed = sum(cell.results["install"] == "yes" and not cell.failed for cell in cells)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
