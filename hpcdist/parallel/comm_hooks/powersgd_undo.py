"""What PowerSGD's memory was before a backward pass, until its averages are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

_HALVES = (torch.float16, torch.bfloat16)


def by_qr(matrices: torch.Tensor) -> bool:
    """Whether their columns are made orthonormal by QR, which makes unit columns of zeros."""
    return matrices.shape[2] > 2 and matrices.dtype not in _HALVES


class Memory(Protocol):
    """What is used here of a ``PowerSGDState``."""

    rng: Any
    error_dict: dict[int, torch.Tensor]
    q_memory_dict: dict[int, torch.Tensor]
    total_numel_before_compression: int
    total_numel_after_compression: int


class Before:
    """The memory that a pass has replaced.

    A pass that is given up had a gradient that nobody steps with. What its buckets have left of it,
    in errors and in Q, may be infinite, and differs where ranks gave up at different buckets. Nor
    does anybody step with averages that are not finite, as ``GradScaler`` meets them: in errors and
    in Q they would make those of all later passes NaN.

    Parameters
    ----------
    state : Memory
        As it is before the pass.
    """

    def __init__(self, state: Memory) -> None:
        self._random: Any = state.rng.get_state()
        self._totals = state.total_numel_before_compression, state.total_numel_after_compression
        self._errors: dict[int, torch.Tensor | None] = {}
        self._qs: dict[int, torch.Tensor | None] = {}
        self._finite: list[torch.Tensor] = []
        self._zeros: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def see(self, averages: torch.Tensor) -> None:
        """Look at averages of the pass, the same on all ranks; does not wait for a GPU."""
        self._finite.append(averages.isfinite().all())

    @property
    def finite(self) -> bool:
        """Whether all averages of the pass are; the same on all ranks."""
        return all(map(bool, self._finite))

    def see_q(self, q: torch.Tensor) -> None:
        """Look for columns of zeros in a Q that the next pass begins with; does not wait either.

        A matrix that was zero on all ranks leaves them, and with them its products of all later
        passes would be zero: it would never be sent again.
        """
        if by_qr(q):
            return
        zero = (q == 0).all(1, keepdim=True)
        self._zeros.append((q, zero, zero.any()))

    def redraw(self, draw: Callable[[list[torch.Tensor]], None]) -> None:
        """Draw the columns of zeros again, the same on all ranks."""
        for q, zero, some in self._zeros:
            if some:
                draw([drawn := torch.empty_like(q)])
                q.copy_(torch.where(zero, drawn, q))

    def keep_error(self, index: int, error: torch.Tensor | None) -> None:
        """Keep the error of a bucket, which is about to be replaced."""
        self._errors.setdefault(index, error)

    def keep_q(self, index: int, q: torch.Tensor | None) -> None:
        """Save the Q of a bucket before a pass overwrites it; None: it starts from a random Q."""
        self._qs.setdefault(index, None if q is None else q.clone())

    def restore(self, state: Memory) -> None:
        """Let a state be as it was."""
        state.rng.set_state(self._random)
        state.total_numel_before_compression, state.total_numel_after_compression = self._totals
        for memory, former in ((state.error_dict, self._errors), (state.q_memory_dict, self._qs)):
            for index, tensor in former.items():
                memory.pop(index, None)
                if tensor is not None:
                    memory[index] = tensor
