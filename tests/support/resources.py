"""What a process holds: memory, file descriptors, threads, mappings, shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Held:
    """One look at this process.

    Attributes
    ----------
    memory : int
        Resident bytes that are not shared with files.
    files : int
        Open file descriptors.
    threads : int
        Threads of any kind.
    mappings : int
        Pages of hpcdist's that are mapped.
    shm : int
        Files in shared memory that this process has mapped and that have a name.
    """

    memory: int
    files: int
    threads: int
    mappings: int
    shm: int


def held() -> Held:
    """Look, after everything that can be given back was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    maps = Path("/proc/self/maps").read_text()
    memory = int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
    named = {path for path in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return Held(
        memory,
        len(os.listdir("/proc/self/fd")),
        threads,
        maps.count("/dev/shm/hpcdist-"),
        len(named),
    )


def growth(before: Held, after: Held, memory: int) -> str:
    """What grew: more than `memory` bytes, or anything else at all; empty if nothing did."""
    found = []
    if after.memory - before.memory > memory:
        found.append(f"memory by {(after.memory - before.memory) / 2**20:.1f} MiB")
    for name in ("files", "threads", "mappings", "shm"):
        old, new = getattr(before, name), getattr(after, name)
        if new > old:
            found.append(f"{name} {old} -> {new}")
    return ", ".join(found)


def change(before: Held, after: Held) -> dict[str, int]:
    """How much more of each there is; memory in bytes."""
    return {name: getattr(after, name) - old for name, old in vars(before).items()}
