"""Delayed all-reduce: averages some gradients together when a chosen one is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcdist.errors import DistError
from hpcdist.parallel.reducer.bucket import Bucket

__all__ = ["DelayedReduction"]


class DelayedReduction:
    """Averages the gradients of some parameters when another parameter's gradient is computed.

    The gradients become views of buffers, one for each dtype. The averages are in place when
    backward ends.

    Parameters
    ----------
    named_parameters : sequence of (str, torch.nn.Parameter)
        Parameters whose gradients wait; all gradients must exist when the trigger's is computed.
    trigger : torch.nn.Parameter
        The one whose gradient starts the reduction.
    group : ProcessGroup
        Between whose ranks.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: torch.nn.Parameter,
        group: Any,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [p for _, p in named_parameters]
        self._group = group
        self._expected = False
        self._passes = 0
        kinds: dict[Any, list[int]] = {}
        for index, p in enumerate(self._parameters):
            kinds.setdefault((p.dtype, p.device), []).append(index)
        self._buckets = [
            Bucket(members, [self._parameters[i] for i in members], as_view=True)
            for members in kinds.values()
        ]
        self._handles = [trigger.register_hook(self._start)]
        for index, p in enumerate(self._parameters):
            if p is not trigger:
                self._handles.append(
                    p.register_post_accumulate_grad_hook(
                        lambda _p, name=self._names[index]: self._too_late(name)
                    )
                )

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def expect(self, averages: bool) -> None:
        """Set whether the next backward averages."""
        self._expected = averages

    def _too_late(self, name: str) -> None:
        if any(bucket.work is not None for bucket in self._buckets):
            raise DistError(
                f"the gradient of {name}, of delay_all_reduce_named_params, came after that of "
                "param_to_hook_all_reduce had started their reduction, so it would be lost; choose "
                "a parameter whose gradient is computed later, that is, one used earlier in forward"
            )

    def _start(self, _gradient: torch.Tensor) -> None:
        if not self._expected or any(bucket.work is not None for bucket in self._buckets):
            return
        self._expected = False
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.pack()
                bucket.work = bucket.reduce(self._group._comm, None, self._passes)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._passes += 1
        try:
            for bucket in self._buckets:
                bucket.work.wait()
        finally:
            for bucket in self._buckets:
                bucket.reset()
