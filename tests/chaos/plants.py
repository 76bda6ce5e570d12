"""Mistakes that are planted in hpcdist, to see that they are found."""

from __future__ import annotations

from typing import Any

import torch

import hpcdist as dist
from hpcdist.groups.windows import mapped, window


def _put() -> None:
    """Put writes one element off."""
    put = window.Window.put

    def off(self: Any, tensor: Any, rank: int, at: int = 0, *more: Any, **named: Any) -> Any:
        fits = at + 1 + tensor.numel() <= self._part(rank, "put").numel
        return put(self, tensor, rank, at + fits, *more, **named)

    window.Window.put = off  # type: ignore[assignment]


def _overlap() -> None:
    """Copies between overlapping elements are made in place."""

    def in_place(tensor: Any, there: Any) -> Any:
        return torch.from_numpy(tensor.detach().numpy().reshape(-1))  # torch would refuse

    mapped.elements_of = in_place  # type: ignore[assignment]


def _accumulate() -> None:
    """One accumulate in twenty does nothing."""
    accumulate, calls = window.Window.accumulate, iter(range(10**9))

    def sometimes(self: Any, tensor: Any, *rest: Any, **named: Any) -> Any:
        if next(calls) % 20 == 0:
            return self._comm.finished([tensor])
        return accumulate(self, tensor, *rest, **named)

    window.Window.accumulate = sometimes  # type: ignore[assignment]


def _signal() -> None:
    """One signal in five is not sent."""
    signal, calls = window.Window.signal, iter(range(10**9))

    def sometimes(self: Any, rank: int, *rest: Any, **named: Any) -> Any:
        if next(calls) % 5 == 4:
            return self._comm.finished([])
        return signal(self, rank, *rest, **named)

    window.Window.signal = sometimes  # type: ignore[assignment]


def _bucket() -> None:
    """On rank 1 a hook's result for the first bucket is dropped."""
    register = dist.DistributedDataParallel.register_comm_hook

    def drops(self: Any, state: Any, hook: Any) -> None:
        def hook_and_drop(state: Any, bucket: Any) -> Any:
            own = bucket.buffer().clone()
            future = hook(state, bucket)
            if dist.get_rank() != 1 or bucket.index():
                return future
            return future.then(lambda _: own)

        register(self, state, hook_and_drop)

    dist.DistributedDataParallel.register_comm_hook = drops  # type: ignore[assignment]


PLANTS = {
    "put": _put, "overlap": _overlap, "accumulate": _accumulate, "signal": _signal,
    "bucket": _bucket,
}  # fmt: skip
