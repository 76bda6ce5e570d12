"""Inputs on a device that lie in outputs: they are copied before the outputs are written.

Data move in pieces: a result's first piece is in place before an input's last one has been read. So
an input may stay in an output only where each piece is read from where it is written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.backends import cuda
from hpcdist.backends.aliasing import inside

from .device_tensor import DeviceTensor


def separate(
    ins: Sequence[DeviceTensor], outs: Sequence[DeviceTensor], may_lie: dict[int, int]
) -> tuple[list[DeviceTensor], list[Any]]:
    """The inputs, copied where they lie in outputs; and the copies, which must stay alive."""
    parts, copies, runtime = list(ins), [], cuda.runtime()
    for place in dict.fromkeys(place for place, _ in inside(ins, outs, may_lie)):
        copy = runtime.duplicate(runtime.current(parts[place].device), parts[place].bytes)
        copies.append(copy)
        parts[place] = parts[place]._replace(bytes=copy, address=copy.data_ptr())
    return parts, copies
