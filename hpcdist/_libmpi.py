"""Find libmpi: the one that this process holds, and the files that could be loaded.

Only the standard library is used.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "abi": "the MPI standard ABI"}
SONAMES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12", "abi": "libmpi_abi.so.1"}
#: The packages on PyPI with a libmpi of each family.
DISTRIBUTIONS = {
    "openmpi": ("openmpi",),
    "mpich": ("mpich", "impi-rt"),
    "abi": ("mpich", "impi-rt"),
}

# Main libraries only: libmpi_mpifh, libmpi_cxx or Cray's libmpi_gtl_cuda sit on top of one.
_LIBMPI = re.compile(
    r"libmpi(ch)?(_(cray|gnu|intel|nvidia|amd|aocc|pgi|ibm|abi)(_\d+)?)?\.so[.\d]*"
)
#: What a launcher sets in its processes, by the family whose launcher it is.
_LAUNCHED = {"openmpi": ("OMPI_COMM_WORLD_SIZE",), "mpich": ("MPI_LOCALRANKID", "PMI_FD")}
#: A linker script of the same name has a few bytes.
_LEAST_BYTES = 4096


def loaded_libraries(maps: str | None = None) -> list[str]:
    """Paths of every libmpi this process holds, in the order of their addresses.

    Parameters
    ----------
    maps : str, optional
        Text in the format of ``/proc/self/maps``, which is read when it is not given. Where
        there is no such file the answer is empty.
    """
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text(errors="replace")
        except OSError:
            return []
    found: dict[str, None] = {}
    for line in maps.splitlines():
        if "libmpi" not in line:
            continue
        path = line[line.find("/") :].removesuffix(" (deleted)")
        if _LIBMPI.fullmatch(os.path.basename(path)):
            found[path] = None
    return list(found)


def family_of(path: str) -> str:
    """``openmpi``, ``mpich`` or ``abi`` (the MPI 5 standard ABI), from a library's file name.

    Open MPI counts its libmpi from 20 up, everything derived from MPICH agreed on 12. A name
    without a number is looked into when the library is loaded; "" if that does not tell.
    """
    name = os.path.basename(path)
    if name.startswith("libmpi_abi."):
        return "abi"
    number = re.search(r"\.so\.(\d+)", name)
    if number:
        return "mpich" if int(number[1]) < 20 else "openmpi"
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return ""
    return "openmpi" if hasattr(library, "ompi_mpi_comm_world") else "mpich"


def candidates(info: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[str]:
    """What to try to load, best first: full paths that exist, and the bare name once.

    Parameters
    ----------
    info : mapping
        As `build_info` gives it, of an installation for one MPI.
    env : mapping
        The environment variables.
    """
    family = info.get("mpi_family", "openmpi")
    name = info.get("mpi_soname") or SONAMES[family]
    yield from _named(family, env)
    wheel = list(_wheel_libraries(family, name))
    if info.get("mpi_wheel"):
        yield from wheel
        yield name
        return
    # The bare name would skip the folder the build linked from and may find the system's own.
    yield from _existing(_search_path(env), name)
    yield from _existing(info.get("mpi_libdirs", ()), name)
    yield name
    yield from wheel


def candidates_of_all(families: Iterable[str], env: Mapping[str, str]) -> Iterator[str]:
    """What to try to load where there are modules for several ABIs, best first.

    The launcher's MPI comes first, for its processes can speak to no other. Without a launcher the
    place decides: the environment of this Python, as for mpi4py; LD_LIBRARY_PATH; the mpirun on
    PATH; the dynamic linker.

    Parameters
    ----------
    families : iterable of str
        Those that there are modules for.
    env : mapping
        The environment variables.
    """
    there = [family for family in SONAMES if family in set(families)]
    for family in there:
        yield from _named(family, env)
    launched = [f for f in there if any(name in env for name in _LAUNCHED.get(f, ()))]
    rest = [family for family in there if family not in launched]
    order = {folder: at for at, folder in reversed([*enumerate(_search_path(env))])}
    for group in (launched, rest):
        places = [list(_places(family, env)) for family in group]
        for place in zip(*places, strict=True):
            # The module that was loaded last puts its folder first.
            yield from sorted(
                (path for paths in place for path in paths),
                key=lambda path: order.get(os.path.dirname(path), len(order)),
            )


def _search_path(env: Mapping[str, str]) -> list[str]:
    """The folders of LD_LIBRARY_PATH."""
    return env.get("LD_LIBRARY_PATH", "").split(os.pathsep)


def _places(family: str, env: Mapping[str, str]) -> Iterator[list[str]]:
    """The libraries of a family, a list per kind of place."""
    name = SONAMES[family]
    yield list(_wheel_libraries(family, name))
    yield list(_existing(_search_path(env), name))
    mpirun = shutil.which("mpirun", path=env.get("PATH"))
    root = os.path.dirname(os.path.dirname(os.path.realpath(mpirun))) if mpirun else ""
    folders = [os.path.join(root, lib) for lib in ("lib", "lib64", "lib/release")] if root else []
    yield list(_existing(folders, name))
    yield [name]


def _named(family: str, env: Mapping[str, str]) -> Iterator[str]:
    """The libraries of MPI4PY_LIBMPI: mpi4py loads one, and hpcdist has to use the same."""
    for path in env.get("MPI4PY_LIBMPI", "").split(os.pathsep):
        if os.path.isfile(path) and family_of(path) in (family, ""):
            yield path


def _wheel_libraries(family: str, name: str) -> Iterator[str]:
    """The libraries of PyPI's wheels, best first.

    Intel's wheel has copies of one library under several names, and a second copy would be a second
    MPI. mpi4py loads the one without a number, so that goes first.
    """
    for path in _existing(_wheel_folders(family), name):
        twin = os.path.join(os.path.dirname(path), "libmpi.so")
        if family == "mpich" and not os.path.samefile(*_both(twin, path)):
            yield twin
        yield path


def _both(twin: str, path: str) -> tuple[str, str]:
    """The two files to compare: the second one twice if the first is no library."""
    try:
        library = os.path.getsize(twin) > _LEAST_BYTES
    except OSError:
        library = False
    return (twin, path) if library else (path, path)


def _wheel_folders(family: str) -> Iterator[str]:
    """Where a PyPI wheel puts libmpi: its own record first, then mpi4py's order of prefixes."""
    for name in DISTRIBUTIONS[family]:
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == SONAMES[family]:
                yield os.path.dirname(os.path.realpath(str(file.locate())))
    site = sys.modules.get("site")
    prefixes = [sys.prefix, getattr(site, "USER_BASE", None), sys.base_prefix]
    yield from (os.path.join(prefix, "lib") for prefix in prefixes if prefix)


def _existing(folders: Iterable[str], name: str) -> Iterator[str]:
    """The files of that name, each once."""
    seen = set()
    for folder in folders:
        path = os.path.join(folder, name)
        if folder and path not in seen and os.path.exists(path):
            seen.add(path)
            yield path
