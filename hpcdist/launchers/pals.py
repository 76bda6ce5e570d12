"""PALS, the launcher of HPE Cray systems under PBS."""

from __future__ import annotations

from .base import Launcher

__all__ = ["Pals"]


class Pals(Launcher):
    """Started by PALS' mpiexec.

    MPI supplies what it does not export: PMI_SIZE may be missing, and PALS_NODEID is the number of
    this node, without the number of nodes.
    """

    name = "PALS"
    present = ("PALS_RANKID",)
    rank_variable = "PALS_RANKID"
    size_variable = "PMI_SIZE"
    local_rank_variable = "PALS_LOCAL_RANKID"
    local_size_variable = "PALS_LOCAL_SIZE"
