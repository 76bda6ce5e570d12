"""Which parameter goes into which bucket, and the one time when that changes.

Buckets are made in the reverse order of registration, because backward meets the parameters roughly
so. After the first backward pass the real order is known, and they are made anew in rank 0's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from hpcdist.parallel.bucket import Allocator, Bucket, assign_buckets
from hpcdist.parallel.sparse import SparseBucket

__all__ = ["Schedule"]

API = "DistributedDataParallel: order of the buckets"


class Schedule:
    """Makes buckets.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        All parameters whose gradients are reduced.
    caps : sequence of int
        Sizes in bytes, see :func:`~hpcdist.parallel.bucket.assign_buckets`.
    sparse : collection of int
        Indices of parameters with sparse gradients.
    as_view : bool
        Let gradients be views of the buckets.
    allocator : callable
        Where buckets get their memory.
    dtype : torch.dtype, optional
        Of all buckets of floating point numbers, in place of the parameters'.
    tail : int, optional
        See :func:`~hpcdist.parallel.bucket.assign_buckets`.
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
    ) -> None:
        self._parameters = parameters
        self._caps = caps
        self._sparse = frozenset(sparse)
        self._as_view = as_view
        self._allocator = allocator
        self._dtype = dtype
        self._tail = tail

    def first(self) -> list[list[int]]:
        """Members of the buckets before any order is known."""
        return self.assign(range(len(self._parameters) - 1, -1, -1))

    def assign(self, order: Sequence[int]) -> list[list[int]]:
        """Members of the buckets for an order in which gradients become ready."""
        return assign_buckets(self._parameters, order, self._caps, self._sparse, self._tail)

    def make(self, members: Sequence[list[int]]) -> list[Any]:
        """Make the buckets themselves."""
        return [self._make_one(part) for part in members]

    def _make_one(self, members: list[int]) -> Any:
        parameters = [self._parameters[i] for i in members]
        if members[0] in self._sparse:
            return SparseBucket(members, parameters)
        dtype = self._dtype if parameters[0].is_floating_point() else None
        return Bucket(members, parameters, self._as_view, self._allocator, dtype)

    def agree(self, comm: Any, order: Sequence[int] | None) -> list[int]:
        """Take over the order in which rank 0's gradients became ready.

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
        """Make new buckets in the place of `buckets`, and move gradients that are views over.

        Parameters
        ----------
        buckets : list
            Emptied, so that each one's memory is given back as soon as nothing uses it.
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
        for part in members:
            bucket = self._make_one(part)
            if not bucket.sparse and bucket.as_view and held:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if id(parameter) in held:
                        view.copy_(parameter.grad)
                        parameter.grad = view
            made.append(bucket)
        return made
