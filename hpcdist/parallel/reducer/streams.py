"""The GPU streams on which gradients are computed, and the waits between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hpcdist.backends import cuda


class Streams:
    """The streams of the gradients in one backward pass.

    Autograd computes a gradient on the stream that its forward ran on. A bucket is packed, and its
    reduction started, on the stream of its last gradient; that stream has to wait for those of the
    others. In a program with one stream there is nothing to wait for.
    """

    def __init__(self) -> None:
        self._runtime = cuda.runtime()
        self._seen: dict[int, dict[int, tuple[int, Any]]] = {}

    def note(self, bucket: Any, index: int) -> None:
        """A gradient of a bucket has been computed on the calling thread's current stream."""
        stream = self._runtime.current(index)
        self._seen.setdefault(id(bucket), {})[self._runtime.handle(stream)] = (index, stream)

    def gather(self, bucket: Any) -> None:
        """Let the current stream wait for those of all the bucket's gradients."""
        runtime = self._runtime
        for handle, (index, stream) in self._seen.pop(id(bucket), {}).items():
            current = runtime.current(index)
            if runtime.handle(current) != handle:
                runtime.order(current, runtime.record(stream))

    def reset(self) -> None:
        """Get ready for the next pass."""
        self._seen.clear()


def streams_of(parameters: Iterable[torch.Tensor]) -> Streams | None:
    """Return an object that tracks these parameters' streams; None if they are on the host."""
    return Streams() if any(p.device.type == "cuda" for p in parameters) else None
