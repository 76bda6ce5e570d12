"""Copies one rank's tensors to all others, many small ones in one message."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from hpcdist.groups.comparison import digest, naming
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.parallel.reducer.bucket import MIB, is_dense
from hpcdist.parallel.reducer.copies import copy_each

# A tensor of at least this size is sent alone: packing it would cost more than its own call.
_LARGE = MIB
# The size limit of flat buffers, so that packing one overlaps with sending the previous one.
_FLAT = 16 * MIB


def packed(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Yield lists of tensors that are sent together; a single tensor is sent as it is."""
    packs: list[list[torch.Tensor]] = []
    small: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in map(torch.Tensor.detach, tensors):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            continue
        if nbytes >= _LARGE and is_dense(tensor):
            packs.append([tensor])
            continue
        key = (tensor.dtype, tensor.device)
        members, size = small.get(key, ([], 0))
        members.append(tensor)
        small[key] = (members, size + nbytes)
        if size + nbytes >= _FLAT:
            packs.append(small.pop(key)[0])
    return packs + [members for members, _ in small.values()]


def unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy what a flat tensor contains into the tensors that were packed into it, end to end."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    views = [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
    copy_each(tensors, views)


@lru_cache(256)
def _digest(shapes: tuple[torch.Size, ...]) -> int:
    """Return the digest of tensors' shapes: each forward asks for that of the same buffers."""
    return digest([tuple(shape) for shape in shapes])


def send(group: ProcessGroup, packs: list[list[torch.Tensor]], root: int, api: str) -> None:
    """Broadcast each of the lists from :func:`packed`; start all of them at once.

    Each rank's tensors must have the same shapes, in the same order; the entry check compares them.
    Packed tensors that are equal to the root's are not written to.
    """
    comm = group.carrier
    works: list[Any] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of lazily conjugated tensors
    flats: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
    with torch.no_grad():
        for members in packs:
            first = members[0]
            shapes = _digest(tuple([each.shape for each in members]))
            if len(members) == 1 and first.nbytes >= _LARGE and is_dense(first):
                plain = first.resolve_conj().resolve_neg()
                works.append(comm.broadcast(plain, root, True, api=api, extra=shapes))
                if plain is not first and comm.rank != root:
                    copies.append((first, plain))
                continue
            flat = torch.cat([member.reshape(-1) for member in members])
            if comm.rank != root:
                flats.append((flat.clone(), flat, members))
            works.append(comm.broadcast(flat, root, True, api=api, extra=shapes))
        with naming("the tensors' shapes"):
            for work in works:
                work.wait()
        for before, after, members in flats:
            if not torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
                unpack(after, members)
        for target, source in copies:
            target.copy_(source)
