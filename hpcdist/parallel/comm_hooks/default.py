"""Hooks that average in full precision, in half precision, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpcdist._ops import ReduceOp
from hpcdist.groups.state import ProcessGroup
from hpcdist.parallel.comm_hooks._arguments import group_of
from hpcdist.parallel.comm_hooks._buckets import dense_buffer
from hpcdist.parallel.comm_hooks._future import Driven
from hpcdist.parallel.reducer.bounded import give_up
from hpcdist.parallel.reducer.grad_bucket import GradBucket
from hpcdist.parallel.reducer.results import deliver_gradients
from hpcdist.parallel.reducer.transfer import PLACES

Future = torch.futures.Future
Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def average(group: ProcessGroup, tensor: torch.Tensor, api: str) -> Future[torch.Tensor]:
    """Start to average a tensor over a group, in place; all of its ranks must call it."""
    work = group.carrier.all_reduce(tensor, ReduceOp.AVG, True, api=api)

    def finish() -> torch.Tensor:
        work.wait()
        return tensor

    return Driven(finish, work.wait)


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients, as without a hook.

    DDP calls it on all ranks, for each bucket.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        The hook's state: the group that averages. None means the default group.
    bucket : GradBucket
        From DDP.

    Returns
    -------
    torch.futures.Future
        The averages.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook``.
    """
    return average(
        group_of(process_group), dense_buffer(bucket, "allreduce_hook"), "allreduce_hook"
    )


def _in_half(
    dtype: torch.dtype, api: str, process_group: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    group, buffer = group_of(process_group), dense_buffer(bucket, api)
    half = buffer.to(dtype)
    # Divided before they are added: the sum of many ranks' gradients may be beyond float16.
    half.div_(group.size())
    work = group.carrier.all_reduce(half, ReduceOp.SUM, True, api=api)

    def decompress() -> torch.Tensor:
        work.wait()
        return buffer.copy_(half)

    return Driven(decompress, work.wait)


def fp16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average the gradients in float16: half the bytes, eleven bits of precision, small range.

    DDP calls it on all ranks, for each bucket.

    Parameters
    ----------
    process_group, bucket
        As for :func:`allreduce_hook`.

    Returns
    -------
    torch.futures.Future
        The averages, in the dtype of the gradients.

    Notes
    -----
    Gradients are converted before they are divided, as with torch, so those beyond 65504 become
    infinite, and those below about 6e-8 times the number of ranks zero. Their sum may be larger.
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook``.
    """
    return _in_half(torch.float16, "fp16_compress_hook", process_group, bucket)


def bf16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average the gradients in bfloat16: half the bytes, eight bits of precision, float32's range.

    DDP calls it on all ranks, for each bucket.

    Parameters
    ----------
    process_group, bucket
        As for :func:`allreduce_hook`.

    Returns
    -------
    torch.futures.Future
        The averages, in the dtype of the gradients.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook``.
    """
    return _in_half(torch.bfloat16, "bf16_compress_hook", process_group, bucket)


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    def in_half(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = dense_buffer(bucket, "the compress wrapper")
        bucket.set_buffer(buffer.to(dtype))
        inner = bucket._bounded(hook(state, bucket))

        def decompress() -> torch.Tensor:
            deliver_gradients(inner.wait(), buffer)
            bucket.set_buffer(buffer)
            return buffer

        return Driven(decompress, lambda: give_up(inner))

    return in_half


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let a hook work on gradients in float16.

    Local; DDP calls what it returns on all ranks.

    Parameters
    ----------
    hook : callable
        Any hook whose bucket may be of another dtype than the parameters.

    Returns
    -------
    callable
        A hook with the same state.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_wrapper``.

    Examples
    --------
    >>> model.register_comm_hook(PowerSGDState(None), fp16_compress_wrapper(powerSGD_hook))
    """
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Let a hook work on gradients in bfloat16, as :func:`fp16_compress_wrapper` in float16.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_wrapper``.
    """
    return _wrapped(hook, torch.bfloat16)


def noop_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Leave the gradients of each rank as they are, to see what communication costs.

    Local. Ranks drift apart: for measuring only.

    Parameters
    ----------
    state : object
        Ignored.
    bucket : GradBucket
        From DDP.

    Returns
    -------
    torch.futures.Future
        The gradients of this rank, at once.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks.noop_hook``.
    """
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


PLACES.append((noop_hook, lambda _state, _group: None))
