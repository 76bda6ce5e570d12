"""Tensors of one call on a device that share memory: refused, or copied before others are written.

Data move in pieces: a result's first piece is in place before an input's last one has been read. So
an input may lie in an output only where each piece is read from where it is written to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from hpcdist.backends.nccl import device

from .parts import Part

__all__ = ["refuse_input_in_output", "refuse_overlap", "separate"]


def _by_address(parts: Sequence[Part]) -> list[tuple[int, int, int]]:
    """Begin, end and place of those that hold something."""
    return sorted(
        (part.address, part.address + part.size, place)
        for place, part in enumerate(parts)
        if part.size
    )


def refuse_overlap(outs: Sequence[Part], role: str) -> None:
    """Raise ValueError where two outputs overlap: there is no right answer."""
    spans = _by_address(outs)
    for one, other in zip(spans, spans[1:], strict=False):
        if other[0] < one[1]:
            first, second = sorted((one[2], other[2]))
            raise ValueError(
                f"{role}[{first}] and {role}[{second}] overlap in memory, and both are written to; "
                "pass separate tensors"
            )


def _inside(
    ins: Sequence[Part], outs: Sequence[Part], same: dict[int, int]
) -> list[tuple[int, int]]:
    """Inputs that lie in outputs, as places; but for those in the very place that is theirs.

    Parameters
    ----------
    ins, outs : sequence of Part
        No two of `outs` overlap.
    same : dict
        Place of an input to that of the output in which it may lie as a whole.
    """
    spans = _by_address(outs)
    begins = [begin for begin, _, _ in spans]
    found = []
    for place, part in enumerate(ins):
        at = max(bisect_right(begins, part.address) - 1, 0)
        for begin, end, other in spans[at:]:
            if begin >= part.address + part.size:
                break
            if end > part.address and (same.get(place) != other or begin != part.address):
                found.append((place, other))
    return found


def refuse_input_in_output(
    ins: Sequence[Part], outs: Sequence[Part], same: dict[int, int], role: str, place: str
) -> None:
    """Raise ValueError where an input is written to before it has been read."""
    for one, other in _inside(ins, outs, same):
        raise ValueError(
            f"{role}[{one}] lies in {place}[{other}], which is written to before it has been read; "
            "pass a separate tensor"
        )


def separate(
    ins: Sequence[Part], outs: Sequence[Part], same: dict[int, int]
) -> tuple[list[Part], list[Any]]:
    """The inputs, copied where they lie in outputs; and the copies, which must stay alive."""
    parts, copies, runtime = list(ins), [], device.runtime()
    for place in dict.fromkeys(place for place, _ in _inside(ins, outs, same)):
        copy = runtime.duplicate(runtime.current(parts[place].device), parts[place].bytes)
        copies.append(copy)
        parts[place] = parts[place]._replace(bytes=copy, address=copy.data_ptr())
    return parts, copies
