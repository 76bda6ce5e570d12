"""Deprecated names that torch keeps for old programs."""

from __future__ import annotations

import warnings
from typing import Any

from hpcdist._ops import ReduceOp


class _ReduceOpAlias:
    """Deprecated: the reductions under their old name; use :class:`hpcdist.ReduceOp`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        warnings.warn(
            f"hpcdist.reduce_op is deprecated; use hpcdist.ReduceOp.{name}",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(ReduceOp, name)


#: Deprecated alias of :class:`hpcdist.ReduceOp`.
reduce_op = _ReduceOpAlias()


def _make_nccl_premul_sum(factor: Any) -> ReduceOp:
    """Return the reduction that multiplies every rank's values by a factor: PREMUL_SUM(factor)."""
    return ReduceOp.PREMUL_SUM(factor)
