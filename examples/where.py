"""Where the tensors of an example are: --device cpu or --device cuda; shared by the examples."""

from __future__ import annotations

import argparse
import sys

import torch

import hpcdist as dist
from hpcdist import hardware


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --device and --backend to a program's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="tensors' place")
    parser.add_argument(
        "--backend", help="by default MPI, and NCCL for GPUs; mpi also where ranks share a GPU"
    )
    return parser


def options(text: str) -> argparse.Namespace:
    """The options of a program that has no others; `text` is its docstring."""
    return add_options(argparse.ArgumentParser(description=text.splitlines()[0])).parse_args()


def start(chosen: argparse.Namespace) -> torch.device:
    """Start hpcdist, on GPUs where that was asked for, and say where this rank's tensors go.

    Tensors that are made without a device are made there from now on.
    """
    device = torch.device("cpu")
    if chosen.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit(
                "--device cuda: torch cannot use a GPU here; python -m hpcdist diagnose says why"
            )
        # before the start: NCCL is chosen for those who have GPUs
        rank_here = dist.get_node_local_rank(fallback_rank=0)
        device = torch.device("cuda", hardware.gpu_of(rank_here, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    dist.init_process_group(chosen.backend)
    return device
