"""The memory of a ZeroRedundancyOptimizer's shares, where each is one message without packing."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpcdist.groups.comparison import digest
from hpcdist.parallel.reducer.bucket import is_dense


class Flats:
    """The parameters of each rank's share, end to end in one tensor per dtype and device.

    Attributes
    ----------
    all : list of (int, torch.Tensor, int)
        Rank, tensor, and a digest that is the same where its parameters lie in it in the same way.
    """

    def __init__(self) -> None:
        self.all: list[tuple[int, torch.Tensor, int]] = []
        self._places: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []

    def lay_out(self, shares: Iterable[Iterable[torch.Tensor]]) -> None:
        """Move the parameters of each rank into new memory; local."""
        flats: list[tuple[int, torch.Tensor, int]] = []
        places: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []
        for rank, parameters in enumerate(shares):
            kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for parameter in parameters:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            for (dtype, device), members in kinds.items():
                sizes = [p.numel() for p in members]
                flat = torch.empty(sum(sizes), dtype=dtype, device=device)
                for parameter, part in zip(members, flat.split(sizes), strict=True):
                    old = parameter.data
                    new = part.view(old.shape)
                    if is_dense(old):  # channels last keeps its layout
                        new = part.as_strided(old.shape, old.stride(), part.storage_offset())
                    parameter.data = new.copy_(old)
                    places.append((parameter, parameter.data_ptr(), parameter.stride()))
                flats.append((rank, flat, digest(list(map(_order, members)))))
        self.all, self._places = flats, places

    def moved(self) -> bool:
        """Return whether a parameter lies elsewhere now, or otherwise; local.

        ``module.to()`` and ``vector_to_parameters`` give parameters other memory, for example.
        """
        return any(p.data_ptr() != at or p.stride() != how for p, at, how in self._places)


def _order(parameter: torch.Tensor) -> list[int]:
    """Return the strides; where the size is 1 they mean nothing, and may differ between ranks."""
    pairs = zip(parameter.stride(), parameter.shape, strict=True)
    return [stride if size != 1 else 0 for stride, size in pairs]
