"""GPUs, the driver, NCCL, what is near a rank's GPU, and whether MPI takes GPU memory."""

from __future__ import annotations

import importlib.util
import re

from hpcdist import _nccl_loader, hardware, launchers
from hpcdist.errors import DistBackendError

from . import advice
from .binding import nodes_of, short
from .section import FAULT, NOTE, WARNING, Place, Section

#: What hides all GPUs where CUDA_VISIBLE_DEVICES begins with it; the second is Slurm's.
_NONE = ("-1", "NoDevFiles")


def collect(place: Place) -> Section:
    """Check driver and GPUs in /proc and /sys, and what torch, NCCL and a running MPI report."""
    section = Section("gpu", "GPUs")
    driver = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", place.read("proc/driver/nvidia/version"))
    there = hardware.gpus(place.root)
    if not driver and not there:
        section.fact("GPUs", "none", "host")
        return section
    section.fact("driver", driver[0] if driver else "none", "job")
    models = ", ".join(sorted({gpu.model or "unknown" for gpu in there}))
    section.fact("GPUs", f"{len(there)}: {models}", "host")
    if not driver:
        section.find(FAULT, "there are GPUs, and NVIDIA's driver is not loaded",
                     "load it (modprobe nvidia), or in a container start it with the GPUs: docker "
                     "run --gpus all, apptainer exec --nv")  # fmt: skip
    _links(section, place)
    _own(section, place, there)
    if place.running:
        _torch(section)
        _nccl(section)
        _mpi(section)
    return section


def _own(section: Section, place: Place, there: list[hardware.Gpu]) -> None:
    """This rank's GPU, and what is near it."""
    setting = place.env.get("CUDA_VISIBLE_DEVICES")
    section.fact("CUDA_VISIBLE_DEVICES", "not set" if setting is None else setting, "rank")
    seen = hardware.visible(there, place.env)
    wanted = [part for part in (setting or "").split(",") if part.strip()]
    if wanted and wanted[0].strip() in _NONE:
        wanted = []
    if not (setting or "").startswith("MIG") and len(seen) < len(wanted):
        section.find(FAULT, f"CUDA_VISIBLE_DEVICES={setting} names {len(wanted)} GPUs, and CUDA "
                     f"takes {len(seen)} of this host's {len(there)}: it stops at a number that is "
                     "not there, and takes none where one is named twice",
                     "unset CUDA_VISIBLE_DEVICES, or name some of "
                     f"{','.join(map(str, range(len(there))))}")  # fmt: skip
    launch = launchers.detect(place.env)
    if not seen or launch is None or launch.local_rank is None:
        return
    index = hardware.gpu_of(launch.local_rank, len(seen))
    gpu = seen[index]
    section.fact("GPU of the rank", f"cuda:{index}, {gpu.bus}", "rank")
    section.fact("its NUMA node", gpu.node if gpu.node >= 0 else "unknown", "rank")
    near, how = hardware.nearest(gpu, hardware.adapters(place.root))
    names = ", ".join(each.name for each in near)
    section.fact("adapters nearest to it", f"{names} ({how})" if near else "none", "rank")
    nodes = nodes_of(place)
    mine = sorted(number for number, cpus in nodes.items() if cpus & place.cpus)
    if gpu.node in nodes and mine and gpu.node not in mine:
        section.find(WARNING, f"this rank runs on NUMA node {short(mine)}, and its GPU is at "
                     f"node {gpu.node}: copies between them cross the processors' link",
                     "bind ranks to cores of their GPUs' nodes: srun --gpus-per-task=1 "
                     f"--gpu-bind=closest, or {advice.give('NUMA')}")  # fmt: skip
    if launch.local_size is not None and launch.local_size > len(seen) and len(seen) > 0:
        alone = len(seen) == 1 and setting is not None
        if not alone:  # a launcher that gives each rank one GPU hides the others
            section.find(NOTE, f"{launch.local_size} ranks of this host share {len(seen)} GPUs: "
                         "NCCL refuses two ranks on one GPU",
                         "start as many ranks as there are GPUs, or use backend='mpi', which "
                         "shares them")  # fmt: skip


def _links(section: Section, place: Place) -> None:
    """Check NVLink switches, and adapters that read GPU memory, in the driver's files."""
    switches = place.entries("proc/driver/nvidia-nvswitch/devices")
    section.fact("NVLink switches", len(switches), "host")
    peer = next(
        (name for name in ("nvidia_peermem", "nv_peer_mem") if place.entries(f"sys/module/{name}")),
        "",
    )
    section.fact("GPUDirect RDMA", peer or "no module (dma-buf needs none)", "host")
    gdrcopy = bool(place.entries("sys/module/gdrdrv"))
    section.fact("GDRCopy", "yes" if gdrcopy else "no", "host")
    if place.entries("sys/class/infiniband") and not peer:
        section.find(NOTE, "there are adapters and GPUs, and no module that lets adapters read GPU "
                     "memory: where the driver and NCCL do not use dma-buf, data go through the "
                     "host",
                     "modprobe nvidia_peermem (it comes with the driver)")  # fmt: skip


def _torch(section: Section) -> None:
    """Check torch's view of the GPUs; only here is torch imported, if it is installed."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    section.fact("torch's CUDA", torch.version.cuda or "none")
    if torch.version.cuda is None:
        section.find(WARNING, "there are GPUs, and this torch is built without CUDA",
                     "install torch from the index for CUDA: "
                     "https://pytorch.org/get-started/locally")  # fmt: skip
    elif not torch.cuda.is_available():
        section.find(WARNING, "there are GPUs, and torch cannot use them",
                     "nvidia-smi shows whether the driver works and is new enough for CUDA "
                     f"{torch.version.cuda}; containers: docker run --gpus all")  # fmt: skip


def _nccl(section: Section) -> None:
    """Check the library that a group would load."""
    try:
        found = _nccl_loader.load()
    except DistBackendError as error:
        section.fact("NCCL", "none")
        section.find(WARNING, "there are GPUs and no NCCL: CUDA tensors go over MPI",
                     str(error).rpartition(". ")[2])  # fmt: skip
        return
    section.fact("NCCL", _nccl_loader.version_text(found.version))
    section.fact("NCCL's file", f"{found.path} ({found.found})", "host")


def _mpi(section: Section) -> None:
    """Check whether MPI reports that it takes GPU memory; no answer means no."""
    from hpcdist.backends.cuda_over_mpi import aware

    takes, who = aware.library_report()
    section.fact("MPI takes GPU memory", f"{'yes' if takes else 'no'}: {who}")
    if not takes:
        section.find(NOTE, "this MPI does not take GPU memory: over MPI, CUDA tensors pass through "
                     "pinned host memory",
                     "nothing to do where NCCL is used; for MPI on GPU memory use a CUDA-aware "
                     "build")  # fmt: skip
