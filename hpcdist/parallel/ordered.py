"""Averages tensors of which a rank may have several, in the order of their numbers.

An all-reduce of as many ranks on one node adds up in the order of ranks, so the bits are those of
one in which each rank has one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from hpcdist._engine import plain_floats
from hpcdist.backends.carrier import Carrier
from hpcdist.parallel.reducer.copies import reals

API = "hpcdist.elastic: gradients of shares"
#: Bytes of each tensor that travel at once.
PIECE = 4 << 20


class _EndToEnd:
    """Tensors as one flat one, without a copy; None counts as zeros."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> None:
        self._tensors, self._sizes = tensors, sizes
        self._ends = list(accumulate(sizes))

    def _parts(self, begin: int, end: int) -> Iterator[tuple[torch.Tensor | None, slice, slice]]:
        """Yield the tensors between two places, and where the part lies in each and in all."""
        for tensor, size, last in zip(self._tensors, self._sizes, self._ends, strict=True):
            first = last - size
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield tensor, slice(low - first, high - first), slice(low - begin, high - begin)

    def read(self, begin: int, out: torch.Tensor) -> None:
        """Copy what lies behind `begin` into a flat tensor."""
        for tensor, inside, at in self._parts(begin, begin + out.numel()):
            if tensor is None:
                out[at].zero_()
            else:
                out[at].copy_(tensor.reshape(-1)[inside])

    def write(self, begin: int, source: torch.Tensor) -> None:
        """Copy a flat tensor to what lies behind `begin`, in contiguous tensors."""
        for tensor, inside, at in self._parts(begin, begin + source.numel()):
            assert tensor is not None
            tensor.view(-1)[inside].copy_(source[at])


def add_up(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the average of tensors, into the first: as an all-reduce computes it."""
    rows = [reals(row) for row in rows]
    total, number = rows[0], len(rows)
    if total.dtype == torch.float16 and number > 1:  # the sum may be infinite
        for row in rows:
            row.mul_(1 / number)
    for row in rows[1:]:
        total.add_(row)
    return total if total.dtype == torch.float16 else total.div_(number)


def average(
    comm: Carrier,
    dealt: Sequence[Sequence[int]],
    mine: Sequence[Sequence[torch.Tensor | None]],
    results: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Average lists of tensors, of which each rank has some; all ranks must call it.

    Parameters
    ----------
    comm : Carrier
        The group's communicator.
    dealt : sequence of sequence of int
        By rank, the numbers of its lists; together all from 0 on.
    mine : sequence of sequence of (torch.Tensor or None)
        This rank's lists, in the order of their numbers; None counts as zeros.
    results : sequence of torch.Tensor
        Where the averages go: contiguous, the same shapes and dtypes on all ranks. They may be
        tensors of `mine`.
    dtype : torch.dtype, optional
        In which floating point numbers are added up, in place of their own.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, result in enumerate(results):
        wide = dtype if dtype is not None and result.is_floating_point() else result.dtype
        kinds.setdefault((wide, result.device), []).append(index)
    with torch.no_grad(), plain_floats():
        for (kind, device), indices in kinds.items():
            sizes = [results[i].numel() for i in indices]
            rows = [_EndToEnd([row[i] for i in indices], sizes) for row in mine]
            to = _EndToEnd([results[i] for i in indices], sizes)
            step, total = max(1, PIECE // kind.itemsize), sum(sizes)
            for begin in range(0, total, step):
                length = min(step, total - begin)
                piece = torch.empty(len(mine), length, dtype=kind, device=device)
                for row, out in zip(rows, piece, strict=True):
                    row.read(begin, out)
                to.write(begin, _average_piece(comm, dealt, piece))


def _average_piece(
    comm: Carrier, dealt: Sequence[Sequence[int]], piece: torch.Tensor
) -> torch.Tensor:
    """Average the rows of all ranks: each rank adds up a slice, and gives it to the others."""
    length, ranks, rank = piece.shape[1], comm.size, comm.rank
    if ranks == 1:
        add_up(list(piece))
        return piece[0]
    each = -(-length // ranks)
    ends = [min(length, each * (r + 1)) for r in range(ranks)]
    slices = [slice(min(length, each * r), end) for r, end in enumerate(ends)]
    here = slices[rank].stop - slices[rank].start
    sent = torch.cat([piece[:, part].reshape(-1) for part in slices])
    out_splits = [len(shares) * here for shares in dealt]
    received = piece.new_empty(sum(out_splits))
    in_splits = [len(piece) * (part.stop - part.start) for part in slices]
    comm.all_to_all_single(received, sent, out_splits, in_splits, api=API)
    owners = [share for shares in dealt for share in shares]
    rows: list[Any] = [None] * len(owners)
    for share, row in zip(owners, received.view(len(owners), here), strict=True):
        rows[share] = row
    own = piece.new_zeros(each)
    reals(own[:here]).copy_(add_up(rows))
    whole = piece.new_empty(ranks * each)
    comm.all_gather_into_tensor(whole, own, api=API)
    return whole[:length]
