"""Buckets: gradients of one dtype and device, packed end to end so that one all-reduce moves many.

Nothing in this file communicates: it decides which parameter goes where, and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["MIB", "Allocator", "Bucket", "allocate", "assign_buckets", "is_dense"]

MIB = 1 << 20

#: Bytes from which NumPy asks for huge pages.
HUGE = 4 * MIB

Allocator = Callable[[int, torch.dtype, torch.device], torch.Tensor]


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Give the memory of one bucket: a flat tensor, not initialised.

    Every bucket asks here (or the callable given in its place), so that buckets can move to
    another kind of memory without a change anywhere else.

    Parameters
    ----------
    numel : int
        Elements.
    dtype, device
        As for :func:`torch.empty`.

    Returns
    -------
    torch.Tensor
        Of shape ``(numel,)``, contiguous. Local; no rank needs to call it.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE:
        return torch.empty(numel, dtype=dtype, device=device)
    # NumPy asks the kernel for huge pages, torch's allocator does not: an all-reduce of 25 MiB
    # between two processes of a node takes 2.7 ms in the one and 5.3 ms in the other, because MPI
    # copies from the peer's memory page by page.
    return torch.from_numpy(np.empty(nbytes, np.uint8)).view(dtype)


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill one block of memory, in whatever order of dimensions.

    Dimensions of size 1 are left out, because their stride means nothing. The answer depends on
    shape and strides only, so ranks whose tensors agree in both agree in it.

    Parameters
    ----------
    tensor : torch.Tensor
        Any strided tensor.

    Returns
    -------
    bool
        False for overlapping (expanded) tensors and for those with gaps.
    """
    expected = 1
    dims = ((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    for stride, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def assign_buckets(
    parameters: Sequence[torch.Tensor], order: Sequence[int], caps: Sequence[int]
) -> list[list[int]]:
    """Divide parameters into buckets.

    A bucket holds one (dtype, device) and is closed as soon as its size reaches its cap, so that
    a bucket can be larger than the cap by at most one parameter.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        All parameters whose gradients are reduced.
    order : sequence of int
        Indices into `parameters`, in the order in which their gradients are expected.
    caps : sequence of int
        Size limits in bytes: the first for the first bucket of each (dtype, device), and so on;
        the last one also for all that follow.

    Returns
    -------
    list of list of int
        Indices into `parameters`. The buckets stand in the order in which they are expected to
        become full, that is, by the place of their last member in `order`. The same on every rank
        that passes the same arguments. Local.
    """
    closed: list[tuple[int, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, int]] = {}
    made: dict[tuple[torch.dtype, torch.device], int] = {}
    for place, index in enumerate(order):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        members, size, _ = filling.pop(key, ([], 0, 0))
        members.append(index)
        size += parameter.numel() * parameter.element_size()
        nth = made.get(key, 0)
        if size >= caps[min(nth, len(caps) - 1)]:
            closed.append((place, members))
            made[key] = nth + 1
        else:
            filling[key] = (members, size, place)
    closed.extend((place, members) for members, _, place in filling.values())
    return [members for _, members in sorted(closed)]


class Bucket:
    """One flat buffer, the parameters whose gradients live in it, and its all-reduce.

    Parameters
    ----------
    members : list of int
        Indices of the parameters, as the owner numbers them.
    parameters : sequence of torch.Tensor
        The parameters themselves, in the order of `members`; one dtype, one device.
    as_view : bool
        Let ``parameter.grad`` be a view of this buffer, instead of copying in and out.
    allocator : callable
        See :func:`allocate`.

    Attributes
    ----------
    buffer : torch.Tensor
        Flat, ``sum of numel`` elements.
    views : list of torch.Tensor
        One per parameter: its part of `buffer` in the parameter's shape, and in its strides where
        those are dense, so that the copies run over memory in order.
    pending : int
        Gradients not yet there in this backward pass.
    work : Work or None
        The all-reduce under way.
    """

    __slots__ = ("as_view", "buffer", "members", "parameters", "pending", "views", "work")

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.Tensor],
        as_view: bool = False,
        allocator: Allocator = allocate,
    ) -> None:
        self.members = members
        self.parameters = list(parameters)
        self.as_view = as_view
        numel = sum(p.numel() for p in self.parameters)
        self.buffer = allocator(numel, self.parameters[0].dtype, self.parameters[0].device)
        self.views = self.cut(self.buffer)
        self.work: Any = None
        self.pending = len(members)

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor in the shapes, and where those are dense strides, of the members.

        Parameters
        ----------
        flat : torch.Tensor
            As many elements as the buffer, contiguous.

        Returns
        -------
        list of torch.Tensor
            One per parameter.
        """
        views = []
        offset = 0
        for p in self.parameters:
            part = flat[offset : offset + p.numel()]
            dense = p.numel() > 0 and is_dense(p)
            views.append(part.as_strided(p.shape, p.stride()) if dense else part.view(p.shape))
            offset += p.numel()
        return views

    def reset(self) -> None:
        """Make ready for the next backward pass. A Work still held here keeps its own buffers."""
        self.pending = len(self.members)
        self.work = None

    def pack(self) -> None:
        """Copy the gradients into the buffer; a parameter without one counts as zeros.

        With `as_view`, ``parameter.grad`` is the view afterwards, and a gradient that already was
        needs no copy.
        """
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            grad = parameter.grad
            if grad is None:
                view.zero_()
            elif grad is not view:
                targets.append(view)
                sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        if self.as_view:
            for parameter, view in zip(self.parameters, self.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view

    def unpack(self) -> None:
        """Copy the buffer back into the gradients; with `as_view` they are in place already."""
        if self.as_view:
            return
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.clone(memory_format=torch.preserve_format)
            else:
                targets.append(parameter.grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
