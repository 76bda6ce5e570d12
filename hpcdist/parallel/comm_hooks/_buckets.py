"""What communication hooks ask of a bucket."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hpcdist.parallel.reducer.grad_bucket import GradBucket


def begins(bucket: GradBucket) -> bool:
    """Return whether a bucket is the first of its backward pass; DDP may leave out bucket 0."""
    return bool(getattr(bucket, "_first", bucket.index() == 0))


def in_use(bucket: GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters of a bucket and their gradients, for :func:`of_dtype` and an optimizer.

    Not those that no rank uses. In a pass that is given up too early to know them, all.
    """
    unused = set(bucket._unused() or ())
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return (pair for place, pair in enumerate(pairs) if place not in unused)


def of_dtype(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a bucket in the dtype of its parameter, as an optimizer takes it.

    With mixed precision a gradient has the reduction's dtype, and in a compress wrapper half
    precision: there those of complex parameters are pairs of real numbers.
    """
    if parameter.is_complex() and not gradient.is_complex():
        real = parameter.dtype.to_real()
        return torch.complex(gradient[..., 0].to(real), gradient[..., 1].to(real))
    return gradient.to(parameter.dtype)


def dense_buffer(bucket: GradBucket, hook: str) -> torch.Tensor:
    """Return the buffer of a bucket; raise for a sparse one."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise TypeError(
            f"{hook} takes dense gradients, but bucket {bucket.index()} has a sparse one; create "
            "the embedding with sparse=False, or write a hook that handles it"
        )
    return buffer
