"""The argument of a communication hook: one bucket of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcdist.backends.carrier import Carrier
from hpcdist.parallel.reducer.bounded import bounded
from hpcdist.parallel.reducer.copies import reals

if TYPE_CHECKING:
    from hpcdist.parallel.reducer.bucket import Bucket


class GradBucket:
    """One bucket of gradients, as a communication hook sees it.

    Made by :class:`~hpcdist.DistributedDataParallel`, and passed to the hook of
    :meth:`~hpcdist.DistributedDataParallel.register_comm_hook`.

    Parameters
    ----------
    bucket : Bucket
        The reducer's bucket.
    index : int
        Place of the bucket among all; hooks run in this order on every rank.
    is_last : bool
        Whether it is the last one of this backward pass.
    buffer : torch.Tensor, optional
        Another tensor in place of the bucket's buffer, of the same number of elements.
    comm : object, optional
        The communicator whose timeout counts for what the hook returns.
    after : list of callable, optional
        Called without arguments once the gradients of the pass are in place.
    first : bool
        Whether it is the first one of this backward pass that a hook gets; those before it may have
        been left out.
    unused : callable, optional
        See :meth:`_unused`.

    Notes
    -----
    Local. Source: ``torch.distributed.GradBucket``.
    """

    __slots__ = (
        "_after",
        "_bucket",
        "_buffer",
        "_carrier",
        "_find_unused",
        "_first",
        "_index",
        "_is_last",
    )

    def __init__(
        self,
        bucket: Bucket,
        index: int,
        is_last: bool,
        buffer: torch.Tensor | None = None,
        comm: Carrier | None = None,
        after: list[Callable[[], None]] | None = None,
        first: bool = False,
        unused: Callable[[], Sequence[int] | None] | None = None,
    ) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        # As torch's: no hook then loses imaginary parts in a conversion to another real dtype.
        self._buffer = buffer if buffer is not None else self._own()
        self._carrier = comm
        self._after = after
        self._first = first
        self._find_unused = unused

    def _own(self) -> torch.Tensor:
        buffer = self._bucket.buffer
        return buffer if buffer.is_sparse else reals(buffer)

    def _bounded(self, future: Any) -> Any:
        """Return a hook's result for this bucket, with the group's timeout."""
        if self._carrier is None:
            return future
        return bounded(
            future, self._carrier, f"DistributedDataParallel's hook for bucket {self._index}"
        )

    def _after_pass(self, call: Callable[[], None]) -> None:
        """Let DDP call something when it has handed out the averages of this pass.

        That is the end of backward, or of ``finalize_backward()``; on a rank that shadows the
        others' passes (join), the end of each of these.
        """
        if self._after is not None:
            self._after.append(call)

    def _unused(self) -> Sequence[int] | None:
        """Places among :meth:`parameters` of those that no rank uses, which keep their gradients.

        None while that is not known, on all ranks: with ``find_unused_parameters`` it takes an
        exchange, which begins with the last bucket. Later it waits for that.
        """
        return () if self._find_unused is None else self._find_unused()

    def index(self) -> int:
        """Place of the bucket among all buckets, from 0.

        Returns
        -------
        int
            The same on all ranks for the same parameters. Buckets are renumbered when they are
            rebuilt after the first iteration.
        """
        return self._index

    def buffer(self) -> torch.Tensor:
        """The gradients of the bucket, end to end, not divided by the number of ranks.

        Returns
        -------
        torch.Tensor
            Flat. Changing it in place is allowed. Complex gradients are real numbers here, real
            and imaginary parts in turn. For a bucket of one sparse parameter: its gradient, a
            sparse COO tensor.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor of :meth:`buffer`, for hooks that wrap others.

        Parameters
        ----------
        buffer : torch.Tensor
            With as many elements; the dtype may differ. The bucket itself is not changed.
        """
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the bucket one by one.

        Returns
        -------
        list of torch.Tensor
            Views of :meth:`buffer` in the shapes of :meth:`parameters`. Those of complex parameters
            are complex; if a wrapper has set a buffer of half precision, they are real with one
            more dimension, of size 2.
        """
        if self._buffer.is_sparse:
            return [self._buffer]
        return self._bucket.cut(self._buffer)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients are in the bucket.

        Returns
        -------
        list of torch.Tensor
            In the order in which their gradients lie in :meth:`buffer`.
        """
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward pass.

        Returns
        -------
        bool
            True for the bucket with the highest :meth:`index`.
        """
        return self._is_last

    def __repr__(self) -> str:
        return (
            f"<GradBucket {self._index}{' (last)' if self._is_last else ''}: "
            f"{len(self._bucket.parameters)} parameters, {self._buffer.numel()} elements of "
            f"{str(self._buffer.dtype).removeprefix('torch.')}>"
        )
