"""flux run, the launcher of the Flux resource manager."""

from __future__ import annotations

from .base import Launcher

__all__ = ["Flux"]


class Flux(Launcher):
    """Started by flux run, which does not export the number of its tasks on this node."""

    name = "flux run"
    present = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE")
    rank_variable = "FLUX_TASK_RANK"
    size_variable = "FLUX_JOB_SIZE"
    local_rank_variable = "FLUX_TASK_LOCAL_ID"
    nodes_variable = "FLUX_JOB_NNODES"
