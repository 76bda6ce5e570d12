"""Finds libnccl.so.2 and opens it; nothing happens before the first call of :func:`load`."""

from hpcdist.libnccl cimport HD_NCCL_FLOOR, hd_nccl, hd_nccl_open

import os
import sys
import threading

from hpcdist.errors import DistBackendError

cdef hd_nccl table
cdef object loaded = None
lock = threading.Lock()

_IN_WHEEL = os.path.join("nvidia", "nccl", "lib", "libnccl.so.2")
_OPTIONAL = (
    "mem_alloc", "comm_register", "init_rank_scalable", "shrink", "window_register", "revoke", "all_to_all",
    "gather", "scatter",
)


class Library:
    """The NCCL library of this process.

    Attributes
    ----------
    path : str
        The file.
    version : int
        As NCCL counts: 22809 is 2.28.9.
    found : str
        How it was found: ``"HPCDIST_NCCL_LIBRARY"``, ``"already loaded"``, ``"wheel"`` or ``"system"``.
    optional : tuple of str
        Which of the functions newer than 2.18 it has.
    """

    __slots__ = ("found", "optional", "path", "version")

    def __init__(self, path, version, found, optional):
        self.path = path
        self.version = version
        self.found = found
        self.optional = optional

    def __repr__(self):
        return f"<NCCL {version_text(self.version)} from {self.path} ({self.found})>"


def version_text(version):
    """A version number as text.

    Parameters
    ----------
    version : int
        As ``ncclGetVersion`` counts: 22809.

    Returns
    -------
    str
        ``"2.28.9"``.
    """
    major, rest = divmod(int(version), 10000) if version >= 10000 else divmod(int(version), 1000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def wheel():
    """The library of an installed wheel ``nvidia-nccl-cu12`` or ``-cu13``.

    Returns
    -------
    str or None
        Its path. Only looks at files: nothing is imported or loaded.
    """
    for folder in sys.path:
        path = os.path.join(folder or os.getcwd(), _IN_WHEEL)
        if os.path.exists(path):
            return path
    return None


def _candidates():
    """How, path, and whether to load; in the order of the attempts."""
    chosen = os.environ.get("HPCDIST_NCCL_LIBRARY", "").strip()
    if chosen:
        return [("HPCDIST_NCCL_LIBRARY", chosen, True)]
    installed = wheel()
    found = [("already loaded", None, False)]
    if installed is not None:
        found.append(("wheel", installed, True))
    return [*found, ("system", None, True)]


def load():
    """Open the NCCL library, once for the life of the process.

    Tried in this order: the file that ``HPCDIST_NCCL_LIBRARY`` names, a libnccl.so.2 that is
    already loaded (torch with CUDA loads one), that of an installed wheel ``nvidia-nccl-*``, that
    of the system.

    Returns
    -------
    Library

    Raises
    ------
    DistBackendError
        If there is none, or it is older than 2.18. The text names every place that was tried.

    Notes
    -----
    Local to this process.
    """
    cdef int found = 0
    cdef int version = 0
    cdef const char* where = NULL
    cdef const char* problem
    cdef const char* name
    global loaded
    with lock:
        if loaded is not None:
            return loaded
        tried = []
        for how, path, may_load in _candidates():
            data = None if path is None else os.fsencode(path)
            name = NULL
            if data is not None:
                name = data
            problem = hd_nccl_open(&table, name, may_load, &found, &where)
            if problem != NULL:
                text = problem.decode("utf-8", "replace")
                tried.append(f"{how}: {text}")
                if found or path is not None:
                    # stop at an unusable library: another one would be a second NCCL in the process
                    break
                continue
            if table.get_version(&version) != 0:
                tried.append(f"{how}: ncclGetVersion failed")
                break
            file = where.decode("utf-8", "replace")
            if version < HD_NCCL_FLOOR:
                tried.append(f"{how}: {file} is NCCL {version_text(version)}, and hpcdist needs 2.18 or newer")
                break
            loaded = Library(file, version, how, _present())
            return loaded
    raise DistBackendError(
        "there is no NCCL to use. " + "; ".join(tried) + ". Install it with pip install nvidia-nccl-cu12 (or -cu13, as "
        "torch's CUDA is), or set HPCDIST_NCCL_LIBRARY to the path of a libnccl.so.2"
    )


def is_loaded():
    """The library if :func:`load` has opened it.

    Returns
    -------
    Library or None
    """
    return loaded


def is_available():
    """Say whether a library can be opened; tries it.

    Returns
    -------
    bool
        False where :func:`load` raises.
    """
    try:
        load()
    except DistBackendError:
        return False
    return True


def _present():
    there = (
        table.mem_alloc != NULL, table.comm_register != NULL, table.init_rank_scalable != NULL, table.shrink != NULL,
        table.window_register != NULL, table.revoke != NULL, table.all_to_all != NULL, table.gather != NULL,
        table.scatter != NULL,
    )
    return tuple(name for name, has in zip(_OPTIONAL, there, strict=True) if has)


cdef const hd_nccl* functions() except NULL:
    if loaded is None:
        load()
    return <const hd_nccl*> &table
