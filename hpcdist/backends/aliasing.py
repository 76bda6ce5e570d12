"""Finds tensors of one call on a device that share memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol


class Region(Protocol):
    """The memory of a dense tensor: its address and its number of bytes."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


def _by_address(regions: Sequence[Region]) -> list[tuple[int, int, int]]:
    """Return begin, end and index of the regions that are not empty."""
    return sorted(
        (region.address, region.address + region.size, place)
        for place, region in enumerate(regions)
        if region.size
    )


def inside(
    ins: Sequence[Region], outs: Sequence[Region], may_lie: dict[int, int]
) -> list[tuple[int, int]]:
    """Return the indexes of inputs that overlap outputs, except those that may lie there.

    Parameters
    ----------
    ins, outs : sequence of Region
        No two of `outs` overlap.
    may_lie : dict
        Index of an input to the index of the output that may contain all of it.
    """
    spans = _by_address(outs)
    begins = [begin for begin, _, _ in spans]
    found = []
    for place, region in enumerate(ins):
        if not region.size:
            continue
        at = max(bisect_right(begins, region.address) - 1, 0)
        for begin, end, other in spans[at:]:
            if begin >= region.address + region.size:
                break
            if end > region.address and (may_lie.get(place) != other or begin != region.address):
                found.append((place, other))
    return found


def refuse_overlap(outs: Sequence[Region], role: str) -> None:
    """Raise ValueError if two outputs overlap: no result would be right."""
    spans = _by_address(outs)
    for one, other in zip(spans, spans[1:], strict=False):
        if other[0] < one[1]:
            first, second = sorted((one[2], other[2]))
            raise ValueError(
                f"{role}[{first}] and {role}[{second}] overlap in memory, and both are written to; "
                "pass separate tensors"
            )


def refuse_input_in_output(
    ins: Sequence[Region], outs: Sequence[Region], may_lie: dict[int, int], role: str, place: str
) -> None:
    """Raise ValueError if an input would be overwritten before it is read."""
    for one, other in inside(ins, outs, may_lie):
        raise ValueError(
            f"{role}[{one}] lies in {place}[{other}], which is written to before it has been read; "
            "pass a separate tensor"
        )
