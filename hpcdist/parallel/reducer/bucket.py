"""Buckets: gradients of one dtype and device, end to end, so that one all-reduce moves many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from hpcdist._engine import counting
from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistError
from hpcdist.parallel.reducer.copies import copy_each, deliver

API = counting("DistributedDataParallel", "backward pass")
#: The same where buckets may be left out: the number is a digest, with this bit, of what is not.
API_SKIPS = "DistributedDataParallel with skip_all_reduce_unused_params"
DIGEST = 1 << 32
#: The same where an exception ended backward on this rank when all averages were on their way, and
#: the digest, with this bit, is also of how often.
API_GIVEN_UP = "DistributedDataParallel after a backward that an exception ended"
GIVEN_UP = 1 << 33
MIB = 1 << 20
#: Bytes from which NumPy asks for huge pages.
HUGE = 4 * MIB

#: Dtypes whose pairs torch takes for complex numbers without a warning.
_PARTS = (torch.float32, torch.float64)

Allocator = Callable[[int, torch.dtype, torch.device], torch.Tensor]


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate the memory of one bucket: a flat tensor, not initialised.

    Every bucket calls it (or the callable given instead), so that buckets can use another kind of
    memory without a change elsewhere.

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
    # between two processes of a node takes 2.7 ms with huge pages and 5.3 ms without, because MPI
    # copies from the peer's memory page by page.
    return torch.from_numpy(np.empty(nbytes, np.uint8)).view(dtype)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where tensors begin in memory."""
    return [*map(torch.Tensor.data_ptr, tensors)]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one block of memory, in any order of dimensions.

    Dimensions of size 1 are ignored, because their stride has no meaning. The result depends on
    shape and strides only, so it is the same on ranks whose tensors agree in both.

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
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    caps: Sequence[int],
    sparse: Collection[int] = (),
    tail: int | None = None,
) -> list[list[int]]:
    """Divide parameters into buckets.

    A bucket contains one (dtype, device) and is closed as soon as its size reaches its cap, so that
    it can exceed the cap by at most one parameter.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        All parameters whose gradients are reduced.
    order : sequence of int
        Indices into `parameters`, in the order in which their gradients are expected.
    caps : sequence of int
        Size limits in bytes: the first for the first bucket of each (dtype, device), and so on;
        the last one also for all that follow.
    sparse : collection of int
        Indices of parameters with sparse gradients; each gets its own bucket.
    tail : int, optional
        Let buckets become smaller towards the end, down to this many bytes: none is larger than
        half of what is left. While one of them is reduced, backward computes as much again, so that
        only the last, small one remains at its end.

    Returns
    -------
    list of list of int
        Indices into `parameters`. The buckets are in the order in which they are expected to become
        full, that is, by the place of their last member in `order`. The same on every rank that
        passes the same arguments. Local.
    """
    closed: list[tuple[int, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, int]] = {}
    made: dict[tuple[torch.dtype, torch.device], int] = {}
    left: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in order:
        if index not in sparse:
            p = parameters[index]
            left[p.dtype, p.device] = left.get((p.dtype, p.device), 0) + p.numel() * p.itemsize
    for place, index in enumerate(order):
        if index in sparse:
            closed.append((place, [index]))
            continue
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        members, size, _ = filling.pop(key, ([], 0, 0))
        members.append(index)
        size += parameter.numel() * parameter.element_size()
        nth = made.get(key, 0)
        cap = caps[min(nth, len(caps) - 1)]
        if tail is not None:
            cap = min(cap, max(tail, left[key] // 2))
        if size >= cap:
            closed.append((place, members))
            made[key] = nth + 1
            left[key] -= size
        else:
            filling[key] = (members, size, place)
    closed.extend((place, members) for members, _, place in filling.values())
    return [members for _, members in sorted(closed)]


def layout(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides that a parameter's gradient has in a bucket; None: as if contiguous."""
    return parameter.stride() if parameter.numel() > 0 and is_dense(parameter) else None


class Bucket:
    """One flat buffer, the parameters whose gradients live in it, and its all-reduce.

    Parameters
    ----------
    members : list of int
        Indices of the parameters, as the owner numbers them.
    parameters : sequence of torch.Tensor
        The parameters themselves, in the order of `members`; one dtype, one device.
    as_view : bool
        Let ``parameter.grad`` be a view of this buffer, instead of copying in and out. Without
        effect where `dtype` differs from the parameters'.
    allocator : callable
        See :func:`allocate`.
    dtype : torch.dtype, optional
        Of the buffer; default: the parameters'.
    layouts : sequence, optional
        From :func:`layout`, for each parameter, the same on all ranks. Default: as they are now.
        Later ones mean nothing: ranks may convert a module at different times, or some only.

    Attributes
    ----------
    buffer : torch.Tensor
        Flat, ``sum of numel`` elements.
    views : list of torch.Tensor
        One per parameter: its part of `buffer` in the parameter's shape, and in its strides where
        those are dense, so that the copies run over memory in order.
    pending : int
        Gradients not yet there in this backward pass.
    piece : int
        Number of the piece, from 0, if a bucket is reduced in pieces.
    reduced : torch.Tensor
        What the reduction writes to: `buffer`, or the memory of the only gradient.
    unused : list of int
        Indices in `parameters` of those that get no gradient in this backward pass on this rank.
    work : object or None
        The reduction in flight; ``wait()`` returns its result, or completes it in place.
    """

    __slots__ = (
        "_kind",
        "_layouts",
        "_starts",
        "as_view",
        "buffer",
        "members",
        "parameters",
        "pending",
        "piece",
        "reduced",
        "saved",
        "unused",
        "views",
        "work",
    )

    sparse = False
    #: Whether it is a :class:`~hpcdist.parallel.reducer.single.SingleBucket`.
    single = False

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.Tensor],
        as_view: bool = False,
        allocator: Allocator = allocate,
        dtype: torch.dtype | None = None,
        layouts: Sequence[tuple[int, ...] | None] | None = None,
    ) -> None:
        self.members = members
        self.parameters = list(parameters)
        self._layouts = layouts or [layout(p) for p in self.parameters]
        first, numel = self.parameters[0], sum(p.numel() for p in self.parameters)
        self._kind = first.dtype
        self.as_view = as_view and dtype in (None, first.dtype)
        self.move_to(allocator(numel, dtype or first.dtype, first.device))
        self.work: Any = None
        self.unused: list[int] = []
        self.saved: dict[int, torch.Tensor] = {}
        self.pending, self.piece = len(members), 0

    def move_to(self, memory: torch.Tensor) -> None:
        """Take memory of the bucket's size for its buffer."""
        self.buffer = self.reduced = memory
        self.views = self.cut(memory)
        self._starts = addresses(self.views)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.buffer.numel() * self.buffer.element_size()

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor in the shapes, and where those were dense strides, of the members.

        Parameters
        ----------
        flat : torch.Tensor
            As many elements as the buffer, contiguous. Of complex parameters also the real numbers
            of :func:`reals`.

        Returns
        -------
        list of torch.Tensor
            One per parameter. Where `flat` contains real numbers of a dtype that has no complex
            numbers, those of complex parameters have one more dimension, of size 2.
        """
        width = 1
        if self.parameters[0].is_complex() and not flat.is_complex():
            if flat.dtype in _PARTS and flat.storage_offset() % 2 == 0:
                flat = torch.view_as_complex(flat.view(-1, 2))
            else:
                width = 2
        pair = () if width == 1 else (2,)
        views = []
        offset = 0
        for p, own in zip(self.parameters, self._layouts, strict=True):
            part = flat[offset : offset + width * p.numel()]
            shape = (*p.shape, *pair)
            if own is not None:
                strides = [width * stride for stride in own] + [1] * len(pair)
                views.append(part.as_strided(shape, strides))
            else:
                views.append(part.view(shape))
            offset += width * p.numel()
        return views

    def reset(self) -> None:
        """Prepare for the next backward pass. A Work still in flight keeps its own buffers."""
        self.pending = len(self.members)
        self.work = None
        self.reduced = self.buffer
        if self.unused:
            self.unused = []
            self.saved.clear()

    def pack(self, without_copy: bool = False) -> None:
        """Copy the gradients into the buffer; a parameter without one counts as zeros.

        With `as_view`, ``parameter.grad`` is the view afterwards, and a gradient that already was
        needs no copy. A parameter in `unused` keeps its ``grad`` for now.

        Parameters
        ----------
        without_copy : bool
            Whether gradients may be reduced from where they lie; those of several cannot.

        Raises
        ------
        DistError
            If a gradient has another dtype than its parameter had at construction.
        """
        if self.as_view and addresses(self.views) != self._starts:
            self._cut_anew()
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            grad = parameter.grad
            if grad is None:
                view.zero_()
            elif grad is not view:
                targets.append(view)
                sources.append(grad)
        if {grad.dtype for grad in sources} - {self._kind}:
            self._refuse_converted()
        if targets and copy_each(targets, sources):
            for parameter in self.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = None  # the average is dense
        if not self.as_view:
            return
        if self.unused:
            for place in self.unused:
                if self.parameters[place].grad is self.views[place]:
                    # The original may have to be restored.
                    self.saved[place] = self.views[place].clone()
            for place in {*range(len(self.members))} - {*self.unused}:
                self.parameters[place].grad = self.views[place]
        else:
            for parameter, view in zip(self.parameters, self.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view

    def _refuse_converted(self) -> None:
        for p in self.parameters:
            if p.grad is not None and p.grad.dtype != self._kind:
                raise DistError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} is of {p.grad.dtype}, "
                    f"but the parameter was of {self._kind} when DistributedDataParallel was "
                    "constructed, and gradients are averaged in that. Convert a module before it "
                    "is wrapped, or wrap it again, on all ranks"
                )

    def _cut_anew(self) -> None:
        """Replace the views to which the program has given other memory: ``grad.data = other``.

        They are gradients, and no part of the buffer any more.
        """
        for place, view in enumerate(self.cut(self.buffer)):
            if self.views[place].data_ptr() != self._starts[place]:
                self.views[place] = view

    def leave_out(self) -> None:
        """Contribute zeros, if this rank has used none of the parameters."""
        self.unused = list(range(len(self.members)))
        self.buffer.zero_()

    def let_go(self) -> None:
        """Give up what a failed pass still works on, if that is no memory of the bucket's own."""

    def pack_one(self, place: int) -> None:
        """Move one gradient into the buffer at once, which frees its own memory; with `as_view`."""
        if self.views[place].data_ptr() != self._starts[place]:
            self._cut_anew()
        parameter, view = self.parameters[place], self.views[place]
        if parameter.grad is not None and parameter.grad is not view:
            if parameter.grad.dtype != self._kind:
                self._refuse_converted()
            copy_each([view], [parameter.grad])
            parameter.grad = view

    def reduce(self, comm: Carrier, divisor: int | None, extra: int, wait: bool = False) -> Any:
        """Average what was packed between ranks; without `divisor`, over all of them.

        Parameters
        ----------
        comm : Comm
            Communicator of the group; all ranks must call it.
        divisor : int or None
            If given, :meth:`take` divides by it, unless it is done here.
        extra : int
            A number that must be the same on all ranks.
        wait : bool
            Wait for the end instead of returning a Work.

        Returns
        -------
        Work or None
            The operation.
        """
        op = ReduceOp.AVG if divisor is None else ReduceOp.SUM
        self._divide(divisor, before=True)
        return self._all_reduce(comm, op, not wait, extra)

    def _all_reduce(self, comm: Carrier, op: Any, async_op: bool, extra: int) -> Any:
        return comm.all_reduce(self.reduced, op, async_op, api=self._api(extra), extra=extra)

    @staticmethod
    def _api(extra: int) -> str:
        """Return the name of the call for the other ranks, which tells what `extra` is."""
        if extra & GIVEN_UP:
            return API_GIVEN_UP
        return API_SKIPS if extra & DIGEST else API

    def _divide(self, divisor: int | None, before: bool) -> None:
        """Divide, float16 before the sum: that may be infinite where the average is not."""
        if divisor is not None and before == (self.buffer.dtype == torch.float16):
            self.reduced.div_(divisor)

    def take(self, result: torch.Tensor | None, keep: Sequence[int], divisor: int | None) -> None:
        """Distribute the result of the reduction.

        Parameters
        ----------
        result : torch.Tensor or None
            Replaces the buffer's contents; None if the result is in the buffer already.
        keep : sequence of int
            Places in `parameters` of those that keep the gradient they had.
        divisor : int or None
            Divide by this first, unless :meth:`reduce` did.
        """
        if result is not None:
            deliver(result, self.buffer)
        self._divide(divisor, before=False)
        if self.as_view:
            for place in self.unused:
                if place not in keep:
                    self.parameters[place].grad = self.views[place]
                elif place in self.saved:
                    self.views[place].copy_(self.saved[place])
            return
        targets, sources = [], []
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if keep and place in keep:
                continue
            grad = parameter.grad
            if grad is None:
                parameter.grad = view.to(parameter.dtype, copy=True)
            else:
                targets.append(grad)
                sources.append(view)
        if targets:
            copy_each(targets, sources)


def wholes(buckets: Sequence[Any]) -> list[list[Any]]:
    """Collect the pieces of each bucket.

    Parameters
    ----------
    buckets : sequence of Bucket or SparseBucket
        Whole ones and pieces, in order.

    Returns
    -------
    list of list
        For each bucket its pieces; itself, if it has none. Local.
    """
    found: list[list[Any]] = []
    for bucket in buckets:
        if bucket.piece:
            found[-1].append(bucket)
        else:
            found.append([bucket])
    return found
