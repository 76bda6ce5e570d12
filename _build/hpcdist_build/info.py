"""Write down what the native modules were built against, for the loader and the bug report."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

from hpcdist_build import mpicc

_HEADER = '''\
"""What the native modules were built against; written by the build, not by hand."""

INFO = {
'''


def write(path: Path, facts: dict[str, object]) -> None:
    """Write the facts as ``_build_info.py``: one dict named INFO."""
    lines = [f"    {key!r}: {value!r},\n" for key, value in facts.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_HEADER + "".join(lines) + "}\n", encoding="utf-8")


def collect(
    mpi: mpicc.MPICompiler | None,
    compiler: list[str],
    in_tree: bool,
    engine: str | None = None,
) -> dict[str, object]:
    """What is known once everything is built.

    Parameters
    ----------
    mpi : MPICompiler or None
        What the extensions that need MPI were built with.
    compiler : list of str
        The command C files were compiled with.
    in_tree : bool
        Whether this is a development build inside the source tree.
    engine : str, optional
        A built module that is linked with libmpi.

    Returns
    -------
    dict
        Strings, but for ``in_tree`` and the tuples; no path into a temporary
        folder.
    """
    facts: dict[str, object] = {
        "date": build_date(),
        "python": platform.python_version(),
        "compiler": compiler_version(compiler),
        "in_tree": in_tree,
    }
    if mpi is not None:
        facts |= of_mpi(mpi, needed_libmpi(engine) if engine else "")
    return facts


def of_mpi(mpi: mpicc.MPICompiler, soname: str) -> dict[str, object]:
    """What is known of the MPI that modules are built with.

    Parameters
    ----------
    mpi : MPICompiler
        Its compiler.
    soname : str
        The name by which the modules ask for libmpi; "" if it is not known.
    """
    return {
        "mpi_family": mpi.family,
        "mpi_vendor": mpi.vendor,
        "mpi_version": mpi.version,
        "mpi_standard": mpi.standard,
        "mpi_soname": soname,
        "mpi_wheel": mpi.wheel or "",
        # A wheel's wrapper lies where the build put it, which is gone afterwards.
        "mpicc": "mpicc" if mpi.wheel else " ".join(mpi.command),
        "mpi_libdirs": () if mpi.wheel else tuple(mpicc.library_dirs(mpi)),
        "passed_over": mpi.passed_over,
    }


def build_date() -> str:
    """Today in UTC, or the day SOURCE_DATE_EPOCH names, so that a build can be repeated."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    utc = datetime.timezone.utc
    now = datetime.datetime.fromtimestamp(int(epoch), utc) if epoch else datetime.datetime.now(utc)
    return now.date().isoformat()


def compiler_version(compiler: list[str]) -> str:
    """The first line of ``cc --version``."""
    try:
        run = subprocess.run([compiler[0], "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (run.stdout.strip().splitlines() or ["unknown"])[0]


def needed_libmpi(module: str) -> str:
    """The name under which a module asks for libmpi: ``libmpi.so.40``; "" if it cannot be told."""
    try:
        run = subprocess.run(["readelf", "-d", module], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    names = re.findall(r"\(NEEDED\).*\[(libmpi[^\]]*)\]", run.stdout)
    return names[0] if names else ""
