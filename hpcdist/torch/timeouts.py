"""Lets ``torch.distributed.distributed_c10d._set_pg_timeout`` set the timeout of a group of ours.

Up to torch 2.13 it sets that of backends of torch's own classes, NCCL's and gloo's, and warns about
every other one. A program may have taken the function from torch before hpcdist was imported, so it
cannot be replaced. It asks the group for the backend of each device; it, and nothing else, gets an
object that passes for one of torch's.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_NAME = "_set_pg_timeout"


def asks_to_set_it(depth: int = 2) -> bool:
    """Whether torch's function is what called the caller of this one."""
    code = sys._getframe(depth).f_code
    return code.co_name == _NAME and code.co_filename == dist.distributed_c10d.__file__


class settable:
    """A group's backend, as torch's function sees it.

    Parameters
    ----------
    group : BridgeGroup
        The group; its timeout is that of all its backends.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return getattr(dist, "ProcessGroupGloo", settable)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)
