"""Optimizers for several ranks."""

from __future__ import annotations

from hpcdist.optim.post_local_sgd import PostLocalSGDOptimizer
from hpcdist.parallel.zero import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]
