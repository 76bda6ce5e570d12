"""Copies between a tensor and the memory of a window, which may be the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdist._buffer import unreadable

if TYPE_CHECKING:
    import torch


def refuse_without_memory(tensor: torch.Tensor, what: str) -> None:
    """Raise TypeError if a tensor on the host has no memory that could be copied.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.
    what : str
        Name of the operation.
    """
    why = unreadable(tensor)
    if why:
        raise TypeError(f"{what}: the tensor {why}")


def elements_of(tensor: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, flat and contiguous, in memory apart from another's.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape and strides, also lazily conjugated or negated.
    there : torch.Tensor
        Contiguous; what is returned does not overlap it.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.clone() if _overlap(flat, there) else flat.contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, flat: its own memory where they lie in order there.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape and strides, also lazily conjugated or negated.
    """
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # One element may have any stride, which no view as bytes has.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie in its memory, in order and as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def fill_from(tensor: torch.Tensor, there: torch.Tensor, what: str) -> None:
    """Copy flat elements into a tensor that may overlap them.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape and strides.
    there : torch.Tensor
        Contiguous, with as many elements.
    what : str
        Name of the operation.

    Raises
    ------
    ValueError
        If two elements of the tensor share memory.
    """
    if not tensor.is_contiguous() and _overlaps_itself(tensor):
        raise ValueError(
            f"{what}: the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has "
            "elements that share memory, and all are written to; pass its clone()"
        )
    elements = there.clone() if _overlap(tensor, there) else there
    tensor.detach().copy_(elements.view(tensor.shape))


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to the end of its last element; strides are not negative."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the spans of two tensors overlap; their elements then may."""
    if not one.numel() or not other.numel():
        return False
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + _span(other) and second < first + _span(one)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if tensor.numel() < 2:
        return False
    steps = sorted(
        (step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    reach = 0  # elements from the first to the last, in the dimensions so far
    for step, n in steps:
        if step <= reach:
            break
        reach += (n - 1) * step
    else:
        return False
    if steps[0][0] == 0:
        return True
    import torch  # strides that lie within each other: count the places

    places = torch.arange(_span(tensor) // tensor.element_size(), device="cpu")
    return places.as_strided(tensor.shape, tensor.stride()).unique().numel() < tensor.numel()
