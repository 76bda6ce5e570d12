"""What PowerSGD did not send of a bucket's gradients, kept for the next step."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.parallel.comm_hooks.powersgd_state import Layout, PowerSGDState
from hpcdist.parallel.reducer.grad_bucket import GradBucket


def layout_of(bucket: GradBucket) -> Layout:
    """Where the parameters are in the buffer; empty for a bucket that is not DDP's."""
    own = getattr(bucket, "_bucket", None)
    if own is None:
        return []
    pairs = zip(own.members, own.parameters, strict=True)
    return [[number, p.numel() * (2 if p.is_complex() else 1)] for number, p in pairs]


class Feedback:
    """The error feedback of one bucket in one step.

    DDP throws away the averages of parameters that no rank uses. What was sent for them would be
    lost, so it is put back. Which they are is known only when the last bucket has begun.

    Parameters
    ----------
    state : PowerSGDState
        Whose errors are read and replaced.
    bucket : GradBucket
        From DDP.
    """

    def __init__(self, state: PowerSGDState, bucket: GradBucket) -> None:
        self._state, self._bucket = state, bucket
        self._kept: torch.Tensor | None = None
        self._held: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def add(self, gradients: torch.Tensor) -> None:
        """Add what the last step lost, and keep a copy of what is to be sent now."""
        state, index = self._state, self._bucket.index()
        if not state.use_error_feedback:
            return
        error = state.error_dict.get(index)
        if error is None:
            error, _ = state._joined(state.error_pool, state.error_layout[index], gradients)
            if error is not None:
                error = torch.nn.functional.pad(error, (0, gradients.numel() - error.numel()))
                state.error_dict[index] = error
        # Another length: a bucket that is not DDP's. The feedback then belongs to other elements.
        if error is not None and error.numel() == gradients.numel():
            gradients.add_(error.to(gradients.dtype))
        self._kept = gradients.clone()

    def sent(self, approximation: torch.Tensor) -> None:
        """Keep what the approximation lacks."""
        if self._kept is None:
            return
        error = self._kept.sub_(approximation)
        self._hold(error)
        self._state._replace_error(self._bucket.index(), error)

    def _hold(self, error: torch.Tensor) -> None:
        """Copy the former errors of what this rank does not use.

        Not what was to be sent: that contains a gradient of an earlier step, if there is one.
        """
        layout = layout_of(self._bucket)
        if not layout or not self._bucket._bucket.unused:
            return
        former = self._state.error_dict.get(self._bucket.index())
        if former is None or former.numel() != error.numel():
            former = torch.zeros_like(error)
        counts = [count for _, count in layout]
        before, now = former[: sum(counts)].split(counts), error[: sum(counts)].split(counts)
        self._held = [(i, now[i], before[i].clone()) for i in self._bucket._bucket.unused]

    def settle(self, future: Any) -> torch.Tensor:
        """Put back what was sent in vain, and return the averages in `future`."""
        averages: torch.Tensor = future.value()
        if self._held and self._bucket._unused() is None:  # waited for before the last bucket
            self._bucket._after_pass(self._put_back)
        elif self._held:
            self._put_back()
        return averages

    def _put_back(self) -> None:
        places = self._bucket._unused() or ()
        for place, part, held in self._held:
            if place in places:
                part.copy_(held)
