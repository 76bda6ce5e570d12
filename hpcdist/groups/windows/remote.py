"""A rank's memory in a window that a thread of that rank reads and writes, asked by messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcdist import _engine, dtypes
from hpcdist.errors import DistBackendError
from hpcdist.groups.windows.data import bytes_of, fill_from, is_plain

if TYPE_CHECKING:
    import torch


class RemotePart:
    """Memory of a rank that this process cannot map.

    Each call waits until the rank has answered: then the data are where they belong. A timeout
    leaves open whether they will be.

    Parameters
    ----------
    comm : Comm
        The group's.
    window : int
        The number of the registration.
    rank : int
        Whose memory it is.
    numel : int
        Its elements.
    dtype : torch.dtype
        Their type.
    """

    def __init__(self, comm: Any, window: int, rank: int, numel: int, dtype: torch.dtype) -> None:
        self._comm, self._window, self._rank = comm, window, rank
        self.numel, self.dtype = numel, dtype
        try:
            dtypes.lookup(dtype)
            self._foreign = False
        except TypeError:  # only windows move it: as bytes
            self._foreign = True

    def check(self, what: str) -> None:
        """Raise nothing: the rank itself looks whether its memory is there."""

    def put(self, tensor: torch.Tensor, offset: int, seconds: float | None) -> None:
        """Write a tensor there, from an element on."""
        self._bring("put", _engine.PUT, tensor, offset, seconds)

    def accumulate(self, tensor: torch.Tensor, offset: int, op: Any, seconds: float | None) -> None:
        """Combine a tensor with what is there, from an element on."""
        self._bring("accumulate", _engine.ACCUMULATION, tensor, offset, seconds, op)

    def get(self, tensor: torch.Tensor, offset: int, seconds: float | None) -> None:
        """Read into a tensor, from an element on."""
        import torch

        direct = is_plain(tensor)
        into = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._ask("get", _engine.GET, bytes_of(into) if self._foreign else into, offset, seconds)
        if not direct:
            fill_from(tensor, into.view(-1), "get")

    def _bring(
        self,
        what: str,
        call: int,
        tensor: torch.Tensor,
        offset: int,
        seconds: float | None,
        op: Any = None,
    ) -> None:
        data, as_bytes = tensor, self._foreign and op is None
        if as_bytes or not is_plain(tensor):
            flat = bytes_of(tensor)
            data = flat if as_bytes else flat.view(self.dtype)
        self._comm.refuse_nan(data, what)
        self._ask(what, call, data, offset, seconds, op)

    def _ask(
        self,
        what: str,
        call: int,
        data: torch.Tensor,
        offset: int,
        seconds: float | None,
        op: Any = None,
    ) -> None:
        at = offset * self.dtype.itemsize
        request = _engine.Request(self._comm, self._rank, what, call, self._window, at, data, op)
        refused = request.ask(0.0 if seconds is None else max(seconds, 1e-9))  # 0 is no limit
        if refused:
            raise DistBackendError(
                f"{what}: rank {self._rank} of group {self._comm.name!r} has refused it: "
                f"{refused} (this is rank {self._comm.rank})"
            )
