"""The memory of a window: which tensor of each rank the others may write and read."""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from hpcdist._engine import Exposed, Work, check_usable, settle_window, tags
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing
from hpcdist.errors import DistBackendError, DistError, DistMismatchError
from hpcdist.groups.members import Members
from hpcdist.groups.numbers import whole
from hpcdist.groups.windows.data import bytes_of, refuse_without_memory
from hpcdist.groups.windows.mapped import MappedPart
from hpcdist.groups.windows.remote import RemotePart

if TYPE_CHECKING:
    import torch

#: Of each communicator: the number of the next window, which gives the tag of its signals. A rank
#: that an exception kept from a registration has counted less than others; they agree at the next.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

#: Of each communicator: the memory of this rank that others reach by messages, also once its window
#: is dropped: they may still use theirs.
_exposed: weakref.WeakKeyDictionary[Any, set[Exposed]] = weakref.WeakKeyDictionary()

#: Of each rank, in the table of a registration: its block and the place in it, or 0 and 0 if its
#: tensor is not symmetric; its elements; their type; the next number; whether it serves requests.
_COLUMNS = 6


class WindowMemory:
    """The part of :class:`hpcdist.Window` that registers tensors and finds those of other ranks."""

    def __init__(self, group: Any) -> None:
        if type(getattr(group, "members", None)) is not Members:
            raise TypeError(
                "group must be a process group of hpcdist that this process is in, not "
                f"{type(group).__name__}: {group!r}"
            )
        self._group = group
        self._generation = group.members.generation
        self._comm: Any = agreeing(group.carrier)  # where there are windows, a Comm
        if not self._comm.supports_window:
            raise DistBackendError(
                f"the process group {group.members.name!r} has no windows (supports_window is "
                "False): they need all its ranks on one node, or MPI's MPI_THREAD_MULTIPLE"
            )
        self._tag = -1
        self._number = -1
        #: Of each rank: its memory. Replaced as a whole, because other threads read it.
        self._parts: list[MappedPart | RemotePart] | None = None
        self._tensor: Any = None
        self._exposed: Exposed | None = None
        #: Of each peer: signals that arrived while the wait for them raised something else.
        self._kept: defaultdict[int, list[Work]] = defaultdict(list)

    # ---- registration ----

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Make a tensor of each rank accessible to the others.

        All ranks of the group must call it.

        Parameters
        ----------
        tensor : torch.Tensor
            Contiguous. The same dtype on all ranks; the number of elements may differ, and be 0.
            Where all ranks' tensors are symmetric in this group (:func:`hpcdist.empty`, or a view
            of such a tensor), the others read and write them as they are. Else each rank has a
            thread that does so, asked by messages; that needs MPI's ``MPI_THREAD_MULTIPLE``.
        owning : bool
            Whether the window keeps the tensor alive. If not, the caller does so on all ranks until
            :meth:`tensor_deregister`.

        Raises
        ------
        ValueError
            If a tensor is registered already, or is not contiguous; on all ranks, if some rank's
            tensor is not symmetric, and some rank has not ``MPI_THREAD_MULTIPLE``.
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
                [block, at, flat.numel(), kind, _numbers.get(comm, 0), comm.serves_windows],
                device="cpu",
            )
        rows = torch.empty(comm.size * _COLUMNS, dtype=torch.int64, device="cpu")
        comm.all_gather_into_tensor(rows, mine, api="tensor_register")
        table = rows.view(-1, _COLUMNS).tolist()
        number = max(row[4] for row in table)
        _numbers[comm] = max(_numbers.get(comm, 0), number + 1)
        self._refuse_bad(table, tensor.dtype)
        by_messages = comm.size > 1 and bool(_plain(table))
        if by_messages:
            self._expose(number, flat)
        parts: list[MappedPart | RemotePart] = []
        with torch.inference_mode(False):  # what is made in it cannot be written outside of it
            for rank, (block, at, n, *_) in enumerate(table):
                if n == 0:
                    parts.append(MappedPart(comm, flat[:0], None, rank))
                elif comm.size == 1 or (by_messages and rank == comm.rank):
                    own = torch.from_numpy(bytes_of(flat).numpy()).view(tensor.dtype)
                    parts.append(MappedPart(comm, own, None, rank))
                elif by_messages:
                    parts.append(RemotePart(comm, number, rank, n, tensor.dtype))
                else:
                    part = comm.part(rank, block, at, n * tensor.itemsize)
                    there = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype)
                    parts.append(MappedPart(comm, there, part, rank))
        self._kept.clear()
        self._number = number
        self._tag = number % tags(comm)  # at least 1,023; millions with most MPIs
        # Not the tensor, which may get other memory later: p.data = ..., module.to(dtype).
        self._tensor, self._parts = flat if owning else None, parts

    def _expose(self, number: int, flat: torch.Tensor) -> None:
        """Let the other ranks ask for this rank's memory, also once the window is dropped."""
        self._exposed = self._comm.expose(number, bytes_of(flat)) if flat.numel() else None
        if self._exposed is not None:
            _exposed.setdefault(self._comm, set()).add(self._exposed)

    def _refuse_bad(self, table: list[list[int]], dtype: Any) -> None:
        """Raise what all ranks find in the table that all have."""
        kinds = {row[3] for row in table}
        if len(kinds) > 1:
            same = [rank for rank, row in enumerate(table) if row[3] == table[self._comm.rank][3]]
            raise DistMismatchError(
                f"tensor_register: the ranks' tensors have {len(kinds)} different dtypes; {dtype} "
                f"on ranks {same}"
            )
        plain, serve = _plain(table), all(row[5] for row in table)
        if plain and self._comm.size > 1 and not serve:
            raise ValueError(
                f"tensor_register: the tensors of ranks {plain} are not symmetric in the group "
                f"{self._group.members.name!r}: create them by hpcdist.empty(..., group=group) "
                "(hpcdist.is_symmetric tells whether there was room). Other tensors need MPI's "
                "MPI_THREAD_MULTIPLE"
            )

    def tensor_deregister(self) -> None:
        """End the access to the ranks' tensors. The window can register others.

        All ranks of the group must call it, when no thread of theirs is in :meth:`Window.put` or
        its like any more; no rank returns before all have called. What was begun there with
        ``async_op=True`` is waited for.

        Raises
        ------
        DistError
            If no tensor is registered, or the group was destroyed.
        """
        comm = self._live()
        with refusing(comm, "tensor_deregister"):
            self._all()
            settle_window(comm, self._number)
        comm.barrier(api="tensor_deregister")
        if self._exposed is not None:
            self._exposed.withdraw()
            _exposed[comm].discard(self._exposed)
        self._parts, self._tensor, self._exposed = None, None, None

    # ---- checks ----

    def _live(self) -> Any:
        if self._comm.freed:
            members = self._group.members
            raise DistError(
                f"the process group {members.name!r} of this window has been destroyed"
                if members.generation == self._generation
                else f"the process group {members.name!r} was reconfigured since this window was "
                "made: make it again, by new_window"
            )
        check_usable(self._comm)
        return self._comm

    def _all(self) -> list[MappedPart | RemotePart]:
        if self._parts is None:
            raise DistError("no tensor is registered with this window: call tensor_register")
        return self._parts

    def _part(self, rank: int, what: str) -> MappedPart | RemotePart:
        """A rank's memory."""
        self._live()
        part = self._all()[self._group.members.check(rank, "rank")]
        part.check(what)
        return part

    def _range(
        self, tensor: Any, rank: int, offset: int, what: str
    ) -> tuple[MappedPart | RemotePart, int]:
        """The memory of a rank that a tensor is for, and the first of its elements."""
        import torch

        part = self._part(rank, what)
        self._comm.refuse_withdrawn(int(rank), what)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} takes a torch.Tensor, not {type(tensor).__name__}")
        if tensor.device.type != "cpu":
            raise TypeError(f"{what} takes tensors on the host, not on {tensor.device}")
        if tensor.dtype != part.dtype:
            raise TypeError(f"{what}: a tensor of {tensor.dtype} for a window of {part.dtype}")
        refuse_without_memory(tensor, what)
        offset, n = whole(offset, "target_offset_nelems"), tensor.numel()
        if offset < 0 or offset + n > part.numel:
            raise ValueError(
                f"{what}: {n} elements at {offset} do not fit into the window of rank {rank}, "
                f"which has {part.numel}"
            )
        return part, offset


def _plain(table: list[list[int]]) -> list[int]:
    """The ranks whose tensors are not symmetric."""
    return [rank for rank, row in enumerate(table) if row[2] and not row[0]]
