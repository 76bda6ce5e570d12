"""What Intel MPI needs around its start.

Intel's ``vars.sh`` exports LD_LIBRARY_PATH and FI_PROVIDER_PATH; the wheels have no such script:
libfabric and its providers are found without it. A site's I_MPI_PMI_LIBRARY is hidden from
processes that srun did not connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from hpcdist import _environment

#: Where libfabric is, from the folder above libmpi's: the wheels' place first, then a site's.
_PLACES = ("lib", "opt/mpi/libfabric/lib", "libfabric/lib")


def fabric_of(libmpi: str) -> Path | None:
    """The libfabric that came with a libmpi.

    Parameters
    ----------
    libmpi : str
        Full path of the library in use.

    Returns
    -------
    Path or None
        None if libmpi is not Intel's, there is none beside it, or I_MPI_OFI_LIBRARY_INTERNAL asks
        for the system's.
    """
    if os.environ.get("I_MPI_OFI_LIBRARY_INTERNAL", "").lower() in ("0", "no", "off", "disable"):
        return None
    try:
        library = ctypes.CDLL(libmpi, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    if not hasattr(library, "I_MPI_Check_image_status"):
        return None
    folder = Path(libmpi).parent
    root = folder.parent.parent if folder.name in ("release", "debug") else folder.parent
    found = (root / place / "libfabric.so.1" for place in _PLACES)
    return next((path for path in found if path.exists()), None)


def load_fabric(libmpi: str) -> None:
    """Load Intel MPI's libfabric, which libmpi asks for by its bare name. Local to this process.

    Parameters
    ----------
    libmpi : str
        Full path of the library in use; nothing is done for any other MPI's.
    """
    path = fabric_of(libmpi)
    if path is not None:
        # If it cannot be loaded, MPI says what it misses; within a node it needs none.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path), mode=os.RTLD_LAZY | os.RTLD_LOCAL)


@contextlib.contextmanager
def providers(libmpi: str | None) -> Iterator[None]:
    """Let Intel's libfabric find its providers while MPI starts. Local to this process.

    Parameters
    ----------
    libmpi : str or None
        Full path of the library in use; nothing is done for any other MPI's, or if
        FI_PROVIDER_PATH is set.
    """
    path = fabric_of(libmpi) if libmpi and "FI_PROVIDER_PATH" not in os.environ else None
    if path is None:
        yield
        return
    own = path.parent / "prov"
    with _environment.variables({"FI_PROVIDER_PATH": str(own if own.is_dir() else path.parent)}):
        yield


@contextlib.contextmanager
def without_pmi2() -> Iterator[None]:
    """Hide Slurm's libpmi2 while MPI starts in a process that has no connection for it.

    Sites export I_MPI_PMI_LIBRARY for whole sessions. libpmi2 speaks through PMI_FD only, and a
    process without it, as under ``srun --mpi=none`` or without a launcher, would die in MPI_Init.
    Local to this process.
    """
    name = "I_MPI_PMI_LIBRARY"
    path = os.environ.get(name, "")
    hide = "PMI_FD" not in os.environ and "libpmi2" in os.path.basename(path)
    with _environment.variables({name: None} if hide else {}):
        yield
