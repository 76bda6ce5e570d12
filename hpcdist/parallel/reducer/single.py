"""A bucket of one long gradient, which is averaged without a copy where nothing else uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistError
from hpcdist.parallel.reducer.bucket import API, Bucket
from hpcdist.parallel.reducer.memory import is_only_user, where_it_lies


class SingleBucket(Bucket):
    """A bucket with one parameter, in host memory.

    With `as_view` the gradient is reduced in place. Without, the reduction reads it where it lies
    and writes to the buffer, so that it stays as it is until the end of backward. Then the two
    exchange their memory, and the buffer is ready for the next pass.
    """

    __slots__ = ("_is_new", "_version", "source")

    single = True
    #: What the reduction reads; None: what it writes to.
    source: torch.Tensor | None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next backward pass."""
        super().reset()
        self._is_new, self.source = False, None

    def begin(self) -> None:
        """A backward pass begins: whether it makes the gradient, or adds to one of the program."""
        self._is_new = self.parameters[0].grad is None

    @property
    def in_place(self) -> bool:
        """Whether the gradient is reduced in its own memory in this pass."""
        return self.reduced is not self.buffer

    def pack(self, without_copy: bool = False) -> None:
        """Copy the gradient into the buffer, unless it can be reduced from where it lies.

        Parameters
        ----------
        without_copy : bool
            Whether it may.
        """
        if not without_copy or self.unused or not self._is_lent():
            super().pack()

    def _is_lent(self) -> bool:
        gradient = self.parameters[0].grad
        there = where_it_lies(gradient, self.views[0])
        if there is None or gradient is None:
            return False
        if self.as_view:
            self.reduced = there
            return True
        if self._is_new:  # the program may know the address of one of its own
            self.source, self._version = there, gradient._version
        return self._is_new

    def let_go(self) -> None:
        """Set `grad` to None where it is reduced in place: the pass has failed.

        Its memory may still change.
        """
        if self.in_place:
            self.parameters[0].grad = None

    def reduce(self, comm: Carrier, divisor: int | None, extra: int, wait: bool = False) -> Any:
        """Average between ranks; see :meth:`Bucket.reduce`."""
        if self.source is not None and divisor is not None and self.buffer.dtype == torch.float16:
            self.buffer.copy_(self.source)  # to be divided before the sum
            self.source = None
        if self.source is None:
            return super().reduce(comm, divisor, extra, wait)
        op = ReduceOp.AVG if divisor is None else ReduceOp.SUM
        return comm.all_reduce(self.buffer, op, not wait, api=API, extra=extra, source=self.source)

    def take(self, result: torch.Tensor | None, keep: Sequence[int], divisor: int | None) -> None:
        """Let the parameter have the average; see :meth:`Bucket.take`.

        Raises
        ------
        DistError
            If the gradient has changed while it was read.
        """
        source, self.source = self.source, None
        if self.in_place:
            self._divide(divisor, before=False)
        elif source is None or not self._may_exchange(source):
            super().take(result, keep, divisor)
        else:
            self._divide(divisor, before=False)
            average = self.views[0].data
            self.buffer = self.reduced = source
            self.views = self.cut(source)
            self.parameters[0].grad = average

    def _may_exchange(self, source: torch.Tensor) -> bool:
        """Whether nothing but the parameter uses the gradient that was read."""
        parameter = self.parameters[0]
        gradient = parameter.grad
        if gradient is None:
            return True
        if gradient.data_ptr() == source.data_ptr() and gradient._version != self._version:
            raise DistError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed in "
                "place during backward, while DistributedDataParallel averaged it. Change "
                "gradients after backward, or in a hook of that parameter"
            )
        del gradient
        return is_only_user(parameter, source)
