"""The schedule: which parameter is in which bucket, and the one change of that.

Buckets are made in the reverse order of registration, because backward reaches the parameters
roughly in that order. After the first backward pass the real order is known, and the buckets are
rebuilt in rank 0's order.

Only a user's hook needs a bucket as a whole. Without a hook, a large bucket is divided into pieces,
each reduced as soon as its gradients are ready, so that the network does not wait for the rest. A
long gradient is a piece by itself, which can be reduced from where it lies. The other pieces lie
end to end in the memory of one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hpcdist.backends.carrier import Carrier
from hpcdist.parallel.reducer.bucket import MIB, Allocator, Bucket, assign_buckets, layout, wholes
from hpcdist.parallel.reducer.single import SingleBucket
from hpcdist.parallel.reducer.sparse import SparseBucket

API = "DistributedDataParallel: order of the buckets"

# Bytes of a piece; docs/performance.md has the cost of other sizes.
_PIECE = 2 * MIB

# An all-reduce gives each rank a share of the piece. Below this many bytes the number of the shares
# of thousands of ranks would cost more than their size.
_SHARE = 1 << 16


def piece_size(ranks: int) -> int | None:
    """Return the number of bytes from which gradients are worth their own all-reduce.

    Parameters
    ----------
    ranks : int
        In the group.

    Returns
    -------
    int or None
        Bytes; None if there are no other ranks. Local.
    """
    return max(_PIECE, ranks * _SHARE) if ranks > 1 else None


class Schedule:
    """Makes buckets.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        All parameters whose gradients are reduced.
    caps : sequence of int
        Sizes in bytes, see :func:`~hpcdist.parallel.reducer.bucket.assign_buckets`.
    sparse : collection of int
        Indices of parameters with sparse gradients.
    as_view : bool
        Let gradients be views of the buckets.
    allocator : callable
        Allocates the buckets' memory.
    dtype : torch.dtype, optional
        Of all buckets of floating point numbers, in place of the parameters'.
    tail : int, optional
        See :func:`~hpcdist.parallel.reducer.bucket.assign_buckets`.
    piece : int, optional
        Divide buckets into pieces of about this many bytes: a gradient of half as many, or of more,
        is one by itself, and shorter ones are together until they have as many.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        caps: Sequence[int],
        sparse: Collection[int],
        as_view: bool,
        allocator: Allocator,
        dtype: torch.dtype | None,
        tail: int | None = None,
        piece: int | None = None,
    ) -> None:
        self._parameters = parameters
        self._caps = caps
        self._sparse = frozenset(sparse)
        self._as_view = as_view
        self._allocator = allocator
        self._dtype = dtype
        self._tail = tail
        self._piece = piece
        self._order: Sequence[int] = ()
        self._layouts = [layout(p) for p in parameters]  # for all buckets, also later ones

    def first(self) -> list[list[int]]:
        """Return the members of the buckets before any order is known."""
        return self.assign(range(len(self._parameters) - 1, -1, -1))

    def assign(self, order: Sequence[int]) -> list[list[int]]:
        """Return the members of the buckets for an order in which gradients become ready."""
        self._order = order
        buckets = assign_buckets(self._parameters, order, self._caps, self._sparse, self._tail)
        return [[i for piece in self._pieces(members) for i in piece] for members in buckets]

    def make(self, members: Sequence[list[int]]) -> list[Any]:
        """Make the buckets themselves, or their pieces."""
        return [bucket for whole in members for bucket in self._make_one(whole)]

    def _make_one(self, members: list[int]) -> Iterator[Any]:
        parameters = [self._parameters[i] for i in members]
        if members[0] in self._sparse:
            yield SparseBucket(members, parameters)
            return
        dtype = self._dtype if parameters[0].is_floating_point() else None
        together = sum(p.numel() for i, p in zip(members, parameters, strict=True)
                       if not self._is_long(i))  # fmt: skip
        memory = self._allocator(together, dtype or parameters[0].dtype, parameters[0].device)
        for number, piece in enumerate(self._pieces(members)):
            parameters = [self._parameters[i] for i in piece]
            layouts = [self._layouts[i] for i in piece]
            kind: type[Bucket] = SingleBucket
            allocator = self._allocator
            if not self._is_long(piece[0]):
                part, memory = memory.tensor_split([sum(p.numel() for p in parameters)])
                kind, allocator = Bucket, lambda *_, part=part: part
            bucket = kind(piece, parameters, self._as_view, allocator, dtype, layouts)
            bucket.piece = number
            yield bucket

    def _limit(self, index: int) -> float:
        """Return the bytes of a piece of the bucket with a parameter; infinity: it stays whole."""
        # A launch on a GPU costs more than on a CPU, and NCCL wants large messages.
        on_host = self._parameters[index].device.type == "cpu"
        return self._piece if self._piece and on_host and index not in self._sparse else math.inf

    def _is_long(self, index: int) -> bool:
        """Whether a gradient is a piece by itself."""
        p = self._parameters[index]
        return 2 * p.numel() * p.itemsize >= self._limit(index)

    def _pieces(self, members: list[int]) -> list[list[int]]:
        """Divide the members of a bucket; of those in this order, into the same pieces."""
        limit = self._limit(members[0])
        pieces: list[list[int]] = []
        short: list[int] = []
        size = 0
        for index in members:
            if self._is_long(index):
                pieces.append([index])
                continue
            p = self._parameters[index]
            short.append(index)
            size += p.numel() * p.itemsize
            if size >= limit:
                pieces.append(short)
                short, size = [], 0
        return [*pieces, short] if short else pieces

    def join(self, buckets: list[Any]) -> list[Any]:
        """Join pieces, now and in all buckets made later; gradients that are views move.

        Parameters
        ----------
        buckets : list
            From :meth:`make`. Emptied.

        Returns
        -------
        list
            Buckets for a hook.
        """
        self._piece = None
        members = self.assign(self._order)  # without the pieces, in this order
        if members == [bucket.members for bucket in buckets]:
            return buckets
        return self.exchange(buckets, members)

    @staticmethod
    def members(buckets: Sequence[Any]) -> list[list[int]]:
        """Return the members of the buckets, in pieces or not."""
        return [[i for piece in whole for i in piece.members] for whole in wholes(buckets)]

    def agree(self, comm: Carrier, order: Sequence[int] | None) -> list[int]:
        """Adopt the order in which rank 0's gradients became ready.

        All ranks of the group must call it.

        Parameters
        ----------
        comm : Comm
            The group's communicator.
        order : sequence of int or None
            This rank's; None if it has seen no backward pass.

        Returns
        -------
        list of int
            Rank 0's.
        """
        default = range(len(self._parameters) - 1, -1, -1)
        agreed = np.array(list(order or default), np.int64)
        if comm.size > 1:
            comm.broadcast(agreed, 0, api=API)
        return list(map(int, agreed))

    def exchange(self, buckets: list[Any], members: Sequence[list[int]]) -> list[Any]:
        """Replace `buckets` by new ones, and move gradients that are views.

        Parameters
        ----------
        buckets : list
            Emptied, so that each one's memory is freed as soon as nothing uses it.
        members : sequence of list of int
            Of the new ones.

        Returns
        -------
        list
            The new buckets.
        """
        held: set[int] = set()
        while buckets:
            bucket = buckets.pop()
            if not bucket.sparse and bucket.as_view:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if parameter.grad is view:
                        held.add(id(parameter))
            del bucket
        made = []
        for bucket in self.make(members):
            if not bucket.sparse and bucket.as_view and held:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if id(parameter) in held:
                        view.copy_(parameter.grad)
                        parameter.grad = view
            made.append(bucket)
        return made
