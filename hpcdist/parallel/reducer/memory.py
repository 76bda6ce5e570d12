"""Whether a gradient has its memory to itself, so that it may be averaged there or exchanged."""

from __future__ import annotations

import sys

import torch

# Private to torch; without them every gradient is copied.
_count = getattr(torch._C, "_storage_Use_Count", None)
_count_users = getattr(torch.Tensor, "_use_count", None)


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Count what refers to a tensor's memory: each tensor in it, and each user of its storage."""
    storage = tensor.untyped_storage()
    return _count(storage._cdata) if _count else 0, sys.getrefcount(storage)


def _holders(parameter: torch.Tensor) -> tuple[int, int]:
    """Count what refers to the gradient of a parameter: in torch, and in Python."""
    gradient = parameter.grad
    assert gradient is not None
    return _count_users(gradient) if _count_users else 0, sys.getrefcount(gradient)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as its elements in the order of memory, without a reference to it.

    Parameters
    ----------
    tensor : torch.Tensor
        Of `n` elements.

    Returns
    -------
    torch.Tensor
        Shape ``(n,)``. Local.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).data


def _samples() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Count the references to a gradient that nothing else uses: without and with :func:`flat`."""
    parameter = torch.nn.Parameter(torch.empty(1, device="cpu"))
    parameter.grad = torch.empty(1, device="cpu")
    alone = _references(parameter.grad)
    view = flat(parameter.grad)
    return alone, _references(view), _holders(parameter)


_ALONE, _WITH_VIEW, _HELD = _samples()


def where_it_lies(gradient: torch.Tensor | None, view: torch.Tensor) -> torch.Tensor | None:
    """View a gradient as the flat memory that a bucket has for it.

    Parameters
    ----------
    gradient : torch.Tensor or None
        The parameter's.
    view : torch.Tensor
        Its part of the bucket, which is the whole bucket.

    Returns
    -------
    torch.Tensor or None
        Shape ``(n,)``, elements in the bucket's order. None if the gradient is of another kind, or
        if anything else refers to its memory, or may do so without torch, as NumPy: as part of
        another gradient it would be averaged twice. Local.
    """
    if (
        type(gradient) is not torch.Tensor
        or gradient.layout is not torch.strided
        or gradient.dtype != view.dtype
        or gradient.device != view.device
        or gradient.stride() != view.stride()
        or gradient.is_conj()
        or gradient.is_neg()
        or _count is None
        or _references(gradient) != _ALONE
    ):
        return None
    storage = gradient.untyped_storage()
    if not storage.resizable() or storage.is_shared():  # not torch's own, or for other processes
        return None
    if storage.nbytes() != gradient.nbytes:  # a gradient of one part of something longer
        return None
    return flat(gradient)


def is_only_user(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether nothing but a parameter and a view refers to its gradient and the memory.

    Parameters
    ----------
    parameter : torch.Tensor
        With a gradient.
    view : torch.Tensor
        From :func:`where_it_lies`, of the gradient that the parameter had then.
    """
    gradient = parameter.grad
    if gradient is None or gradient.data_ptr() != view.data_ptr():
        return False
    del gradient
    if _count_users is None or _references(view) != _WITH_VIEW:
        return False
    return _holders(parameter) == _HELD
