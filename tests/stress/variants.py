"""How a stress program is compiled and run: what one is, and in which variants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What hpcdist itself is compiled with; `_build/hpcdist_build/extensions.py` has the rest.
FLAGS = "-std=gnu11 -pthread -ffp-contract=off -Wall -Wextra -Werror -g".split()
INCLUDES = (
    "tests/stress/stub",
    *sorted({path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("pyx/**/*.h")}),
)


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
