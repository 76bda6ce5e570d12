"""GPUs, the driver, NCCL, and whether MPI takes GPU memory."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from typing import Any

from .section import NOTE, WARNING, Place, Section

__all__ = ["collect"]


def collect(place: Place) -> Section:
    """Driver and GPUs from /proc; torch's view and MPI's where MPI runs."""
    section = Section("gpu", "GPUs")
    driver = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", place.read("proc/driver/nvidia/version"))
    names = []
    for folder in place.entries("proc/driver/nvidia/gpus"):
        model = re.search(
            r"Model:\s*(.+)", place.read(f"proc/driver/nvidia/gpus/{folder}/information")
        )
        names.append(model[1].strip() if model else "unknown")
    if not driver and not names:
        section.fact("GPUs", "none", "host")
        return section
    section.fact("driver", driver[0] if driver else "unknown", "job")
    section.fact("GPUs", f"{len(names)}: {', '.join(sorted(set(names)))}", "host")
    section.fact("CUDA_VISIBLE_DEVICES", place.env.get("CUDA_VISIBLE_DEVICES", "not set"), "rank")
    if place.running:
        _torch(section)
        _mpi(section)
    return section


def _torch(section: Section) -> None:
    """What torch can do with them; only here is torch imported, and only where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    section.fact("torch's CUDA", torch.version.cuda or "none")
    if torch.version.cuda is None:
        section.find(WARNING, "there are GPUs, and this torch is built without CUDA",
                     "install torch from the index for CUDA: "
                     "https://pytorch.org/get-started/locally")  # fmt: skip
        return
    if not torch.cuda.is_available():
        section.find(WARNING, "there are GPUs, and torch cannot use them",
                     "nvidia-smi shows whether the driver works and is new enough for CUDA "
                     f"{torch.version.cuda}; containers: docker run --gpus all")  # fmt: skip
        return
    try:
        version: Any = torch.cuda.nccl.version()
        section.fact("NCCL", ".".join(map(str, version)))
    except (AttributeError, RuntimeError, OSError):
        section.fact("NCCL", "none")


def _mpi(section: Section) -> None:
    """The library's own answer to whether it takes GPU memory; no answer means no."""
    from hpcdist import _loader

    aware = None
    for path in _loader.loaded_libraries()[:1]:
        try:
            query = ctypes.CDLL(path).MPIX_Query_cuda_support
        except (AttributeError, OSError):
            continue
        query.restype = ctypes.c_int
        aware = bool(query())
    section.fact(
        "MPI takes GPU memory", {None: "does not say: no", True: "yes", False: "no"}[aware]
    )
    if not aware:
        section.find(NOTE, "this MPI does not take GPU memory: tensors of GPUs go through NCCL",
                     "nothing to do; for MPI on GPU memory use a CUDA-aware build")  # fmt: skip
