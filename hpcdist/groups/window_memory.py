"""The memory of a window: which tensor of each rank the others may write and read."""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from hpcdist._engine import Work, check_usable, tags
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.errors import DistBackendError, DistError, DistMismatchError
from hpcdist.groups.members import Members
from hpcdist.groups.numbers import whole
from hpcdist.groups.window_data import refuse_without_memory

if TYPE_CHECKING:
    import torch

#: Of each communicator: the number of the next window, which gives the tag of its signals. A rank
#: that an exception kept from a registration has counted less than others; they agree at the next.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class WindowMemory:
    """The part of :class:`hpcdist.Window` that registers tensors and finds those of other ranks."""

    def __init__(self, group: Any) -> None:
        if type(getattr(group, "members", None)) is not Members:
            raise TypeError(
                "group must be a process group of hpcdist that this process is in, not "
                f"{type(group).__name__}: {group!r}"
            )
        self._group = group
        self._comm: Any = agreeing(group.carrier)  # where there are windows, a Comm
        if not self._comm.supports_window:
            raise DistBackendError(
                f"the process group {group.members.name!r} has no windows (supports_window is "
                "False): they need all its ranks on one node, and the entry check through its "
                "memory"
            )
        self._tag = -1
        #: Of each rank: its memory, and what tells whether that is still symmetric. Replaced as a
        #: whole, because other threads read it.
        self._parts: list[tuple[torch.Tensor, Any]] | None = None
        self._tensor: Any = None
        #: Of each peer: signals that arrived while the wait for them raised something else.
        self._kept: defaultdict[int, list[Work]] = defaultdict(list)

    # ---- registration ----

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Make a tensor of each rank accessible to the others.

        All ranks of the group must call it.

        Parameters
        ----------
        tensor : torch.Tensor
            Symmetric in this group: from :func:`hpcdist.empty`, or a contiguous view of such a
            tensor. The same dtype on all ranks; the number of elements may differ, and be 0.
        owning : bool
            Whether the window keeps the tensor alive. If not, the caller does so on all ranks until
            :meth:`tensor_deregister`.

        Raises
        ------
        ValueError
            If a tensor is registered already, or is not contiguous; on all ranks, if some rank's
            tensor is not symmetric.
        TypeError
            If it is not a tensor on the host.
        DistMismatchError
            On all ranks, if the dtypes differ.
        DistError
            If the group was destroyed.
        """
        import torch

        comm = self._live()
        with refusing(comm, "tensor_register"):
            if self._parts is not None:
                raise ValueError("a tensor is registered with this window already")
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a window takes a torch.Tensor, not {type(tensor).__name__}")
            if tensor.device.type != "cpu":
                raise TypeError(f"a window takes tensors on the host, not on {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError("a window takes contiguous tensors only")
            flat = tensor.detach().view(-1)
            place = comm.place(flat) if flat.numel() else None
            block, at = place or (0, 0)
            kind = zlib.crc32(str(tensor.dtype).encode())
            # a signal that nobody took is not for what is registered next
            mine = torch.tensor(
                [block, at, flat.numel(), kind, _numbers.get(comm, 0)], device="cpu"
            )
        rows = torch.empty(comm.size * 5, dtype=torch.int64, device="cpu")
        comm.all_gather_into_tensor(rows, mine, api="tensor_register")
        table = rows.view(-1, 5).tolist()
        number = max(row[4] for row in table)
        _numbers[comm] = max(_numbers.get(comm, 0), number + 1)
        self._refuse_bad(table, tensor.dtype)
        parts: list[tuple[torch.Tensor, Any]] = []
        with torch.inference_mode(False):  # what is made in it cannot be written outside of it
            for rank, (block, at, n, _, _) in enumerate(table):
                if n == 0 or comm.size == 1:
                    parts.append((flat if n else flat[:0], None))
                    continue
                part = comm.part(rank, block, at, n * tensor.itemsize)
                parts.append((torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype), part))
        self._kept.clear()
        self._tag = number % tags(comm)  # at least 1,024; millions with most MPIs
        # Not the tensor, which may get other memory later: p.data = ..., module.to(dtype).
        self._tensor, self._parts = flat if owning else None, parts

    def _refuse_bad(self, table: list[list[int]], dtype: Any) -> None:
        """Raise what all ranks find in the table that all have."""
        kinds = {row[3] for row in table}
        if len(kinds) > 1:
            same = [rank for rank, row in enumerate(table) if row[3] == table[self._comm.rank][3]]
            raise DistMismatchError(
                f"tensor_register: the ranks' tensors have {len(kinds)} different dtypes; {dtype} "
                f"on ranks {same}"
            )
        plain = [rank for rank, row in enumerate(table) if row[2] and not row[0]]
        if plain and self._comm.size > 1:
            raise ValueError(
                f"tensor_register: the tensors of ranks {plain} are not symmetric in the group "
                f"{self._group.members.name!r}: create them by hpcdist.empty(..., group=group) "
                "(hpcdist.is_symmetric tells whether there was room)"
            )

    def tensor_deregister(self) -> None:
        """End the access to the ranks' tensors. The window can register others.

        All ranks of the group must call it, when no thread of theirs is in :meth:`Window.put` or
        its like any more; no rank returns before all have called.

        Raises
        ------
        DistError
            If no tensor is registered, or the group was destroyed.
        """
        comm = self._live()
        with refusing(comm, "tensor_deregister"):
            self._all()
        comm.barrier(api="tensor_deregister")
        self._parts, self._tensor = None, None

    # ---- checks ----

    def _live(self) -> Any:
        if self._comm.freed:
            raise DistError(
                f"the process group {self._group.members.name!r} of this window has been destroyed"
            )
        check_usable(self._comm)
        return self._comm

    def _all(self) -> list[tuple[torch.Tensor, Any]]:
        if self._parts is None:
            raise DistError("no tensor is registered with this window: call tensor_register")
        return self._parts

    def _part(self, rank: int, what: str) -> tuple[torch.Tensor, Any]:
        """A rank's memory, and its :class:`hpcdist._engine.Part`, if it has one."""
        self._live()
        parts = self._all()
        rank = self._group.members.check(rank, "rank")
        part, keeper = parts[rank]
        self._check_whole(keeper, rank, what)
        return part, keeper

    @staticmethod
    def _check_whole(keeper: Any, rank: int, what: str) -> None:
        """Raise if a rank's tensor does not lie in its part any more; also after what was moved."""
        if keeper is not None and not keeper.whole:
            raise DistBackendError(
                f"{what}: the tensor of rank {rank} is no longer symmetric, because an operation "
                "on it failed while data moved; register another"
            )

    def _range(self, tensor: Any, rank: int, offset: int, what: str) -> tuple[torch.Tensor, Any]:
        """The elements of a rank's memory that a tensor is for, and its Part."""
        import torch

        part, keeper = self._part(rank, what)
        self._comm.refuse_withdrawn(int(rank), what)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} takes a torch.Tensor, not {type(tensor).__name__}")
        if tensor.device.type != "cpu":
            raise TypeError(f"{what} takes tensors on the host, not on {tensor.device}")
        if tensor.dtype != part.dtype:
            raise TypeError(f"{what}: a tensor of {tensor.dtype} for a window of {part.dtype}")
        refuse_without_memory(tensor, what)
        offset, n = whole(offset, "target_offset_nelems"), tensor.numel()
        if offset < 0 or offset + n > part.numel():
            raise ValueError(
                f"{what}: {n} elements at {offset} do not fit into the window of rank {rank}, "
                f"which has {part.numel()}"
            )
        return part[offset : offset + n], keeper
