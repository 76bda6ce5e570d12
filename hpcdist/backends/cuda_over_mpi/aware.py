"""Whether MPI takes addresses of GPU memory. An MPI that does not say so is assumed not to."""

from __future__ import annotations

import ctypes
import functools
import os

from hpcdist import _engine, _loader, config

#: MPICH's and Intel MPI's number for CUDA in MPIX_GPU_query_support.
_CUDA = 0


def takes_device_memory() -> bool:
    """Return whether MPI gets tensors on a GPU as they are.

    Returns
    -------
    bool
        The setting ``HPCDIST_CUDA_AWARE``; by default what the library reports. MPI must be up.
    """
    chosen = config.get("cuda_aware")
    return _asked()[0] if chosen == "auto" else chosen == "yes"


def library_report() -> tuple[bool, str]:
    """Return what the library reports, and through which interface.

    Returns
    -------
    tuple
        Whether it takes CUDA memory, and the source of this, in a few words.
    """
    for path in _loader.loaded_libraries()[:1]:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        answer = _by_function(library)
        if answer:
            return True, answer
    if "cuda" in {kind.partition(":")[0].strip() for kind in _engine.memory_kinds().split(",")}:
        return True, "mpi_memory_alloc_kinds"
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED", "").strip() == "1" and _is_cray():
        return True, "MPICH_GPU_SUPPORT_ENABLED=1"
    return False, "nothing indicates it"


_asked = functools.cache(library_report)


def _by_function(library: ctypes.CDLL) -> str:
    """The extensions' answer; they need not be there."""
    simple = getattr(library, "MPIX_Query_cuda_support", None)
    if simple is not None:
        simple.restype = ctypes.c_int
        if simple():
            return "MPIX_Query_cuda_support"
    general = getattr(library, "MPIX_GPU_query_support", None)
    if general is not None:
        there = ctypes.c_int(0)
        general.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        if general(_CUDA, ctypes.byref(there)) == 0 and there.value:
            return "MPIX_GPU_query_support"
    return ""


def _is_cray() -> bool:
    """Only Cray's library reads its variable; another MPI started there ignores it."""
    return "cray" in _engine.library_version().lower()
