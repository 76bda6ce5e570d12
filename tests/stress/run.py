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
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What hpcdist itself is compiled with; `_build/hpcdist_build/extensions.py` has the rest.
FLAGS = "-std=gnu11 -pthread -ffp-contract=off -Wall -Wextra -Werror -g".split()
INCLUDES = ("tests/stress/stub", "pyx/hpcdist/engine", "pyx/hpcdist/kernels", "pyx/hpcdist/store")


@dataclass(frozen=True)
class Variant:
    """One way to compile and run a program."""

    compiler: str
    flags: tuple[str, ...]
    runner: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


VARIANTS = {
    "plain": Variant("gcc", ("-O2",)),
    "tsan": Variant(
        "gcc",
        # gcc says so wherever it meets a fence; the engine has none that TSan must know of.
        ("-O1", "-fsanitize=thread", "-Wno-tsan"),
        env=(("TSAN_OPTIONS", "halt_on_error=1:exitcode=1:second_deadlock_stack=1"),),
    ),
    "asan": Variant(
        "gcc",
        ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        env=(("ASAN_OPTIONS", "detect_leaks=0"),),
    ),
    "aarch64": Variant("aarch64-linux-gnu-gcc", ("-O2", "-static"), runner=("qemu-aarch64",)),
}


@dataclass(frozen=True)
class Program:
    """A stress program: called as ``program SEED ARGUMENTS...``."""

    name: str
    #: From the repository's root; may be patterns.
    sources: tuple[str, ...]
    variants: tuple[str, ...]
    #: Arguments of the short and of the long form.
    short: tuple[str, ...]
    long: tuple[str, ...]
    flags: tuple[str, ...] = ()
    #: Arguments of the short form where a variant is slow.
    slow: tuple[str, ...] | None = None
    #: The same, for a place where the thread loses its core: nothing may go wrong.
    delay: tuple[str, str, str] | None = None
    #: A file, a text in it and what takes its place: the program must find the mistake.
    mutation: tuple[str, str, str] | None = None


#: What every program about shared memory is linked with.
BASE = tuple(
    f"pyx/hpcdist/{name}.c"
    for name in ("engine/hd_base", "engine/hd_job", "engine/hd_report", "kernels/hd_types")
) + ("tests/stress/stub/stub.c",)
CHECKING = ("check", "page", "page_pairs", "carry", "scale")
NODE = (*BASE, "pyx/hpcdist/engine/hd_node.c")
CHECK = (*BASE, *(f"pyx/hpcdist/engine/hd_{name}.c" for name in CHECKING))
WATCHDOG = (*BASE, *(f"pyx/hpcdist/engine/hd_{name}.c" for name in ("watchdog", "status")))
KERNELS = (
    "tests/stress/kernels.c",
    "pyx/hpcdist/kernels/hd_types.c",
    "pyx/hpcdist/kernels/hd_kernels*.c",
)

#: So that the numbers of checks wrap in the course of the run.
NEAR_WRAP = str(2**32 - 10_000)

PROGRAMS = (
    *(
        Program(
            name=f"check-{ranks}",
            sources=("tests/stress/check.c", *CHECK),
            variants=("plain", "aarch64"),
            short=("processes", str(ranks), "200000", NEAR_WRAP),
            long=("processes", str(ranks), "4000000", NEAR_WRAP),
            slow=("processes", str(ranks), "20000", NEAR_WRAP),
        )
        for ranks in (2, 3, 4)
    ),
    Program(
        name="check-threads",
        sources=("tests/stress/check.c", *CHECK),
        variants=("plain", "tsan", "asan"),
        short=("threads", "3", "40000", NEAR_WRAP),
        long=("threads", "3", "1000000", NEAR_WRAP),
        slow=("threads", "3", "20000", NEAR_WRAP),
    ),
    *(
        Program(
            name=f"check-{name}",
            sources=("tests/stress/check.c", *CHECK),
            variants=("plain",),
            short=("processes", "3", "200000", "0"),
            long=("processes", "3", "200000", "0"),
            mutation=(f"pyx/hpcdist/engine/{file}.c", old, new),
        )
        for name, file, old, new in (
            ("early", "hd_check", "c->decided != n - 1 && (code", "0 && (code"),
            ("no-veto", "hd_page", "late = vetoed(old, n);", "late = 0;"),
            ("order", "hd_page_pairs", "r < rank; r++", "r < rank - 1; r++"),
        )
    ),
    *(
        Program(
            name=f"node-{ranks}",
            sources=("tests/stress/node.c", *NODE),
            variants=("plain", "aarch64"),
            short=("processes", str(ranks), "20000"),
            long=("processes", str(ranks), "1000000"),
            slow=("processes", str(ranks), "2000"),
        )
        for ranks in (2, 3, 4)
    ),
    Program(
        name="node-threads",
        sources=("tests/stress/node.c", *NODE),
        variants=("plain", "tsan", "asan"),
        short=("threads", "3", "10000"),
        long=("threads", "3", "200000"),
        slow=("threads", "3", "2000"),
    ),
    Program(
        name="lane",
        sources=(
            "tests/stress/threads.c",
            *BASE,
            "pyx/hpcdist/engine/hd_lane.c",
            "pyx/hpcdist/engine/hd_notify.c",
        ),
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("4", "10000"),
        long=("8", "1000000"),
        slow=("4", "2000"),
    ),
    Program(
        name="p2p",
        sources=(
            "tests/stress/p2p.c",
            *BASE,
            "pyx/hpcdist/engine/hd_p2p.c",
            "pyx/hpcdist/engine/hd_poller.c",
        ),
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("4", "5000"),
        long=("8", "300000"),
        slow=("4", "1000"),
    ),
    Program(
        name="watchdog",
        sources=("tests/stress/watchdog.c", *WATCHDOG),
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("4", "60"),
        long=("4", "20000"),
        slow=("4", "32"),
    ),
    *(
        Program(
            name=f"watchdog-{name}",
            sources=("tests/stress/watchdog.c", *WATCHDOG),
            variants=(variant,),
            short=("4", "60"),
            long=("4", "60"),
            mutation=("pyx/hpcdist/engine/hd_watchdog.c", old, new),
        )
        for name, variant, old, new in (
            ("left", "plain", "__ATOMIC_ACQUIRE) != LEAVING", "__ATOMIC_ACQUIRE)"),
            ("race", "tsan", "__atomic_load_n(&c->cur_seq, __ATOMIC_ACQUIRE)", "c->cur_seq"),
        )
    ),
    Program(
        name="watchdog-delay",
        sources=("tests/stress/watchdog.c", *WATCHDOG),
        variants=("plain",),
        short=("4", "81"),
        long=("4", "2000"),
        delay=(
            "pyx/hpcdist/engine/hd_watchdog.c",
            "look_at_comms(s, now, slept);",
            "static __thread int64_t paused;\n"
            "if (now - paused > 200000000) { usleep(100000); paused = now; }\n"
            "look_at_comms(s, now, slept);",
        ),
    ),
    Program(
        name="store",
        sources=("tests/stress/store.c", "pyx/hpcdist/store/hd_*.c"),
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("6", "5000"),
        long=("12", "300000"),
        slow=("6", "1000"),
    ),
    Program(
        name="kernels",
        sources=KERNELS,
        variants=("aarch64",),
        short=("200", "neon"),
        long=("20000", "neon"),
        flags=("-O3",),
    ),
    Program(
        name="kernels-round",
        sources=KERNELS,
        variants=("aarch64",),
        short=("200", "neon"),
        long=("200", "neon"),
        mutation=(
            "pyx/hpcdist/kernels/hd_kernels_neon.c",
            "vdupq_n_u32(0x7FFF)",
            "vdupq_n_u32(0x8000)",
        ),
    ),
)


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
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        passed = [run_one(program, name, Path(folder), options) for program, name in chosen]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
