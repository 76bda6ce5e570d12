"""InfiniBand and RoCE adapters: ports, rates, and their distance from this rank's cores."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .binding import nodes_of
from .section import FAULT, WARNING, Place, Section

FOLDER = "sys/class/infiniband"


@dataclass(frozen=True)
class Port:
    """One port of an adapter.

    Parameters
    ----------
    device : str
        Name of the adapter, ``mlx5_0``.
    number : int
        Number of the port, from 1.
    state : str
        ``ACTIVE``, ``INIT``, ``DOWN``, ...
    rate : float
        Gbit/s; 0 if unknown.
    layer : str
        ``InfiniBand`` or ``Ethernet`` (RoCE).
    node : int
        NUMA node of the adapter; -1 if unknown.
    distance : int or None
        Distance to the nearest NUMA node of this rank, 10 for the same; None if unknown.
    """

    device: str
    number: int
    state: str
    rate: float
    layer: str
    node: int
    distance: int | None

    @property
    def name(self) -> str:
        """The port's name in UCX_NET_DEVICES."""
        return f"{self.device}:{self.number}"


def ports(place: Place) -> list[Port]:
    """Return all ports of all adapters, by name."""
    mine = [number for number, cpus in nodes_of(place).items() if cpus & place.cpus]
    found = []
    for device in place.entries(FOLDER):
        node = place.number(f"{FOLDER}/{device}/device/numa_node")
        node = -1 if node is None else node
        for number in place.entries(f"{FOLDER}/{device}/ports"):
            if not number.isdecimal():
                continue
            port = f"{FOLDER}/{device}/ports/{number}"
            rate = re.match(r"[\d.]+", place.read(f"{port}/rate"))
            found.append(
                Port(
                    device,
                    int(number),
                    place.read(f"{port}/state").rpartition(":")[2].strip() or "unknown",
                    float(rate[0]) if rate else 0.0,
                    place.read(f"{port}/link_layer") or "unknown",
                    node,
                    _distance(place, node, mine),
                )
            )
    return found


def _distance(place: Place, node: int, mine: list[int]) -> int | None:
    """Return the least distance from a NUMA node to those of this rank."""
    if node < 0 or not mine:
        return None
    row = place.read(f"sys/devices/system/node/node{node}/distance").split()
    numbers = sorted(nodes_of(place))
    known = dict(zip(numbers, row, strict=False))
    return min((int(known[each]) for each in mine if each in known), default=None)


def chosen(text: str, there: list[Port]) -> tuple[list[Port], list[str]]:
    """Return the ports that UCX_NET_DEVICES selects, and the names in it that do not exist.

    Names without a port mean each port; names of Ethernet interfaces are not judged here.
    """
    picked: list[Port] = []
    missing = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "all":
            return list(there), []
        matches = [port for port in there if name in (port.name, port.device)]
        picked += matches
        if not matches and re.match(r"(mlx|hfi|bnxt|irdma|ib|roce|qedr|efa)", name):
            missing.append(name)
    return picked, missing


def chosen_by_nccl(text: str, there: list[Port]) -> tuple[list[Port], bool]:
    """Return the ports that NCCL_IB_HCA selects, and whether it excludes: ``^``; ``=`` is exact."""
    excludes = text.startswith("^")
    text = text.removeprefix("^")
    exact = text.startswith("=")
    names = [part.strip() for part in text.removeprefix("=").split(",") if part.strip()]

    def matches(port: Port) -> bool:
        for name in names:
            device, _, number = name.partition(":")
            if number and number != str(port.number):
                continue
            if port.device == device or (not exact and port.device.startswith(device)):
                return True
        return False

    return [port for port in there if matches(port) != excludes], excludes


def rate_of(there: list[Port]) -> float:
    """Return the Gbit/s of all active ports together."""
    return sum(port.rate for port in there if port.state == "ACTIVE")


def collect(place: Place) -> Section:
    """Check the ports, and whether the settings select good ones."""
    section = Section("infiniband", "InfiniBand and RoCE")
    there = ports(place)
    if not place.entries(FOLDER):
        section.fact("adapters", "none", "host")
        for variable in ("UCX_NET_DEVICES", "NCCL_IB_HCA"):
            _, missing = chosen(place.env.get(variable, "").lstrip("^="), [])
            if missing and not place.env[variable].startswith("^"):
                section.find(FAULT, f"{variable} names {', '.join(missing)}, and this host has no "
                             "adapter", f"unset {variable}")  # fmt: skip
        return section
    for port in there:
        far = "" if port.distance is None else f", distance {port.distance} from the rank"
        numa = f", NUMA node {port.node}" if port.node >= 0 else ""
        section.fact(
            port.name, f"{port.state}, {port.rate:g} Gbit/s, {port.layer}{numa}{far}", "rank"
        )
    active = [port for port in there if port.state == "ACTIVE"]
    _states(section, place, there, active)
    _ucx(section, place, there, active)
    _nccl(section, place, there, active)
    return section


def _states(section: Section, place: Place, there: list[Port], active: list[Port]) -> None:
    for port in there:
        if port.state == "INIT":
            section.find(
                FAULT,
                f"port {port.name} is in state INIT: no subnet manager has seen it",
                "start opensm on one host of the fabric, or ask its administrator",
            )
    if not active:
        section.find(FAULT, "no port of any adapter is active: jobs would go over TCP, or fail",
                     "ibstat shows the ports; check cables, switch and subnet manager")  # fmt: skip
    if not any(name.startswith("uverbs") for name in place.entries("dev/infiniband")):
        section.find(
            FAULT,
            "there are adapters, but no /dev/infiniband/uverbs*: programs here cannot use them",
            "containers: docker run --device=/dev/infiniband --ulimit memlock=-1; else: modprobe "
            "ib_uverbs",
        )


def _ucx(section: Section, place: Place, there: list[Port], active: list[Port]) -> None:
    setting = place.env.get("UCX_NET_DEVICES", "").strip()
    if not setting:
        return
    picked, missing = chosen(setting, there)
    names = ",".join(port.name for port in active) or "none is active"
    for name in missing:
        section.find(FAULT, f"UCX_NET_DEVICES names {name}, which this host does not have",
                     f"unset UCX_NET_DEVICES, or choose from {names}")  # fmt: skip
    down = [port for port in picked if port.state != "ACTIVE"]
    if down and setting != "all":
        section.find(FAULT, f"UCX_NET_DEVICES names {down[0].name}, whose state is {down[0].state}",
                     f"unset UCX_NET_DEVICES, or choose from {names}")  # fmt: skip
    if active and not picked and not missing:
        section.find(WARNING, f"UCX_NET_DEVICES={setting} leaves the adapters out: {names}",
                     "unset UCX_NET_DEVICES")  # fmt: skip
    _near(section, "UCX_NET_DEVICES", picked, active, "{}")


def _nccl(section: Section, place: Place, there: list[Port], active: list[Port]) -> None:
    setting = place.env.get("NCCL_IB_HCA", "").strip()
    if not setting:
        return
    picked, _ = chosen_by_nccl(setting, there)
    if not picked:
        section.find(FAULT, f"NCCL_IB_HCA={setting} picks none of this host's adapters",
                     "unset NCCL_IB_HCA, or name some of "
                     + ",".join(sorted({port.device for port in there})))  # fmt: skip
    elif not any(port.state == "ACTIVE" for port in picked):
        section.find(FAULT, f"NCCL_IB_HCA={setting} picks only ports that are not active",
                     "export NCCL_IB_HCA==" + ",".join(port.name for port in active))  # fmt: skip


def _near(
    section: Section, variable: str, picked: list[Port], active: list[Port], form: str
) -> None:
    """Compare the selected adapters with the nearest ones."""
    known = [port for port in active if port.distance is not None]
    mine = [port.distance for port in picked if port.distance is not None]
    if not known or not mine:
        return
    near = min(known, key=lambda port: (port.distance or 0, -port.rate))
    if min(mine) > (near.distance or 0):
        section.find(
            WARNING,
            f"{variable} chooses {picked[0].name} on NUMA node {picked[0].node} (distance "
            f"{min(mine)}), and {near.name} is nearer to this rank's cores (distance "
            f"{near.distance}): every message crosses between the processors",
            f"export {variable}={form.format(near.name)} for this rank, or unset it: UCX takes the "
            "nearest",
        )
