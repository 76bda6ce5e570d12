"""Batches of messages whose tensors share device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist._engine import overlapping


def refuse_overlap(
    operations: Sequence[tuple[bool, Any, int, int]], regions: Sequence[Any]
) -> None:
    """Raise ValueError if a batch receives into memory that another of its messages uses.

    Parameters
    ----------
    operations : sequence of (bool, tensor, int, int)
        Whether to send, the tensor, the peer, the tag.
    regions : sequence
        Where the tensors are: with ``address`` and ``size``, in bytes.
    """
    spans = sorted(
        (each.address, each.address + each.size, sends, peer)
        for each, (sends, _, peer, _) in zip(regions, operations, strict=True)
        if each.size
    )
    read = written = (0, 0, True, 0)  # of those so far the ones that end last
    for span in spans:
        begin, end, sends, peer = span
        if begin < written[1]:
            raise overlapping(peer, sends, written[3])
        if not sends and begin < read[1]:
            raise overlapping(read[3], True, peer)
        if sends:
            read = max(read, span, key=lambda each: each[1])
        else:
            written = max(written, span, key=lambda each: each[1])
