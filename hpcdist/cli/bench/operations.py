"""The collectives that are measured: buffers, data, and what counts as bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist import operations
from hpcdist.dtypes import DType

from .errors import Unsupported

if TYPE_CHECKING:
    import torch

#: Elements after which a pattern repeats: a prime, so that no block of a buffer looks like another.
_PERIOD = 1048573


@dataclass(frozen=True)
class Operation:
    """A collective.

    Parameters
    ----------
    name : str
        Its public name.
    send, recv : {"one", "part", "all", ""}
        How much a rank sends and receives: one buffer of the full size, one rank's part of it, all
        parts, or nothing. An operation in place receives into what it sends, so its `recv` is
        ``""``.
    bus : callable
        Number of ranks -> factor from algorithm bandwidth to bus bandwidth, as nccl-tests has it.

    Attributes
    ----------
    reduces, rooted : bool
        Whether it takes a reduce operation, and whether it has a root.
    """

    name: str
    send: str
    recv: str
    bus: Callable[[int], float] = field(default=lambda n: (n - 1) / n)

    reduces = property(lambda self: operations.OPERATIONS[self.name].op is not None)
    rooted = property(lambda self: operations.OPERATIONS[self.name].root is not None)


#: Sizes and bandwidths are facts of the measurement alone.
OPERATIONS: dict[str, Operation] = {
    each.name: each
    for each in (
        Operation("all_reduce", "one", "", bus=lambda n: 2 * (n - 1) / n),
        Operation("broadcast", "one", "", bus=lambda n: 1.0),
        Operation("reduce", "one", "", bus=lambda n: 1.0),
        Operation("all_gather", "part", "all"),
        Operation("all_gather_into_tensor", "part", "all"),
        Operation("reduce_scatter_tensor", "all", "part"),
        Operation("all_to_all_single", "all", "all"),
        Operation("gather", "part", "all"),
        Operation("scatter", "all", "part"),
        Operation("barrier", "", ""),
    )
}


def pattern(rank: int, count: int) -> np.ndarray:
    """The numbers 0 to 7 in an order of its own for each rank, as int64.

    Small whole numbers are exact in every dtype, and so are their sums over a good many ranks.
    """
    index = np.arange(min(count, _PERIOD), dtype=np.uint64)
    mixed = (index + np.uint64(1)) * np.uint64(2654435761) + np.uint64(rank * 40503 * 65537)
    mixed ^= mixed >> np.uint64(15)
    tile = ((mixed * np.uint64(2246822519)) >> np.uint64(13) & np.uint64(7)).astype(np.int64)
    return tile if count <= _PERIOD else np.resize(tile, count)


class Case:
    """One row's worth of buffers on this rank: an operation on so many bytes of a dtype.

    Parameters
    ----------
    operation : Operation
        What is done.
    size : int
        Bytes of the larger side, as nccl-tests counts; rounded down to whole elements, one at
        least.
    dtype : DType
        Of the elements.
    redop : str
        Name of the reduce operation.
    root : int
        Rank of the root.
    rank, ranks : int
        This process, and how many there are.

    Attributes
    ----------
    send, recv : torch.Tensor
        The same tensor for an operation in place. On ranks that do not take part in a side it is
        there all the same.
    part, total : int
        Elements of one rank's part, and of the larger side.
    """

    def __init__(
        self,
        operation: Operation,
        size: int,
        dtype: DType,
        redop: str,
        root: int,
        rank: int,
        ranks: int,
    ) -> None:
        import torch

        self.operation, self.dtype, self.redop, self.root = operation, dtype, redop, root
        self.rank, self.ranks = rank, ranks
        whole = size // dtype.itemsize
        split = "all" in (operation.send, operation.recv)
        self.part = max(1, whole // ranks if split else whole) if operation.send else 0
        self.total = self.part * ranks if split else self.part
        counts = {"": 0, "one": self.total, "part": self.part, "all": self.total}
        self.send = torch.zeros(counts[operation.send], dtype=dtype.torch_dtype)
        self.recv = (
            torch.zeros(counts[operation.recv], dtype=dtype.torch_dtype)
            if operation.recv
            else self.send
        )
        self._given: torch.Tensor | None = None
        self._expected: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """int: bytes of the larger side."""
        return self.total * self.dtype.itemsize

    @property
    def count(self) -> int:
        """int: elements as nccl-tests prints them: of one rank's part."""
        return self.part

    @property
    def is_root(self) -> bool:
        """bool: whether this rank is the root."""
        return self.rank == self.root

    @property
    def _receives(self) -> bool:
        return self.is_root or self.operation.name != "gather"

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One view for each rank's part of `send` or `recv`."""
        return list(tensor.split(self.part))

    def fill(self) -> None:
        """Put this rank's pattern into what it sends, and what cannot be a result elsewhere."""
        given, expected = self._data()
        if self.recv is not self.send:
            # who receives nothing must find it as it was
            if self._receives:
                fill_other(self.recv, expected)
            else:
                self.recv.copy_(expected)
        self.send.copy_(given)

    def wrong(self) -> int:
        """How many elements are not what the operation should have left on this rank.

        Away from the root a reduce may use its buffer for what is on the way.
        """
        if self.operation.name == "reduce" and not self.is_root:
            return 0
        expected = self._data()[1]
        got = self.recv
        if self.redop == "AVG" and self.operation.reduces and self.dtype.kind in ("float",):
            import torch

            near = torch.finfo(got.dtype).eps * 2
            return int(((got - expected).abs() > near * expected.abs()).sum())
        # by bytes: not every dtype can be compared, and -0 is not 0
        width = self.dtype.itemsize
        differ = (got.view(_bytes()) != expected.view(_bytes())).view(-1, width)
        return int(differ.any(1).sum())

    def rest(self) -> None:
        """Zeros for the calls that are timed: they stay what they are, however often they add."""
        self.send.zero_()

    def _data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank sends, and what should be in `recv` afterwards."""
        if self._given is None or self._expected is None:
            self._given = self._convert(self._pattern(self.rank, len(self.send)))
            self._expected = self._result()
        return self._given, self._expected

    def _pattern(self, rank: int, count: int) -> np.ndarray:
        values = pattern(rank, count)
        if self.dtype.kind == "bool":
            return values & 1
        if self.operation.reduces and self.redop == "PRODUCT":
            # two on one rank and one on the others: no power of two is too large for a dtype
            return np.where((np.arange(count) + values[0]) % self.ranks == rank, 2, 1)
        return values

    def _result(self) -> torch.Tensor:
        name = self.operation.name
        if name in ("all_reduce", "reduce"):
            return self._reduced(0, self.total, self.total)
        if name == "reduce_scatter_tensor":
            return self._reduced(self.rank * self.part, self.part, self.total)
        if name == "broadcast":
            return self._convert(self._pattern(self.root, self.total))
        if name == "scatter":
            begin = self.rank * self.part
            whole = self._pattern(self.root, self.total)
            return self._convert(whole[begin : begin + self.part])
        if name in ("all_gather", "all_gather_into_tensor", "gather"):
            parts = [self._pattern(rank, self.part) for rank in range(self.ranks)]
            return self._convert(np.concatenate(parts))
        if name == "all_to_all_single":
            begin, end = self.rank * self.part, (self.rank + 1) * self.part
            parts = [self._pattern(rank, self.total)[begin:end] for rank in range(self.ranks)]
            return self._convert(np.concatenate(parts))
        return self.recv.clone()

    def _reduced(self, begin: int, count: int, whole: int) -> torch.Tensor:
        """Elements begin to begin + count of the reduction over all ranks' patterns."""
        both: dict[str, Any] = {
            "SUM": np.add,
            "AVG": np.add,
            "PRODUCT": np.multiply,
            "MIN": np.minimum,
            "MAX": np.maximum,
            "BAND": np.bitwise_and,
            "BOR": np.bitwise_or,
            "BXOR": np.bitwise_xor,
        }
        result = self._pattern(0, whole)[begin : begin + count]
        for rank in range(1, self.ranks):
            result = both[self.redop](result, self._pattern(rank, whole)[begin : begin + count])
        if self.redop == "AVG":
            floats = self.dtype.kind in ("float", "complex")
            result = result / self.ranks if floats else result // self.ranks
        if self.dtype.kind == "bool":
            result = result != 0
        return self._convert(result)

    def _convert(self, values: np.ndarray) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.ascontiguousarray(values)).to(self.dtype.torch_dtype)


def _bytes() -> torch.dtype:
    import torch

    return torch.uint8


def fill_other(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill a tensor with what differs in every element from another one of its dtype and size."""
    import torch

    if tensor.dtype == torch.bool:
        out.copy_(~tensor)
    else:
        out.view(torch.uint8).copy_(~tensor.view(torch.uint8))


def pattern_of(rank: int, count: int, dtype: DType) -> torch.Tensor:
    """A rank's pattern as a tensor."""
    import torch

    values = pattern(rank, count)
    return torch.from_numpy(values & 1 if dtype.kind == "bool" else values).to(dtype.torch_dtype)


def refuse(case: Case) -> None:
    """Raise Unsupported if no library can do it, such as a float's bitwise operations."""
    if case.operation.reduces and case.redop not in case.dtype.ops:
        raise Unsupported(f"{case.redop} has no meaning for {case.dtype}")
