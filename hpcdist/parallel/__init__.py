"""Data-parallel training: one replica of the module per rank, gradients averaged between them."""

from __future__ import annotations

from hpcdist.parallel.grad_bucket import GradBucket
from hpcdist.parallel.join import Join, Joinable, JoinHook
from hpcdist.parallel.module import DistributedDataParallel

__all__ = ["DistributedDataParallel", "GradBucket", "Join", "JoinHook", "Joinable"]
