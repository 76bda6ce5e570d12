"""What PowerSGD's memory was before a backward pass, until its averages are there."""

from __future__ import annotations

from typing import Any, Protocol

import torch


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

    def see(self, averages: torch.Tensor) -> None:
        """Look at averages of the pass, the same on all ranks; does not wait for a GPU."""
        self._finite.append(averages.isfinite().all())

    @property
    def finite(self) -> bool:
        """Whether all averages of the pass are; the same on all ranks."""
        return all(map(bool, self._finite))

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
