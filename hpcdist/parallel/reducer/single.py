"""A bucket of one long gradient, which is averaged without a copy where nothing else uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistError
from hpcdist.parallel.reducer.bucket import Bucket
from hpcdist.parallel.reducer.memory import exchange, lend, lies_there, take_back


def _version_of(parameter: torch.Tensor) -> int:
    """Return how often autograd has seen the gradient change."""
    return 0 if parameter.grad is None else parameter.grad._version


class SingleBucket(Bucket):
    """A bucket with one parameter, in host memory.

    The gradient lends its memory. With `as_view` it is reduced in place. Without, the reduction
    reads it and writes to the buffer, so that it stays as it is until the end of backward. Then
    the two exchange their memory, and the buffer is ready for the next pass.
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
        parameter = self.parameters[0]
        if not (self.as_view or self._is_new):  # the program may know the address of its own
            return False
        memory = lend(parameter, self.views[0])
        if memory is None:
            return False
        if self.as_view:
            self.reduced = memory
            return True
        if not self.buffer.untyped_storage().resizable():  # not torch's own: see allocate()
            self.move_to(torch.empty_like(self.buffer))
        self.source, self._version = memory, _version_of(parameter)
        return True

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
        return super().reduce(comm, divisor, extra, wait)

    def _all_reduce(self, comm: Carrier, op: Any, async_op: bool, extra: int) -> Any:
        if self.source is None:
            return super()._all_reduce(comm, op, async_op, extra)
        assert comm.native is not None, "only its memory is read from"
        return comm.native.all_reduce(
            self.buffer, op, async_op, api=self._api(extra), extra=extra, source=self.source
        )

    def take(self, result: torch.Tensor | None, keep: Sequence[int], divisor: int | None) -> None:
        """Let the parameter have the average; see :meth:`Bucket.take`.

        Raises
        ------
        DistError
            If the gradient has changed while it was read.
        """
        source, self.source = self.source, None
        parameter = self.parameters[0]
        if self.in_place:
            self._divide(divisor, before=False)
            take_back(parameter, self.reduced, self.views[0])
            return
        if source is not None:
            self._refuse_changed(source)
            average = self.views[0].data
            memory = exchange(parameter, source, average)
            if memory is not None:
                self._divide(divisor, before=False)
                self.move_to(memory)
                return
        super().take(result, keep, divisor)

    def _refuse_changed(self, source: torch.Tensor) -> None:
        parameter = self.parameters[0]
        if lies_there(parameter, source) and _version_of(parameter) != self._version:
            raise DistError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed in "
                "place during backward, while DistributedDataParallel averaged it. Change "
                "gradients after backward, or in a hook of that parameter"
            )
