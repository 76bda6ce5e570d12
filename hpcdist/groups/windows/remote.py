"""A rank's memory in a window that a thread of that rank reads and writes, asked by messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcdist import _engine, dtypes
from hpcdist.groups.windows.data import bytes_of, fill_from, is_plain

if TYPE_CHECKING:
    import torch

    from hpcdist._engine import Work


class RemotePart:
    """Memory of a rank that this process cannot map.

    The data are where they belong when the rank has answered. A call waits for that, or, with
    `later`, returns a Work that does. A timeout leaves open whether they will be.

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

    def put(
        self, tensor: torch.Tensor, offset: int, seconds: float | None, later: bool = False
    ) -> Work | None:
        """Write a tensor there, from an element on."""
        return self._bring("put", _engine.PUT, tensor, offset, seconds, later)

    def accumulate(
        self,
        tensor: torch.Tensor,
        offset: int,
        op: Any,
        seconds: float | None,
        later: bool = False,
    ) -> Work | None:
        """Combine a tensor with what is there, from an element on."""
        call = _engine.ACCUMULATION
        return self._bring("accumulate", call, tensor, offset, seconds, later, op)

    def get(
        self, tensor: torch.Tensor, offset: int, seconds: float | None, later: bool = False
    ) -> Work | None:
        """Read into a tensor, from an element on; now, if its elements do not lie in order."""
        import torch

        if is_plain(tensor):
            into = bytes_of(tensor) if self._foreign else tensor
            return self._ask("get", _engine.GET, into, offset, seconds, tensor if later else None)
        flat = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        into = bytes_of(flat) if self._foreign else flat
        self._ask("get", _engine.GET, into, offset, seconds)
        fill_from(tensor, flat.view(-1), "get")
        return None

    def _bring(
        self,
        what: str,
        call: int,
        tensor: torch.Tensor,
        offset: int,
        seconds: float | None,
        later: bool,
        op: Any = None,
    ) -> Work | None:
        data, as_bytes = tensor, self._foreign and call == _engine.PUT
        if as_bytes or not is_plain(tensor):
            flat = bytes_of(tensor)
            data = flat if as_bytes else flat.view(self.dtype)
        self._comm.refuse_nan(data, what)
        return self._ask(what, call, data, offset, seconds, tensor if later else None, op)

    def _ask(
        self,
        what: str,
        call: int,
        data: torch.Tensor,
        offset: int,
        seconds: float | None,
        later: torch.Tensor | None = None,
        op: Any = None,
    ) -> Work | None:
        """Ask; `later` is None, or what the Work gives as its result."""
        at = offset * self.dtype.itemsize
        request = _engine.Request(self._comm, self._rank, what, call, self._window, at, data, op)
        limit = 0.0 if seconds is None else max(seconds, 1e-9)  # 0 is no limit
        if later is not None:
            return request.start(limit, later)
        request.ask(limit)
        return None
