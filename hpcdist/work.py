"""The handle of an operation that goes on while the program does something else."""

from __future__ import annotations

from hpcdist._engine import Work
from hpcdist._ops import ReduceOp

__all__ = ["ReduceOp", "Work"]
