"""mpirun_rsh of MVAPICH2."""

from __future__ import annotations

from .base import Launcher

__all__ = ["Mvapich"]


class Mvapich(Launcher):
    """Started by mpirun_rsh."""

    name = "MVAPICH's mpirun_rsh"
    present = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    rank_variable = "MV2_COMM_WORLD_RANK"
    size_variable = "MV2_COMM_WORLD_SIZE"
    local_rank_variable = "MV2_COMM_WORLD_LOCAL_RANK"
    local_size_variable = "MV2_COMM_WORLD_LOCAL_SIZE"
    nodes_variable = "MV2_NUM_NODES_IN_JOB"
