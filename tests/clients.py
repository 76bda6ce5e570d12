"""Run the programs of examples/clients over hpcdist and over gloo, and compare their numbers.

    pip install -e ".[clients]"
    python tests/clients.py
    python tests/clients.py --scripts
    python tests/clients.py llama fabric
    python tests/clients.py --torchrun hf_trainer

With --scripts it runs those of tests/torch/scripts that torchrun starts, which need torch alone.
Each program runs twice, unchanged: under torchrun over gloo, and under this environment's mpirun
with HPCDIST_TAKE_OVER; with --torchrun, for which it takes MPICH, the second time under torchrun
too. It prints lines ``number NAME VALUE``, and all of them have to be equal. The exit status is 0
if every program ran and every number was. A missing package is an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "support"))

from jobs import mpirun_command, plain_environment  # noqa: E402


class Client(NamedTuple):
    """A program, and what it needs.

    Two ranks add two numbers, which gives the same bits in any order: no tolerance.
    """

    program: Path
    packages: tuple[str, ...] = ("torch",)
    ranks: int = 2
    tolerance: float = 0.0


_EXAMPLES = TESTS.parent / "examples" / "clients"
CLIENTS = {
    "lightning_trainer": Client(_EXAMPLES / "lightning_trainer.py", ("lightning",)),
    "fabric": Client(_EXAMPLES / "fabric.py", ("lightning",)),
    "accelerate_loop": Client(_EXAMPLES / "accelerate_loop.py", ("accelerate",)),
    "hf_trainer": Client(_EXAMPLES / "hf_trainer.py", ("transformers", "accelerate")),
    "resnet50": Client(_EXAMPLES / "resnet50.py"),
    "deepspeed_zero": Client(_EXAMPLES / "deepspeed_zero.py", ("deepspeed",)),
    "llama": Client(_EXAMPLES / "llama.py", ("torch",), 4, 1e-5),
}
SCRIPTS = {
    path.stem: Client(path)
    for path in sorted((TESTS / "torch" / "scripts").glob("*.py"))
    if "multiprocessing" not in path.read_text()
}
_LIMIT = 600.0


def run(command: list[str], env: dict[str, str]) -> tuple[bool, str]:
    """Run a command; whether it passed, and what it printed."""
    try:
        done = subprocess.run(
            command, env=env, text=True, errors="replace", timeout=_LIMIT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return False, f"{error}\n{(error.stdout or b'').decode(errors='replace')}"
    return done.returncode == 0, done.stdout


def numbers(text: str) -> dict[str, float]:
    """What a program printed."""
    # two ranks may print into one line
    found = re.findall(r"number (\S+) (nan|-?[\d.]+(?:e[+-]\d+)?)", text)
    return {name: float(value) for name, value in found}


def differing(one: dict[str, float], other: dict[str, float], tolerance: float) -> list[str]:
    """Names of the numbers that are not equal, or that one side lacks."""
    return [
        f"{name}: gloo {one.get(name)}, hpcdist {other.get(name)}"
        for name in {**one, **other}
        if name not in one
        or name not in other
        or not abs(one[name] - other[name]) <= tolerance * abs(one[name])  # NaN differs
    ]


def compare(client: Client, under_torchrun: bool, extensions: str) -> str:
    """Run a program over both; what was wrong, or nothing."""
    ranks = client.ranks
    program = str(client.program)
    # DeepSpeed waits without end for the lock that a killed compilation left in the user's folder
    plain = plain_environment(
        GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1", TORCH_EXTENSIONS_DIR=extensions
    )
    plain.pop("HPCDIST_TAKE_OVER", None)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    passed, text = run([*torchrun, program], plain)
    one = numbers(text)
    if not passed or not one:
        return f"over gloo it failed:\n{text}"
    env = {**plain, "HPCDIST_TAKE_OVER": "gloo,mpi"}
    if under_torchrun:
        passed, text = run([*torchrun, program], env)
    else:
        command, env = mpirun_command(ranks, env)
        passed, text = run([*command, sys.executable, program], env)
    if not passed or "hpcdist" not in text:
        return f"over hpcdist it failed:\n{text}"
    wrong = differing(one, numbers(text), client.tolerance)
    return "the numbers differ:\n" + "\n".join(wrong) if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/clients.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scripts", action="store_true", help="those of tests/torch/scripts")
    parser.add_argument("--torchrun", action="store_true", help="in place of mpirun")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join({**CLIENTS, **SCRIPTS}))
    options = parser.parse_args()
    known = {**CLIENTS, **SCRIPTS}
    names = options.names or list(SCRIPTS if options.scripts else CLIENTS)
    if unknown := set(names) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    failed = 0
    for name in names:
        packages = known[name].packages
        try:
            versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
        except importlib.metadata.PackageNotFoundError as error:
            print(f"{name}: {error.name} is not installed: pip install -e '.[clients]'", flush=True)
            failed += 1
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as extensions:
            wrong = compare(known[name], options.torchrun, extensions)
        failed += bool(wrong)
        seconds = time.monotonic() - began
        result = f"FAILED, {wrong}" if wrong else "equal to gloo"
        print(f"{name} ({', '.join(versions)}): {result} ({seconds:.0f} s)", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
