"""The place of a rank on its node: its cores, its GPU, and the adapters near that GPU.

All of it is read from ``/proc`` and ``/sys``; neither CUDA nor MPI is asked, so it can be read
before either is started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: PCI: NVIDIA, and display controllers (consumer and professional cards, data centre cards).
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")


def allowed_cpus() -> frozenset[int]:
    """Cores this process may run on.

    Returns
    -------
    frozenset of int
        From the affinity mask, which launchers set; all cores where the system has no masks.
    """
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:
        return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: str | os.PathLike[str] = "/") -> tuple[float, int] | None:
    """How much of the cores' time the control group of this process grants.

    Containers and batch systems set it. All processes of the group share it.

    Parameters
    ----------
    root : path
        What stands for ``/``.

    Returns
    -------
    tuple of (float, int) or None
        Cores, and the number (inode) of the group that sets the limit, the least of those around
        this process; None where there is no limit.
    """
    top = Path(root) / "sys/fs/cgroup"
    least: tuple[float, int] | None = None
    for line in _read(Path(root) / "proc/self/cgroup").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            mount = top
        elif "cpu" in controllers.split(","):
            mount = top / "cpu"
        else:
            continue
        folder = mount / path.lstrip("/")
        # inside a container the path may be the host's, and the mount the group's own
        for each in (folder, *folder.parents):
            if not each.is_relative_to(mount):
                break
            cores = _granted(each)
            if cores is not None and (least is None or cores < least[0]):
                least = cores, each.stat().st_ino
    return least


def _granted(folder: Path) -> float | None:
    """The cores' time that one control group's files grant: those of version 2, or of 1."""
    text = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us"),
        _read(folder / "cpu.cfs_period_us"),
    ]
    if len(text) == 2 and text[0].isdecimal() and text[1].isdecimal() and int(text[1]):
        return int(text[0]) / int(text[1])
    return None


def binding_advice(family: str, cpus: frozenset[int], machine_cpus: int) -> str | None:
    """Say what to pass to the launcher when all threads of a rank share one core.

    A rank has its main thread, torch's threads and hpcdist's communication thread. On one core they
    take turns, and communication does not overlap computation.

    Parameters
    ----------
    family : str
        The MPI implementation, as :func:`hpcdist.launchers.mpi_family` names it.
    cpus : frozenset of int
        Cores this rank may use.
    machine_cpus : int
        Cores of the machine.

    Returns
    -------
    str or None
        The advice; None when the rank has more than one core, or the machine has only one.
    """
    if len(cpus) > 1 or machine_cpus <= 1:
        return None
    if family == "Open MPI":
        option = "mpirun --bind-to none, or --map-by slot:PE=2 --bind-to core for two cores a rank"
    elif family in ("MPICH", "MVAPICH"):
        option = "mpirun -bind-to none"
    elif family == "Intel MPI":
        option = "mpirun -genv I_MPI_PIN off"
    else:
        option = "the launcher's option for unbound processes"
    core = ", ".join(str(cpu) for cpu in sorted(cpus))
    return (
        f"this rank and all its threads are bound to core {core} of {machine_cpus}: communication "
        f"will not overlap computation. Pass {option}; under srun --cpus-per-task=2 "
        "--cpu-bind=cores. torch sees one core too."
    )


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node.

    Parameters
    ----------
    bus : str
        PCI address, ``0000:1b:00.0``.
    model : str
        As the driver names it; empty where the driver does not run.
    uuid : str
        ``GPU-...``; empty likewise.
    node : int
        NUMA node, -1 where the system does not tell.
    path : tuple of str
        The PCI bridges above it and itself, outermost first.
    """

    bus: str
    model: str
    uuid: str
    node: int
    path: tuple[str, ...]


@dataclass(frozen=True)
class Adapter:
    """An InfiniBand or RoCE adapter of this node.

    Parameters
    ----------
    name : str
        As UCX_NET_DEVICES and NCCL_IB_HCA name it, without a port: ``mlx5_0``.
    node : int
        NUMA node, -1 where the system does not tell.
    path : tuple of str
        The PCI bridges above it and itself, outermost first.
    """

    name: str
    node: int
    path: tuple[str, ...]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _place(device: Path) -> tuple[int, tuple[str, ...]]:
    """NUMA node and PCI path of a device's folder in sysfs."""
    node = _read(device / "numa_node")
    parts = Path(os.path.realpath(device)).parts
    path = tuple(
        part for part in parts if re.fullmatch(r"pci[0-9a-f:]+|[0-9a-f]+(:[0-9a-f]+)+\.\d", part)
    )
    return int(node) if re.fullmatch(r"-?\d+", node) else -1, path


def gpus(root: str | os.PathLike[str] = "/") -> list[Gpu]:
    """The GPUs of NVIDIA's in this node, in the order of the PCI bus.

    Parameters
    ----------
    root : path
        What stands for ``/``.

    Returns
    -------
    list of Gpu
        Also those that CUDA_VISIBLE_DEVICES hides.
    """
    top = Path(root)
    driver = top / "proc/driver/nvidia/gpus"
    devices = top / "sys/bus/pci/devices"
    buses = {name.lower() for name in _names(driver)}
    for name in _names(devices):
        kind = _read(devices / name / "class")[:6]
        if _read(devices / name / "vendor") == _NVIDIA and kind in _DISPLAY:
            buses.add(name.lower())
    found = []
    for bus in sorted(buses):
        about = _read(driver / bus / "information")
        fields = dict(re.findall(r"^(Model|GPU UUID):[ \t]*(\S.*?)[ \t]*$", about, re.MULTILINE))
        node, path = _place(devices / bus)
        found.append(Gpu(bus, fields.get("Model", ""), fields.get("GPU UUID", ""), node, path))
    return found


def visible(there: list[Gpu], environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Parameters
    ----------
    there : list of Gpu
        From :func:`gpus`.
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    list of Gpu
        Place N is torch's ``cuda:N``, if all GPUs are of one model or CUDA_DEVICE_ORDER is
        PCI_BUS_ID: without that CUDA counts the fastest first. As in CUDA, the list ends before
        the first entry that means no GPU, or one named before.
    """
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(there)
    found: list[Gpu] = []
    for part in (part.strip() for part in text.split(",")):
        if part.isdecimal() and int(part) < len(there):
            one = there[int(part)]
        else:
            matches = [
                gpu for gpu in there if part.startswith("GPU-") and gpu.uuid.startswith(part)
            ]
            if len(matches) != 1:
                break
            one = matches[0]
        if one in found:
            return []  # CUDA takes none at all then
        found.append(one)
    return found


def gpu_of(local_rank: int, count: int) -> int:
    """Index of a rank's GPU among those it can see.

    Parameters
    ----------
    local_rank : int
        Place of the rank among those of its node.
    count : int
        GPUs that it can see; 1 where the launcher gives each rank its own.

    Returns
    -------
    int
        Ranks take turns; more ranks than GPUs share them.

    Raises
    ------
    ValueError
        If there is no GPU.
    """
    if count < 1:
        raise ValueError("this rank can see no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    return local_rank % count


def adapters(root: str | os.PathLike[str] = "/") -> list[Adapter]:
    """The InfiniBand and RoCE adapters of this node, by name.

    Parameters
    ----------
    root : path
        What stands for ``/``.
    """
    folder = Path(root) / "sys/class/infiniband"
    return [Adapter(name, *_place(folder / name / "device")) for name in _names(folder)]


def nearest(gpu: Gpu, there: list[Adapter]) -> tuple[list[Adapter], str]:
    """The adapters nearest to a GPU, and how near.

    Parameters
    ----------
    gpu : Gpu
        From :func:`gpus`.
    there : list of Adapter
        From :func:`adapters`.

    Returns
    -------
    tuple
        All that are equally near, and as ``nvidia-smi topo`` names it: ``PIX`` (one PCI bridge
        between them), ``PXB`` (several), ``PHB`` (the processor's PCI root), ``NODE`` (the same
        NUMA node), ``SYS`` (another one), or an empty text where there is none or nothing is
        known.
    """
    best: list[Adapter] = []
    least = (9, 0)
    for each in there:
        distance = _distance(gpu, each)
        if distance < least:
            best, least = [each], distance
        elif distance == least:
            best.append(each)
    name = {0: "PIX", 1: "PXB", 2: "PHB", 3: "NODE", 4: "SYS"}.get(least[0], "")
    return (best, name) if name else ([], "")


def _distance(gpu: Gpu, adapter: Adapter) -> tuple[int, int]:
    """Kind of connection, then bridges in between; less is nearer."""
    common = 0
    for one, other in zip(gpu.path, adapter.path, strict=False):
        if one != other:
            break
        common += 1
    apart = len(gpu.path) + len(adapter.path) - 2 * common
    if common > 1:  # below a bridge of the root's: each has at least itself of its own
        return (0 if apart <= 4 else 1), apart
    if common == 1:
        return 2, 0
    if gpu.node >= 0 and adapter.node >= 0:
        return (3 if gpu.node == adapter.node else 4), 0
    return 9, 0
