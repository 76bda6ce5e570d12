"""The floor: how long the bytes take that an operation cannot avoid to move."""

from __future__ import annotations

from typing import NamedTuple

from hpcdist import _bench
from hpcdist._ops import ReduceOp

from .errors import Unsupported
from .library import Library
from .measure import Batch
from .operations import Case


class _Share(NamedTuple):
    """What one of n ranks moves of an operation on N bytes, if the ranks divide the work evenly.

    Parameters
    ----------
    copied : {"", "part", "others", "all"}
        Bytes that are read and written: none, N/n, N - N/n, N.
    combined : bool
        Whether n blocks of N/n are read and reduced into one.
    back : bool
        Whether the result is then written into all of them.
    """

    copied: str = ""
    combined: bool = False
    back: bool = False


#: Bytes moved are facts of the floor alone.
_SHARES = {
    "all_reduce": _Share(combined=True, back=True),
    "reduce": _Share(combined=True),
    "reduce_scatter_tensor": _Share(combined=True),
    "broadcast": _Share(copied="others"),
    "all_gather": _Share(copied="all"),
    "all_gather_into_tensor": _Share(copied="all"),
    "all_to_all_single": _Share(copied="all"),
    "gather": _Share(copied="part"),
    "scatter": _Share(copied="part"),
}


class Floor(Library):
    """Loops in C that move each rank's share of the bytes within tensors of its own.

    No rank waits for another one. Below the floor is only an operation whose bytes lie nearer than
    the loop's.
    """

    name = "floor"
    moves = False

    def batch(self, case: Case) -> Batch:
        import torch

        share = _SHARES.get(case.operation.name)
        if share is None:
            raise Unsupported("no bytes to move")
        ranks, dtype = case.ranks, case.dtype
        part = -(-case.total // ranks)
        send = torch.zeros(part * ranks, dtype=dtype.torch_dtype)
        if share.combined:
            # in place where the operation is
            recv = send if case.recv is case.send else torch.zeros(part, dtype=dtype.torch_dtype)
            codes = dtype.code, getattr(ReduceOp, case.redop).code

            def combine(calls: int) -> None:
                _bench.combine(
                    send.data_ptr(), recv.data_ptr(), part, ranks, *codes, share.back, calls
                )

            return combine
        count = {"part": part, "others": part * (ranks - 1), "all": part * ranks}[share.copied]
        recv = torch.zeros(count, dtype=dtype.torch_dtype)

        def copy(calls: int) -> None:
            _bench.copy(send.data_ptr(), recv.data_ptr(), count * dtype.itemsize, calls)

        return copy
