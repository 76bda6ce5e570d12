"""Open MPI's mpirun."""

from __future__ import annotations

from .base import Launcher

__all__ = ["OpenMpi"]


class OpenMpi(Launcher):
    """Started by Open MPI's mpirun (version 5's PRRTE does not export the number of nodes)."""

    name = "Open MPI's mpirun"
    present = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    rank_variable = "OMPI_COMM_WORLD_RANK"
    size_variable = "OMPI_COMM_WORLD_SIZE"
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"
    local_size_variable = "OMPI_COMM_WORLD_LOCAL_SIZE"
    nodes_variable = "OMPI_MCA_orte_num_nodes"  # version 4
