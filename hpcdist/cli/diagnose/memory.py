"""Memory: page sizes, copies between processes, and limits."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
from typing import Any

from .section import FAULT, NOTE, WARNING, Place, Section

#: Bytes of /dev/shm that MPI and hpcdist want at least; Docker gives 64 MiB for all ranks.
_SHM = 256 << 20
_GIB = 1 << 30
_UNITS = {"memlock": "bytes locked", "nofile": "open files"}


def collect(place: Place, limits: dict[str, int] | None = None, shm: int | None = None) -> Section:
    """THP, single-copy between processes, limits, /dev/shm.

    Parameters
    ----------
    place : Place
        The file system and environment to read.
    limits : dict, optional
        ``memlock`` and ``nofile`` of this process; by default the system's answer.
    shm : int, optional
        Bytes free in /dev/shm; by default the system's answer.
    """
    section = Section("memory", "Memory and limits")
    _pages(section, place)
    _copies(section, place)
    limits = _limits() if limits is None else limits
    for name, value in limits.items():
        section.fact(f"limit: {_UNITS[name]}", "unlimited" if value < 0 else value, "host")
    devices = place.entries("sys/class/infiniband")
    lock = limits.get("memlock", -1)
    if devices and lock >= 0:
        section.find(
            FAULT,
            f"at most {lock >> 10} KiB of memory may be locked: InfiniBand cannot register "
            "buffers, and jobs fail or fall back to TCP",
            "ulimit -l unlimited before the launcher, '* - memlock unlimited' in "
            "/etc/security/limits.d; Slurm: LimitMEMLOCK=infinity for slurmd and "
            "PropagateResourceLimitsExcept=MEMLOCK; docker run --ulimit memlock=-1",
        )
    files = limits.get("nofile", -1)
    if 0 <= files < 1024:
        section.find(
            WARNING,
            f"at most {files} files may be open: connections between many ranks need more",
            "ulimit -n 65536",
        )
    _shared(section, place, shm)
    return section


def _pages(section: Section, place: Place) -> None:
    thp = place.read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", thp)
    if chosen:
        section.fact("transparent huge pages", chosen[1], "host")
        if chosen[1] == "never":
            section.find(
                NOTE,
                "transparent huge pages are off: first touch of large buffers is slower",
                "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )


def _copies(section: Section, place: Place) -> None:
    xpmem = (place.root / "dev/xpmem").exists()
    section.fact("XPMEM", "there" if xpmem else "not there", "host")
    scope = place.number("proc/sys/kernel/yama/ptrace_scope")
    section.fact("ptrace scope", "no Yama: as 0" if scope is None else scope, "host")
    own = Offer()
    refused = can_copy(place.sibling or own.address()[1:])
    tried = "another rank" if place.sibling else "this process itself, there being no other rank"
    section.fact("CMA (process_vm_readv)", f"{refused or 'works'}, tried on {tried}", "host")
    if refused and not xpmem:
        section.find(
            WARNING,
            f"processes may not copy from each other's memory (CMA): {refused}. Messages above "
            "some KiB within a node are copied twice",
            "containers: --cap-add=SYS_PTRACE, or a seccomp profile that allows process_vm_readv; "
            "where ptrace scope is above 0, as root: sysctl kernel.yama.ptrace_scope=0",
        )
    elif scope and place.sibling is None and not xpmem:
        section.find(
            NOTE if scope == 1 else WARNING,
            f"ptrace scope {scope} may forbid that ranks copy from each other's memory (CMA)",
            "mpirun -n 2 python -m hpcdist diagnose tries it between ranks; as root: "
            "sysctl kernel.yama.ptrace_scope=0",
        )


class Offer:
    """A block of this process's memory that other ranks of the host read."""

    def __init__(self) -> None:
        self._content = os.urandom(16)
        self._buffer = ctypes.create_string_buffer(self._content, len(self._content))

    def address(self) -> tuple[str, int, int, bytes]:
        """Host, process, address, content; it can be read as long as the offer lives."""
        where = ctypes.addressof(self._buffer)
        return socket.gethostname(), os.getpid(), where, self._content


def sibling_of(offers: list[tuple[str, int, int, bytes]], rank: int) -> Any:
    """The offer of the next rank on this rank's host, without the host; None where there is none.

    Parameters
    ----------
    offers : list
        What :meth:`Offer.address` gave on each rank.
    rank : int
        This rank.
    """
    order = [*offers[rank + 1 :], *offers[:rank]]
    return next((each[1:] for each in order if each[0] == offers[rank][0]), None)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def can_copy(offer: tuple[int, int, bytes]) -> str:
    """Read another process's memory with process_vm_readv.

    Parameters
    ----------
    offer : tuple of (int, int, bytes)
        Process, address, and what should be there.

    Returns
    -------
    str
        "" if it was read, else what the system said.
    """
    pid, address, content = offer
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return "this system has no process_vm_readv"
    call.restype = ctypes.c_ssize_t
    target = ctypes.create_string_buffer(len(content))
    there = _Piece(address, len(content))
    here = _Piece(ctypes.addressof(target), len(content))
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if call(pid, ctypes.byref(here), one, ctypes.byref(there), one, flags) < 0:
        return f"refused ({os.strerror(ctypes.get_errno())})"
    if target.raw != content:
        return "reads another process: the ranks have process numbers (PID namespaces) of their own"
    return ""


def _limits() -> dict[str, int]:
    kinds = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}
    return {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}


def _shared(section: Section, place: Place, free: int | None) -> None:
    if free is None:
        try:
            there = os.statvfs(place.root / "dev/shm")
        except OSError:
            section.find(FAULT, "there is no /dev/shm: the ranks of a node cannot share memory",
                         "mount -t tmpfs tmpfs /dev/shm; docker run --shm-size=8g")  # fmt: skip
            return
        free = there.f_bavail * there.f_frsize
    section.fact("/dev/shm free", f"{free / _GIB:.2f} GiB", "rank")
    if free < _SHM:
        section.find(
            FAULT,
            f"/dev/shm has {free >> 20} MiB free: MPI and DataLoader workers end with SIGBUS or "
            "'no space left' when it is full",
            "docker run --shm-size=8g (or --ipc=host); mount -o remount,size=50% /dev/shm; remove "
            "files that dead jobs have left there",
        )
