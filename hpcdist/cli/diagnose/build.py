"""What hpcdist was built for, what is loaded, and whether the two match."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpcdist import _loader
from hpcdist.debug import versions
from hpcdist.launchers import mpi_family

from .section import FAULT, WARNING, Place, Section

_TRANSPORTS = re.compile(r"lib(ucp|uct_ib|fabric|psm2|ucc|hcoll|nccl|cuda)(?:-[0-9a-f]+)?\.so")


def collect(place: Place) -> Section:
    """Versions, build, the loaded libmpi and its transports."""
    section = Section("build", "Build and libraries")
    known = versions.collect(dict(place.env))
    for name, value in known["packages"].items():
        section.fact(name, value)
    for name in ("MPI", "mpicc", "compiler", "for Python"):
        if name in known["build"]:
            section.fact(f"built with: {name}", known["build"][name])
    run = known["run"]
    for name in ("libmpi", "version", "state"):
        if name in run:
            section.fact(f"run time: {name}", run[name])
    if "error" in run:
        section.find(FAULT, run["error"], "python -c 'import hpcdist' prints the command to use")
    machine = known["machine"]
    section.fact("system", machine["system"], "host")
    section.fact("CPU features", machine["CPU features"], "host")
    section.fact("kernels", machine["kernels"], "host")
    _compare(section, _loader.build_info(), run.get("version", ""))
    if place.running:
        _running(section)
    return section


def _compare(section: Section, info: dict[str, Any], version: str) -> None:
    """Find a library of the right family that is older than the build's."""
    if "mpi_builds" in info:  # a wheel is for every release with the same ABI
        return
    built = re.search(r"\d+\.\d+(\.\d+)?", str(info.get("mpi_version", "")))
    there = re.search(r"\d+\.\d+(\.\d+)?", version)
    if not built or not there or mpi_family(version) == "this MPI":
        return
    one, other = ([int(part) for part in text[0].split(".")] for text in (built, there))
    if other[:2] < one[:2]:
        section.find(
            WARNING,
            f"hpcdist was built with {info.get('mpi_vendor')} {built[0]} and runs on the older "
            f"{there[0]}",
            "load the module of the MPI it was built with, or: "
            + _loader.rebuild_command("", True),
        )


def _running(section: Section) -> None:
    from hpcdist import _engine

    level = _engine.thread_level()
    section.fact("run time: thread level", level)
    section.fact("run time: transports", " ".join(transports()) or "none of those known")
    if level != "multiple":
        section.find(
            FAULT,
            f"MPI was started with MPI_THREAD_{level.upper()}: asynchronous operations run on the "
            "calling thread, and nothing overlaps",
            "unset MPICH_MAX_THREAD_SAFETY, MPI4PY_RC_THREAD_LEVEL and mpi4py.rc.thread_level, or "
            "use an MPI built with MPI_THREAD_MULTIPLE",
        )


def transports(maps: str | None = None) -> list[str]:
    """Names of the libraries for networks and GPUs in this process.

    Parameters
    ----------
    maps : str, optional
        Text in the format of ``/proc/self/maps``, read where it is not given.
    """
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text(errors="replace")
        except OSError:
            return []
    return sorted({found[1] for found in _TRANSPORTS.finditer(maps)})
