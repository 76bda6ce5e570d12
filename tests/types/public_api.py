# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What type checkers are to find in the public API; never run.

mypy checks it with the rest (``pyproject.toml``); pyright: ``pyright tests/types``. An unused
``type: ignore`` is an error, so each marks a mistake that must be reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from typing_extensions import assert_type

import hpcdist as dist
from hpcdist import ProcessGroup, Work


def collectives(t: torch.Tensor, parts: list[torch.Tensor], either: bool) -> None:
    assert_type(dist.all_reduce(t), None)
    assert_type(dist.all_reduce(t, async_op=False), None)
    assert_type(dist.all_reduce(t, async_op=True), Work)
    assert_type(dist.all_reduce(t, async_op=either), Work | None)
    dist.all_reduce(t, async_op=True).wait()
    dist.all_reduce_coalesced(parts, async_op=True).wait()
    dist.reduce(t, 0, async_op=True).wait()
    dist.reduce_scatter(t, parts, async_op=True).wait()
    dist.reduce_scatter_single(t, t, async_op=True).wait()
    dist.reduce_scatter_tensor(t, t, async_op=True).wait()
    dist.broadcast(t, 0, async_op=True).wait()
    dist.all_gather(parts, t, async_op=True).wait()
    dist.all_gather_single(t, t, async_op=True).wait()
    dist.all_gather_into_tensor(t, t, async_op=True).wait()
    dist.all_gather_coalesced([parts], parts, async_op=True).wait()
    dist.gather(t, parts, 0, async_op=True).wait()
    dist.gather_single(t, t, async_op=True).wait()
    dist.scatter(t, parts, async_op=True).wait()
    dist.all_to_all(parts, parts, async_op=True).wait()
    dist.all_to_all_single(t, t, async_op=True).wait()
    dist.barrier(async_op=True).wait()
    assert_type(dist.barrier(), None)
    assert_type(dist.isend(t, 1), Work)
    assert_type(dist.irecv(t), Work)
    assert_type(dist.recv(t), int)
    dist.barrier().wait()  # type: ignore
    dist.all_reduce(t, async_op=either).wait()  # type: ignore


def tensors(t: torch.Tensor, a: np.ndarray[Any, Any], parts: list[np.ndarray[Any, Any]]) -> None:
    dist.all_reduce(a, torch.distributed.ReduceOp.MAX)
    dist.all_reduce(bytearray(8), dist.ReduceOp.BOR)
    dist.all_gather(parts, a)
    dist.all_gather([t, t], t)
    dist.scatter(a, parts if dist.get_rank() == 0 else None)
    dist.all_to_all_single(t, t, [1, 2], (2, 1))
    dist.all_reduce(1.0)  # type: ignore
    dist.all_reduce([t, t])  # type: ignore
    dist.all_reduce(t, "sum")  # type: ignore
    dist.all_gather(3, t)  # type: ignore
    dist.reduce(t, 0, group=0)  # type: ignore
    dist.all_to_all_single(t, t, 2)  # type: ignore


def groups(t: torch.Tensor) -> None:
    pg = dist.new_group([0])
    assert_type(pg, ProcessGroup)
    assert_type(pg.broadcast(t, 0), Work)
    pg.gather([t], t, 0).wait()
    pg.barrier().wait()
    assert_type(pg.allreduce([t]), Work)
    assert_type(pg.rank(), int)
    dist.all_reduce(t, group=pg)
    pg.all_reduce(t)  # type: ignore


def names() -> None:
    print(dist.allreduce)  # type: ignore
    dist.DistributedDataParallel(torch.nn.Linear(1, 1)).finalize_backward()
    dist.DistributedSampler([1])
    print(dist.BuiltinCommHookType.ALLREDUCE, dist.record_comm)
    print(dist.DistributedDataParallels)  # type: ignore
