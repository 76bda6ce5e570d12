"""Hooks that send gradients as bytes: four times smaller than float32, and less precise."""

from __future__ import annotations

import torch

from hpcdist.groups.numbers import whole
from hpcdist.groups.state import ProcessGroup
from hpcdist.parallel.comm_hooks._arguments import group_of
from hpcdist.parallel.comm_hooks._buckets import dense_buffer
from hpcdist.parallel.comm_hooks._future import Driven
from hpcdist.parallel.reducer.grad_bucket import GradBucket

_LEVELS = 255
_SMALLEST = torch.finfo(torch.float32).eps


def quantization_pertensor_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send each bucket in 8 bits per element, with one scale and zero point.

    DDP calls it on all ranks, for each bucket.

    Parameters
    ----------
    process_group, bucket
        As for :func:`allreduce_hook`.

    Returns
    -------
    torch.futures.Future
        The average of what the ranks sent, the same bits on all of them.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``, whose numbers it
    gives. Scales and elements travel in one all-gather, where there they take two. From four ranks
    on an all-gather of bytes moves no less than an all-reduce of float32.
    """
    buffer = dense_buffer(bucket, "quantization_pertensor_hook")
    return _exchange(process_group, buffer, max(buffer.numel(), 1))


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Send each bucket in 8 bits per element, with a scale and zero point for every few.

    DDP calls it on all ranks, for each bucket.

    Parameters
    ----------
    process_group, bucket
        As for :func:`allreduce_hook`.
    bucket_size : int
        Elements that share a scale, at least 1; they cost 8 bytes together.

    Returns
    -------
    torch.futures.Future
        The average of what the ranks sent, the same bits on all of them.

    Raises
    ------
    TypeError, ValueError
        If `bucket_size` is not a whole number, or below 1.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``.
    """
    bucket_size = whole(bucket_size, "bucket_size")
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1, not {bucket_size}")
    buffer = dense_buffer(bucket, "quantization_perchannel_hook")
    return _exchange(process_group, buffer, bucket_size)


def _exchange(
    process_group: ProcessGroup | None, buffer: torch.Tensor, width: int
) -> torch.futures.Future[torch.Tensor]:
    """Quantize in channels of `width` elements, gather from all ranks, and average."""
    group = group_of(process_group)
    count = buffer.numel()
    channels = -(-count // width)
    rows = torch.nn.functional.pad(buffer.float(), (0, channels * width - count))
    rows = rows.view(channels, width)
    # Zero is always among the levels, so that padding and dead units stay exact.
    low = rows.amin(1).clamp_(max=0) if count else rows.new_zeros(0)
    high = rows.amax(1).clamp_(min=0) if count else rows.new_zeros(0)
    scale = ((high - low) / _LEVELS).clamp_(min=_SMALLEST)
    zero = (-torch.round(low / scale)).clamp_(0, _LEVELS)
    levels = (rows / scale[:, None]).round_().add_(zero[:, None]).clamp_(0, _LEVELS)

    head = 8 * channels
    own = torch.empty(head + channels * width, dtype=torch.uint8, device=buffer.device)
    own[:head] = torch.stack((scale, zero)).view(-1).view(torch.uint8)
    own[head:] = levels.to(torch.uint8).view(-1)
    everyone = own.new_empty(group.size(), own.numel())
    work = group.carrier.all_gather_into_tensor(everyone, own, True, api="quantization hook")

    def average() -> torch.Tensor:
        work.wait()
        total = torch.zeros_like(rows)
        for message in everyone:
            # Cloned, because it need not lie where a float may.
            scales, zeros = message[:head].clone().view(torch.float32).view(2, channels, 1)
            total += (message[head:].view(channels, width).float() - zeros) * scales
        return buffer.copy_(total.view(-1)[:count].div_(group.size()))

    return Driven(average, work.wait)
