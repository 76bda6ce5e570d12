"""Find libmpi and load it before the native modules do, or say what is wrong and what fixes it.

The native modules name libmpi by its file name only (``libmpi.so.40``, ``libmpi.so.12``). The
dynamic linker gives them whatever library of that name the process already holds; so the right
one is loaded here first, by its full path. Only the standard library is used.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from hpcdist.errors import DistBackendError

__all__ = ["MPILibraryError", "build_info", "loaded_libraries", "preload", "verify"]

NATIVE = ("_buffer", "_ops", "_engine", "_store")
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}
_SONAMES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}

# Main libraries only: libmpi_mpifh, libmpi_cxx or Cray's libmpi_gtl_cuda sit on top of one.
_LIBMPI = re.compile(
    r"libmpi(ch)?(_(cray|gnu|intel|nvidia|amd|aocc|pgi|ibm|abi)(_\d+)?)?\.so[.\d]*"
)


class MPILibraryError(DistBackendError, ImportError):
    """hpcdist cannot be imported: not built, no libmpi, or not the one it was built for.

    Also an ImportError, for that is what a failing ``import hpcdist`` is expected to raise.
    """


def preload() -> str:
    """Make sure that the libmpi the native modules were built for is in the process.

    MPI is not started. Takes the library that is already loaded (mpi4py's), else loads one: for
    a build against a PyPI wheel from the environment's ``lib`` folder first, as mpi4py does; for
    a build against a site's MPI in the order of the dynamic linker.

    Returns
    -------
    str
        The library's path.

    Raises
    ------
    MPILibraryError
        The native modules are not built; libmpi is not found; the one that is loaded is of
        another family; or two are loaded. The message holds the command that fixes it.
    """
    missing = missing_modules()
    if missing:
        raise MPILibraryError(_not_built(missing))
    info = build_info()
    family = info.get("mpi_family", "")
    loaded = loaded_libraries()
    _check(loaded, family, info)
    if loaded:
        return loaded[0]
    failures = []
    for path in candidates(info, os.environ):
        try:
            # Not RTLD_GLOBAL: that would also put libmpi's hwloc, libevent and zlib in front of
            # everybody else's.
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            failures.append(str(error))
        else:
            return next(iter(loaded_libraries()), path)
    raise MPILibraryError(_not_found(info, failures))


def verify() -> str | None:
    """Check that the process still holds one libmpi, and the right one.

    For the moment before MPI is started: what was imported since `preload` may have brought its
    own.

    Returns
    -------
    str or None
        The library's path, or None where the system does not tell.

    Raises
    ------
    MPILibraryError
        Two are loaded, or one of another family.
    """
    loaded = loaded_libraries()
    info = build_info()
    _check(loaded, info.get("mpi_family", ""), info)
    return loaded[0] if loaded else None


def build_info() -> dict[str, Any]:
    """What the native modules were built against; empty when they are not built."""
    try:
        from hpcdist._build_info import INFO
    except ImportError:
        return {}
    return dict(INFO)


def missing_modules(package: str | os.PathLike[str] | None = None) -> list[str]:
    """The native modules that are not beside this file.

    Parameters
    ----------
    package : path-like, optional
        The package's folder, by default the one this file is in.
    """
    folder = Path(package or Path(__file__).parent)
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    return [
        name for name in NATIVE if not any((folder / (name + end)).exists() for end in suffixes)
    ]


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
        As `build_info` gives it.
    env : mapping
        The environment variables.
    """
    family = info.get("mpi_family", "openmpi")
    name = info.get("mpi_soname") or _SONAMES[family]
    # mpi4py loads what this variable names, and hpcdist has to use the same library.
    listed = env.get("MPI4PY_LIBMPI", "").split(os.pathsep)
    given = [path for path in listed if os.path.isfile(path)]
    yield from (path for path in given if family_of(path) in (family, ""))
    wheel = list(_existing(_wheel_folders(family), name))
    if info.get("mpi_wheel"):
        yield from wheel
        yield name
        return
    # The bare name would skip the folder the build linked from and may find the system's own.
    yield from _existing(env.get("LD_LIBRARY_PATH", "").split(os.pathsep), name)
    yield from _existing(info.get("mpi_libdirs", ()), name)
    yield name
    yield from wheel


def rebuild_command(family: str, native_only: bool = False) -> str:
    """The command that builds this installation again for a family.

    Parameters
    ----------
    family : str
        ``openmpi`` or ``mpich``.
    native_only : bool
        Leave HPCDIST_MPI out: any MPI will do.
    """
    choice = "" if native_only else f"HPCDIST_MPI={family} "
    pip = f"{choice}{sys.executable} -m pip install"
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").exists():
        return f"cd {checkout} && {pip} --no-deps -e ."
    return f"{pip} --force-reinstall --no-deps --no-cache-dir {_origin()}"


def _check(loaded: list[str], family: str, info: Mapping[str, Any]) -> None:
    """Refuse two libmpi in one process, and one that is not of the family we were built for."""
    files = {os.path.realpath(path): path for path in loaded}
    if len(files) > 1:
        raise MPILibraryError(_two(list(files.values()), info))
    for path in files.values():
        if family and family_of(path) not in (family, ""):
            raise MPILibraryError(_other_family(path, family, info))


def _wheel_folders(family: str) -> Iterator[str]:
    """Where a PyPI wheel puts libmpi: its own record first, then mpi4py's order of prefixes."""
    try:
        files = importlib.metadata.distribution(family).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libmpi.so."):
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


def _origin() -> str:
    """What pip installed us from: a folder, an archive, or the name on the index."""
    try:
        text = importlib.metadata.distribution("hpcdist").read_text("direct_url.json")
        url = urlparse(json.loads(text)["url"]) if text else None
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        url = None
    if url is None:
        return "--no-binary hpcdist hpcdist"
    return unquote(url.path) if url.scheme == "file" else url.geturl()


def _installed(family: str) -> str | None:
    """``name version`` of a family's PyPI wheel in this environment, or None."""
    try:
        return f"{family} {importlib.metadata.version(family)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _built_for(info: Mapping[str, Any]) -> str:
    return f"{info.get('mpi_vendor', 'MPI')} {info.get('mpi_version', '')}".strip()


def _not_built(missing: list[str]) -> str:
    """The native modules are not there; say whether an installed copy is hidden by this one."""
    here = Path(__file__).resolve().parent
    names = " and ".join(f"hpcdist.{name}" for name in missing)
    lines = [f"hpcdist is not built: {names} not found in {here}."]
    for entry in sys.path:
        other = Path(entry or ".", "hpcdist").resolve()
        if other != here and other.is_dir() and not missing_modules(other):
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


def _other_family(path: str, family: str, info: Mapping[str, Any]) -> str:
    other = family_of(path)
    who = "mpi4py has" if "mpi4py.MPI" in sys.modules else "something imported before hpcdist has"
    lines = [
        f"hpcdist was built for {_built_for(info)}, but {who} loaded "
        f"{NAMES.get(other, 'the MPI standard ABI')}: {path}.",
        "A process can hold only one MPI.",
    ]
    if other in NAMES:
        lines.append(f"To build hpcdist for {NAMES[other]}: {rebuild_command(other)}")
    if "mpi4py.MPI" in sys.modules:
        lines.append(
            f"Or have mpi4py use {NAMES[family]}: export MPI4PY_LIBMPI=/path/to/{_SONAMES[family]}"
        )
    return "\n".join(lines)


def _two(paths: list[str], info: Mapping[str, Any]) -> str:
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


def _not_found(info: Mapping[str, Any], failures: list[str]) -> str:
    family = info.get("mpi_family", "openmpi")
    other = "mpich" if family == "openmpi" else "openmpi"
    name = info.get("mpi_soname") or _SONAMES[family]
    lines = [f"hpcdist was built for {_built_for(info)}, but its library {name} is not found."]
    there = _installed(other)
    if there and not _installed(family):
        lines.append(f"This environment has {NAMES[other]} instead (package {there}).")
        lines.append(f"To build hpcdist for it: {rebuild_command(other)}")
    elif info.get("mpi_wheel"):
        lines.append(f"To install it: {sys.executable} -m pip install {family}")
        lines.append(f"To use the site's MPI: HPCDIST_MPICC=mpicc {rebuild_command('', True)}")
    else:
        lines.append(
            f"Load the module of the MPI it was built with ({info.get('mpicc', 'mpicc')}), or add "
            f"the folder that holds {name} to LD_LIBRARY_PATH."
        )
        lines.append(f"To build it for the MPI that is loaded: {rebuild_command('', True)}")
    lines += [f"Tried: {failure}" for failure in failures]
    return "\n".join(lines)
