"""Copies between tensors and the flat buffers that travel, for every kind of number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def reals(flat: torch.Tensor) -> torch.Tensor:
    """View a flat tensor of complex numbers as real ones, real and imaginary parts in turn.

    Parameters
    ----------
    flat : torch.Tensor
        Shape ``(n,)``.

    Returns
    -------
    torch.Tensor
        Shape ``(2 n,)`` for complex numbers, else `flat` itself. Local.
    """
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def deliver(result: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy what a hook's future contains into a bucket's buffer, unless it is there already.

    Parameters
    ----------
    result : torch.Tensor
        As many elements; of a complex buffer also as its real numbers. Any dtype.
    buffer : torch.Tensor
        Shape ``(n,)``.
    """
    source = reals(result.resolve_conj().resolve_neg().reshape(-1))
    target = reals(buffer)
    there = source.data_ptr() == target.data_ptr() and source.stride() == target.stride()
    if not there or source.dtype != target.dtype:
        target.copy_(source)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> bool:
    """Copy tensors to others of the same shapes, all in one call where torch can do that.

    Parameters
    ----------
    targets, sources : list of torch.Tensor
        As many. Both may be lazily conjugated or negated, sources also sparse.

    Returns
    -------
    bool
        Whether they were copied one by one. Local.
    """
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:
        # the batched copy refuses sparse sources and lazy targets before it writes anything
        if not any(s.is_sparse for s in sources) and not any(
            t.is_conj() or t.is_neg() for t in targets
        ):
            raise
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.to_dense() if source.is_sparse else source)
        return True
    return False


@contextmanager
def unseen(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Write to tensors in the block without a change that autograd counts.

    For buffers only, as torch's DDP does: a backward pass after it may use the new values.

    Parameters
    ----------
    tensors : iterable of torch.Tensor
        Those to write to. Local.
    """
    # tensors made in inference mode have no version; autograd saves none of them
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with torch.autograd._unsafe_preserve_version_counter(counted):
        yield
