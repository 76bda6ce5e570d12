"""Find libmpi and load it before the native modules do, or say what is wrong and what fixes it.

The native modules name libmpi by its file name only (``libmpi.so.40``, ``libmpi.so.12``). The
dynamic linker gives them whatever library of that name the process already holds; so the right
one is loaded here first, by its full path. A wheel has the modules that use MPI once per ABI, and
the library decides which of them are imported. Only the standard library is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcdist import _intel, _libmpi, _loader_texts
from hpcdist._libmpi import family_of, loaded_libraries
from hpcdist._loader_texts import rebuild_command
from hpcdist.errors import DistBackendError

__all__ = [
    "MPILibraryError",
    "build_info",
    "loaded_libraries",
    "preload",
    "rebuild_command",
    "starting",
    "verify",
]

NATIVE = ("_buffer", "_ops", "_engine", "_store")
#: Of these a wheel for several ABIs has one file per ABI, ``_engine.mpich.cpython-311-....so``.
PER_ABI = ("_engine", "_bench")

#: The family that this process runs on, in an installation for several.
_chosen = ""


class MPILibraryError(DistBackendError, ImportError):
    """hpcdist cannot be imported: not built, no libmpi, or not the one it was built for.

    Also an ImportError, for that is what a failing ``import hpcdist`` is expected to raise.
    """


def preload() -> str:
    """Make sure that a libmpi the native modules were built for is in the process.

    MPI is not started. Takes the library that is already loaded (mpi4py's), else loads one: for
    a build against a PyPI wheel from the environment's ``lib`` folder first, as mpi4py does; for
    a build against a site's MPI in the order of the dynamic linker; with modules for several ABIs
    the one of the launcher, else the first that is found.

    Returns
    -------
    str
        The library's path.

    Raises
    ------
    MPILibraryError
        The native modules are not built; libmpi is not found; the one that is loaded is of
        another family, or lacks what its family has; or two are loaded. The message holds the
        command that fixes it.
    """
    missing = missing_modules()
    if missing:
        raise MPILibraryError(_loader_texts.not_built(missing, missing_modules))
    info = build_info()
    with _hangup_kept():
        path = _loaded(info) or _load(info)
        _intel.load_fabric(path)
        family = family_of(path)
        if "mpi_builds" in info:
            _choose(family)
        _try_engine(path, family)
    return path


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
    return _loaded(build_info())


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """A context for the start of MPI: what this libmpi needs in its environment, for so long."""
    providers = _intel.providers(next(iter(loaded_libraries()), None))
    with _hangup_kept(), providers, _intel.without_pmi2():  # UCX may come only now
        yield


def build_info() -> dict[str, Any]:
    """What the native modules were built against; empty when they are not built.

    In an installation for several ABIs ``mpi_builds`` has the facts of each, and those of the one
    in use, once it is known, are merged in.
    """
    try:
        from hpcdist._build_info import INFO
    except ImportError:
        return {}
    facts: dict[str, Any] = dict(INFO)
    return facts | facts.get("mpi_builds", {}).get(_chosen, {})


def missing_modules(package: str | os.PathLike[str] | None = None) -> list[str]:
    """The native modules that are not beside this file.

    Parameters
    ----------
    package : path-like, optional
        The package's folder, by default the one this file is in.
    """
    folder = Path(package or Path(__file__).parent)
    return [name for name in NATIVE if not any(path.exists() for path in _files(folder, name))]


def _files(folder: Path, name: str) -> Iterator[Path]:
    """Where a native module may be: for one MPI, and for each ABI."""
    middles = ["", *(f".{family}" for family in _libmpi.SONAMES if name in PER_ABI)]
    for middle in middles:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            yield folder / (name + middle + suffix)


def _families(info: Mapping[str, Any]) -> list[str]:
    """The families that there are native modules for."""
    return list(info.get("mpi_builds") or filter(None, [info.get("mpi_family", "")]))


def _loaded(info: Mapping[str, Any]) -> str | None:
    """The libmpi in this process; refuse two of them, and one that there are no modules for."""
    loaded = loaded_libraries()
    files = {os.path.realpath(path): path for path in loaded}
    if len(files) > 1:
        raise MPILibraryError(_loader_texts.two(list(files.values()), info))
    families = [_chosen] if _chosen else _families(info)
    for path in files.values():
        if families and family_of(path) not in (*families, ""):
            raise MPILibraryError(_loader_texts.other_family(path, families, info))
    return loaded[0] if loaded else None


def _load(info: Mapping[str, Any]) -> str:
    """Load the first library that can be."""
    builds = info.get("mpi_builds")
    found = (
        _libmpi.candidates_of_all(builds, os.environ)
        if builds
        else _libmpi.candidates(info, os.environ)
    )
    failures = []
    for path in found:
        try:
            # Not RTLD_GLOBAL: that would also put libmpi's hwloc, libevent and zlib in front of
            # everybody else's.
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            failures.append(str(error))
        else:
            return next(iter(loaded_libraries()), path)
    raise MPILibraryError(_loader_texts.not_found(info, _families(info), failures))


def _try_engine(path: str, family: str) -> None:
    """Load the engine as a library: what it misses of this libmpi is said in our words."""
    files = [file for file in _files(Path(__file__).parent, "_engine") if file.exists()]
    ours = [file for file in files if f"_engine.{family}." in file.name] or files
    try:
        ctypes.CDLL(str(ours[0]), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        info = build_info()
        raise MPILibraryError(
            _loader_texts.unusable(path, str(error), _families(info), info)
        ) from None


@contextlib.contextmanager
def _hangup_kept() -> Iterator[None]:
    """Leave SIGHUP as it is: UCX, which many a libmpi loads, takes it to dump its own state.

    Under nohup it is to be ignored, here and in what this process starts; others have a handler.
    """
    before = signal.getsignal(signal.SIGHUP)
    try:
        yield
    finally:
        if before is not None and "UCX_DEBUG_SIGNO" not in os.environ:
            with contextlib.suppress(ValueError):  # only the main thread may set it
                signal.signal(signal.SIGHUP, before)


def _choose(family: str) -> None:
    """Have the modules of a family imported from now on."""
    global _chosen
    if not _chosen:
        _chosen = family
        sys.meta_path.insert(0, _Finder(family))


class _Finder:
    """Finds the native modules that use MPI, of one family."""

    def __init__(self, family: str) -> None:
        self.family = family

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        package, _, last = name.rpartition(".")
        if package != "hpcdist" or last not in PER_ABI:
            return None
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            file = Path(__file__).with_name(f"{last}.{self.family}{suffix}")
            if file.exists():
                return importlib.util.spec_from_file_location(name, file)
        return None
