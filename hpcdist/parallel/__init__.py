"""Data-parallel training: one replica of the module per rank, gradients averaged between them."""

from __future__ import annotations

from hpcdist._torch_version import explain

with explain():
    from hpcdist.parallel.comm_hooks.builtin import BuiltinCommHookType
    from hpcdist.parallel.ddp.buffers import BufferCommHookLocation
    from hpcdist.parallel.ddp.logger import Logger
    from hpcdist.parallel.ddp.module import DistributedDataParallel
    from hpcdist.parallel.ddp.precision import MixedPrecision
    from hpcdist.parallel.join import Join, Joinable, JoinHook
    from hpcdist.parallel.reducer.grad_bucket import GradBucket
    from hpcdist.parallel.reducer.reducer import Reducer
    from hpcdist.parallel.reducer.sparse import all_reduce_sparse
    from hpcdist.parallel.sync_batchnorm import SyncBatchNorm

__all__ = [
    "BuiltinCommHookType",
    "BufferCommHookLocation",
    "DistributedDataParallel",
    "GradBucket",
    "Join",
    "JoinHook",
    "Joinable",
    "Logger",
    "MixedPrecision",
    "Reducer",
    "SyncBatchNorm",
    "all_reduce_sparse",
]
