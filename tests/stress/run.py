#!/usr/bin/env python
"""Stress the engine's C files without MPI and Python: random stops, short timeouts, sanitizers.

    python tests/stress/run.py                    all programs and variants, some seconds each
    python tests/stress/run.py -k check --long    those whose name has "check", in their long form
    python tests/stress/run.py --variants plain tsan
    python tests/stress/run.py --seed 7           repeats a run, as far as the scheduler does

Each program is compiled from the files that hpcdist is built from and is called with the seed and
its arguments. It ends with a line of counts and 0, or says what went wrong. A program with a
mutation is compiled with a mistake in it, and passes if it finds that. One with a delay is compiled
with a pause that a busy machine may make, and passes as without. `aarch64` is compiled by the cross
compiler and runs in qemu. Exits with 0 only if all ran and none failed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from programs import FLAGS, INCLUDES, PROGRAMS, ROOT, VARIANTS, Program


def sources_of(program: Program) -> list[Path]:
    """Return the files of a program; a pattern without a file is an error."""
    found: list[Path] = []
    for pattern in program.sources:
        files = sorted(ROOT.glob(pattern))
        if not files:
            sys.exit(f"tests/stress/run.py: {program.name}: there is no {pattern}")
        found += files
    return found


def change(program: Program, sources: list[Path], folder: Path) -> list[Path]:
    """Replace the file that the mutation or the delay is about by a copy that has it."""
    changed = program.mutation or program.delay
    assert changed is not None
    name, old, new = changed
    text = (ROOT / name).read_text()
    if text.count(old) != 1:
        sys.exit(f"tests/stress/run.py: {program.name}: {name} does not have {old!r} once")
    copy = folder / f"{program.name}-{Path(name).name}"
    copy.write_text(text.replace(old, new))
    return [copy if path == ROOT / name else path for path in sources]


def compile_one(program: Program, name: str, folder: Path) -> Path:
    """Compile a program in one variant and return where it is."""
    variant = VARIANTS[name]
    out = folder / f"{program.name}-{name}"
    command = [variant.compiler, *FLAGS, *variant.flags, *program.flags]
    command += [f"-I{ROOT / include}" for include in INCLUDES]
    sources = sources_of(program)
    if program.mutation or program.delay:
        sources = change(program, sources, folder)
        command += ["-Wno-error"]
    command += [*map(str, sources), "-o", str(out), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return out


def run_one(program: Program, name: str, folder: Path, options: argparse.Namespace) -> bool:
    """Compile and run a program in one variant; return whether it passed."""
    variant = VARIANTS[name]
    binary = compile_one(program, name, folder)
    arguments = program.long if options.long else program.short
    if name != "plain" and not options.long and program.slow is not None:
        arguments = program.slow
    command = [*variant.runner, str(binary), str(options.seed), *arguments]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **dict(variant.env)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=options.timeout,
        )
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        text, code = f"{text}\nnot done after {options.timeout:g} s", -1
    seconds = time.monotonic() - began
    # ThreadSanitizer ends with a line of signs.
    lines = [line for line in text.splitlines() if line.strip(" =")] or ["it said nothing"]
    print(f"{program.name:<16}{name:<9}{seconds:7.1f} s  {lines[-1]}", flush=True)
    passed = code == 0 if program.mutation is None else code == 1
    if not passed:
        print("\n".join(lines[-200:]))
        print(f"FAILED  {program.name}, {name}: exit status {code}: {' '.join(command)}")
    return passed


def missing(variants: list[str]) -> list[str]:
    """Return the commands that the chosen variants need and that are not there."""
    needed = {
        command
        for name in variants
        for command in (VARIANTS[name].compiler, *VARIANTS[name].runner)
    }
    return sorted(command for command in needed if not shutil.which(command))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/stress/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-k", metavar="WORD", default="", help="programs whose name has this word")
    parser.add_argument("--long", action="store_true", help="the long forms")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--timeout", type=float, default=None, metavar="S", help="seconds a program"
    )
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(1, 1 << 31)
    if options.timeout is None:
        options.timeout = 7200 if options.long else 120
    chosen = [
        (program, name)
        for program in PROGRAMS
        for name in program.variants
        if options.k in program.name and name in options.variants
    ]
    if not chosen:
        sys.exit("tests/stress/run.py: no program chosen")
    absent = missing([name for _, name in chosen])
    if absent:
        sys.exit(
            f"tests/stress/run.py: {', '.join(absent)} not found. In Debian: "
            "apt-get install gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
        )
    # so that it ends what it started, and removes its folder
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        passed = [run_one(program, name, Path(folder), options) for program, name in chosen]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
