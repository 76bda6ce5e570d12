"""The memory of a gradient while a reduction works there: lent, taken back, or exchanged.

A gradient that lends its memory has it through an alias, a storage of its own. So what a program
does to the gradient meanwhile, such as to move it to shared memory, frees nothing that is read.
"""

from __future__ import annotations

import sys

import torch

from hpcdist._graph import move_gradient, references_to_gradient

# Private to torch; without them every gradient is copied.
_count_users = getattr(torch._C, "_storage_Use_Count", None)
_count_holders = getattr(torch.Tensor, "_use_count", None)


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """Count what refers to a tensor's memory: each tensor in it, and each user of its storage."""
    storage = tensor.untyped_storage()
    return _count_users(storage._cdata) if _count_users else 0, sys.getrefcount(storage)


def _holders(tensor: torch.Tensor) -> int:
    """Count what refers to a tensor outside of Python, and Python as one."""
    return _count_holders(tensor) if _count_holders else 0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as its elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).data  # not a view, which would refer to it


def _shaped(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View flat memory in the shape and the strides of a tensor."""
    return memory.as_strided(like.shape, like.stride()).data


def _samples() -> tuple[tuple[int, int], int, int, tuple[int, int]]:
    """Count the references to a gradient that only its parameter uses, and to memory it lends."""
    parameter = torch.nn.Parameter(torch.empty(1, device="cpu"))
    parameter.grad = torch.empty(1, device="cpu")
    memory = _flat(parameter.grad)
    parameter.grad.data = torch.from_dlpack(memory)
    known = references_to_gradient(parameter)
    return _users(parameter.grad), _holders(parameter.grad), known, _users(memory)


_ALONE, _HELD, _KNOWN, _LENT = _samples()


def lend(parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor | None:
    """Let a reduction work in the memory of a gradient, if nothing else refers to that.

    Parameters
    ----------
    parameter : torch.Tensor
        Whose gradient it is.
    view : torch.Tensor
        Its part of the bucket, which is the whole bucket.

    Returns
    -------
    torch.Tensor or None
        Shape ``(n,)``, elements in the bucket's order. None if the gradient is of another kind, or
        if anything else refers to it or its memory, or may do so without torch, as NumPy: as part
        of another gradient it would be averaged twice. Local.
    """
    gradient = parameter.grad
    if (
        type(gradient) is not torch.Tensor
        or gradient.layout is not torch.strided
        or gradient.dtype != view.dtype
        or gradient.device != view.device
        or gradient.stride() != view.stride()
        or gradient.is_conj()
        or gradient.is_neg()
        or gradient._is_zerotensor()
        or _count_users is None
        or _count_holders is None
        or _users(gradient) != _ALONE
        or _holders(gradient) != _HELD
    ):
        return None
    storage = gradient.untyped_storage()
    if not storage.resizable() or storage.is_shared():  # not torch's own, or for other processes
        return None
    if storage.nbytes() != gradient.nbytes:  # a gradient of one part of something longer
        return None
    memory = _flat(gradient)
    alias = _shaped(torch.from_dlpack(memory), gradient)
    del gradient, storage
    return memory if move_gradient(parameter, alias, _KNOWN) else None


def lies_there(parameter: torch.Tensor, memory: torch.Tensor) -> bool:
    """Return whether a gradient still has the memory that it has lent."""
    gradient = parameter.grad
    return gradient is not None and gradient.data_ptr() == memory.data_ptr()


def take_back(parameter: torch.Tensor, memory: torch.Tensor, view: torch.Tensor) -> None:
    """Let a gradient have the memory that it has lent without the alias, unless that is in use.

    Parameters
    ----------
    parameter, view : torch.Tensor
        As for :func:`lend`. If the gradient has gone or has other memory, there is a new one.
    memory : torch.Tensor
        From :func:`lend`.
    """
    own = _shaped(memory, view)
    if lies_there(parameter, memory):
        move_gradient(parameter, own, _KNOWN)
    else:
        parameter.grad = own


def exchange(
    parameter: torch.Tensor, memory: torch.Tensor, average: torch.Tensor
) -> torch.Tensor | None:
    """Give a gradient the memory of its average, unless something else refers to it.

    Parameters
    ----------
    parameter : torch.Tensor
        Whose gradient it is. The gradient stays the same object.
    memory : torch.Tensor
        From :func:`lend`.
    average : torch.Tensor
        Of the gradient's shape and strides, in memory that nothing else uses from now on.

    Returns
    -------
    torch.Tensor or None
        As much memory, which nobody else uses: for the next average. None if nothing was done.
    """
    if not lies_there(parameter, memory):
        return None
    gradient = parameter.grad
    assert gradient is not None
    held = _holders(gradient) != _HELD or _users(gradient) != _ALONE or _users(memory) != _LENT
    del gradient
    if held or not move_gradient(parameter, average, _KNOWN):
        return None
    # Another thread may have taken a view after the look.
    return memory if _users(memory) == _ALONE else torch.empty_like(memory)
