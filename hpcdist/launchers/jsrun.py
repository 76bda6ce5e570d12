"""jsrun, the launcher of IBM LSF systems."""

from __future__ import annotations

from .base import Launcher

__all__ = ["Jsrun"]


class Jsrun(Launcher):
    """Started by jsrun. LSB_JOBID and LSB_DJOB_RANKFILE alone mean only that this is an LSF job."""

    name = "jsrun"
    present = ("JSM_NAMESPACE_RANK",)
    rank_variable = "JSM_NAMESPACE_RANK"
    size_variable = "JSM_NAMESPACE_SIZE"
    local_rank_variable = "JSM_NAMESPACE_LOCAL_RANK"
    local_size_variable = "JSM_NAMESPACE_LOCAL_SIZE"
