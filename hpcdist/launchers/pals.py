"""PALS, the launcher of HPE Cray systems under PBS."""

from __future__ import annotations

from .base import Launcher

__all__ = ["Pals"]


class Pals(Launcher):
    """Started by PALS' mpiexec. What it does not say is asked from MPI: PMI_SIZE may be missing,
    and PALS_NODEID numbers the nodes without telling how many there are.
    """

    name = "PALS"
    present = ("PALS_RANKID",)
    rank_variable = "PALS_RANKID"
    size_variable = "PMI_SIZE"
    local_rank_variable = "PALS_LOCAL_RANKID"
    local_size_variable = "PALS_LOCAL_SIZE"
