"""What only all ranks together show: shared cores, and whether all_reduce is fast enough."""

from __future__ import annotations

from typing import Any

from . import binding, reduce
from .section import FAULT, Place


def judge(whole: dict[str, Any], parts: list[Any], measured: dict[str, Any] | None) -> None:
    """Add what only all ranks together show."""
    hosts: dict[str, list[Any]] = {}
    for part in parts:
        hosts.setdefault(part["host"], []).append(part)
    crowded = False
    for there in hosts.values():
        ranks_with_cores = [(p["rank"], frozenset(p["cpus"])) for p in there]
        found = binding.shared(ranks_with_cores, there[0]["machine"])
        if found:
            crowded = True
            ranks = [p["rank"] for p in there]
            whole["findings"].append({"section": "binding", **found, "ranks": ranks})
    if measured is None:
        whole["all_reduce"] = {
            "explained": "not measured: one rank has no other to reduce with. "
            "mpirun -n 2 python -m hpcdist diagnose measures."
        }
        return
    local_ranks = max(map(len, hosts.values()))
    link = min(part["link"] for part in parts) * 1e9 / 8 if len(hosts) > 1 else 0.0
    known = len(hosts) == 1 or link > 0
    limit = reduce.expected(len(parts), local_ranks, measured["copy_bytes_per_s"], link)
    verdict = reduce.judge(
        measured["best_s"], limit, measured["latency_best_s"], len(hosts), crowded, known
    )
    everyone = [part["rank"] for part in parts]
    if not measured["correct"]:
        whole["findings"].append({
            "section": "all_reduce", "severity": FAULT, "what": "all_reduce gave a wrong sum",
            "fix": "do not use this MPI; show python -m hpcdist diagnose --json to its authors",
            "ranks": everyone,
        })  # fmt: skip
    if verdict:
        whole["findings"].append({"section": "all_reduce", **verdict, "ranks": everyone})
    whole["all_reduce"] = {
        **measured,
        "expected_s": limit if known else None,
        "link_bytes_per_s": link or None,
        "verdict": "not judged" if crowded or not known else "slow" if verdict else "good",
        "explained": _explain(measured, limit, link, local_ranks, len(hosts), crowded, known),
    }


def _explain(
    measured: dict[str, Any], limit: float, link: float, local_ranks: int, hosts: int,
    crowded: bool, known: bool,
) -> str:  # fmt: skip
    """How the verdict came about, in words and numbers."""
    mib = measured["bytes"] >> 20
    text = (
        f"8 bytes take {measured['latency_s'] * 1e6:.1f} us, {mib} MiB take "
        f"{measured['seconds'] * 1e3:.1f} ms (medians; the fastest {measured['best_s'] * 1e3:.1f} "
        "ms; each call as its slowest rank saw it). "
    )
    if crowded:
        return text + "Not judged: ranks share cores, so the scheduler decides."
    if not known:
        return text + "Not judged: the rate of the links between the hosts is not known."
    text += f"Expected are {limit * 1e3:.1f} ms"
    if local_ranks > 1:
        text += (
            f": each of {local_ranks} ranks on a host copies at best "
            f"{measured['copy_bytes_per_s'] / 1e9:.1f} GB/s while all do, and reduce-scatter and "
            f"all-gather through memory move 7 bytes for each byte of {local_ranks - 1}/"
            f"{local_ranks} of the tensor, where a copy moves 2"
        )
    if hosts > 1:
        text += (
            f"; {link / 1e9:.1f} GB/s of links carry 2 x {hosts - 1}/{hosts} of it between the "
            "hosts"
        )
    times = measured["best_s"] / limit
    text += (
        f". The fastest takes {times:.1f} times that (below 1 thanks to caches); up to "
        f"{reduce.GOOD:g} times is good."
        if round(times, 1) < 1
        else f". The fastest takes {times:.1f} times that; up to {reduce.GOOD:g} times is good."
    )
    if measured["seconds"] > 2 * measured["best_s"]:
        text += (
            " The median is more than twice the fastest: something else uses the cores or the "
            "network."
        )
    if hosts > 1:
        text += (
            " The threshold comes from measurements within a host; between hosts it is an estimate."
        )
    return text


def ethernet(place: Place) -> float:
    """Gbit/s of the fastest network adapter that is up, 0 where none says.

    Interfaces without a device behind them (loopback, bridges, veth) state rates that mean nothing.
    """
    best = 0.0
    for name in place.entries("sys/class/net"):
        speed = place.number(f"sys/class/net/{name}/speed")
        real = "device" in place.entries(f"sys/class/net/{name}")
        if real and speed and speed > 0 and place.read(f"sys/class/net/{name}/operstate") == "up":
            best = max(best, speed / 1000)
    return best
