"""Cores: which ones a rank has, whether they suffice for its threads, which ranks share them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from hpcdist import hardware

from . import advice
from .section import FAULT, WARNING, Place, Section


def short(numbers: Iterable[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list in the kernel's form: ``0-3,8``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def nodes_of(place: Place) -> dict[int, frozenset[int]]:
    """Return the NUMA nodes of the machine that have cores, and the cores."""
    folder = "sys/devices/system/node"
    nodes = {
        int(name[4:]): numbers(place.read(f"{folder}/{name}/cpulist"))
        for name in place.entries(folder)
        if name.startswith("node") and name[4:].isdecimal()
    }
    return {number: cpus for number, cpus in nodes.items() if cpus}


def collect(place: Place, family: str = "", machine: int | None = None) -> Section:
    """Check cores, NUMA nodes and threads of this rank.

    Parameters
    ----------
    place : Place
        The file system and environment to read.
    family : str
        The MPI implementation, for the fix.
    machine : int, optional
        Cores of the machine; by default the system's answer.
    """
    section = Section("binding", "Cores and binding")
    machine = machine or os.cpu_count() or 1
    section.fact("cores of the host", machine, "host")
    section.fact("cores of the rank", short(place.cpus), "rank")
    nodes = nodes_of(place)
    mine = [number for number, cpus in nodes.items() if cpus & place.cpus]
    if nodes:
        section.fact("NUMA nodes of the host", len(nodes), "host")
        section.fact("NUMA nodes of the rank", short(mine), "rank")
    threads = place.env.get("OMP_NUM_THREADS", "")
    section.fact("OMP_NUM_THREADS", threads or "not set: as many as the rank has cores")
    advice = hardware.binding_advice(family, place.cpus, machine)
    if advice:
        what, _, fix = advice.partition(". ")
        section.find(FAULT, what, fix)
    elif len(place.cpus) == 1:
        section.find(
            WARNING,
            "the machine has one core: communication does not overlap computation",
            "give the machine, virtual machine or container two cores for each rank",
        )
    if threads.isdecimal() and int(threads) > len(place.cpus):
        section.find(
            FAULT,
            f"OMP_NUM_THREADS={threads}, and the rank has {len(place.cpus)} cores: the threads "
            "take turns",
            f"export OMP_NUM_THREADS={max(1, len(place.cpus) - 1)}, which leaves one to hpcdist",
        )
    quota = hardware.cpu_quota(place.root)
    granted = quota[0] if quota else None
    if granted is not None:
        section.fact("cores granted by the cgroup", granted, "host")
        if granted < min(len(place.cpus), machine):
            section.find(
                WARNING,
                f"the cgroup grants {granted:g} cores' time, the rank sees {len(place.cpus)}: the "
                "kernel stops it in the middle of operations when the time is used up",
                "raise the limit (docker run --cpus=N, Kubernetes resources.limits.cpu), or pass "
                "--cpuset-cpus with as many cores",
            )
    return section


def shared(ranks: list[tuple[int, frozenset[int]]], machine: int) -> dict[str, str] | None:
    """Return a finding if the ranks of a host have fewer cores than there are ranks.

    Parameters
    ----------
    ranks : list of (int, frozenset of int)
        Ranks of a host with the cores of each.
    machine : int
        Cores of the host.
    """
    together = frozenset().union(*(cpus for _, cpus in ranks))
    if len(ranks) <= len(together) or len(ranks) < 2:
        return None
    return {
        "severity": WARNING if len(ranks) > machine else FAULT,
        "what": f"{len(ranks)} ranks share {len(together)} of the host's {machine} cores: they "
        "take turns, and every operation waits for the slowest",
        "fix": f"start at most {machine} ranks per host"
        if len(ranks) > machine
        else f"give each rank cores of its own: {advice.give('cores')}, or srun --cpus-per-task=n "
        "--cpu-bind=cores",
    }
