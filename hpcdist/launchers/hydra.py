"""Hydra, the launcher of MPICH and Intel MPI."""

from __future__ import annotations

from .base import Launcher

__all__ = ["Hydra"]


class Hydra(Launcher):
    """Started by hydra, which does not export the number of nodes.

    PMI_RANK alone is not enough: srun and PALS set it too.
    """

    name = "hydra (the mpirun of MPICH and Intel MPI)"
    over_pmi_fd = True
    present = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    rank_variable = "PMI_RANK"
    size_variable = "PMI_SIZE"
    local_rank_variable = "MPI_LOCALRANKID"
    local_size_variable = "MPI_LOCALNRANKS"
