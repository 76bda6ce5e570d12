"""The interface of a backend, and the options that describe its group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hpcdist._engine import Comm
from hpcdist.config import DEFAULT_TIMEOUT
from hpcdist.errors import DistBackendError
from hpcdist.typing import Op, TensorLike, Tensors

__all__ = ["BackendOptions", "GroupBackend"]


@dataclass(frozen=True)
class BackendOptions:
    """The description of a group, for the backend that is made for it.

    Parameters
    ----------
    store : object or None
        The key-value store the processes share; None when they met without one.
    group_rank : int
        This process's rank in the group; -1 when only the backend can know (``mpi://``).
    group_size : int
        Number of processes in the group; -1 when only the backend can know.
    timeout : datetime.timedelta
        After this long a missing peer is an error.
    group_id : str
        Name of the group, the same on all its members.
    global_ranks_in_group : sequence of int
        World ranks of the members, in group order; empty for the world itself.
    parent : object or None
        The same kind of backend of the group this one is made from; None for the world, and if that
        group has none.
    parent_ranks : sequence of int
        The members' ranks in `parent`, in group order.
    host : object or None
        The backend over MPI of the same group, if it has one: other backends may use it to meet.
    divides : bool
        Whether every rank of `parent` makes its subgroup in this very call, so that a collective of
        all ranks of the parent may split it.
    shrinks : int or None
        If the group is a shrunk `parent`, the flags of :func:`hpcdist.shrink_group`.
    device : int or None
        Index of the GPU this process uses, if the user gave it: a backend then makes what it needs
        for that GPU now, and runs there what has no tensor.
    end : float
        When the group must be made, of ``time.monotonic``; infinity means `timeout` from
        now.
    met : list of str
        Gets `group_id` as soon as the members have agreed to make the group, if the backend can
        tell: whatever is raised then, the attempt counts.
    """

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int] = ()
    parent: Any = None
    parent_ranks: Sequence[int] = ()
    host: Any = None
    divides: bool = False
    shrinks: int | None = None
    device: int | None = None
    end: float = math.inf
    met: list[str] = field(default_factory=list)


class GroupBackend:
    """Interface between a group and its data transport; base class for third parties.

    All ranks are group ranks. A collective returns None, or with ``async_op`` an object like
    :class:`hpcdist.Work`. A backend overrides what it supports; the rest raises. The MPI backend's
    class is native and offers the same names.

    Parameters
    ----------
    rank : int
        This process's rank in the group.
    size : int
        Number of processes in the group.
    name : str
        Name of the group, for messages.
    timeout : float
        Seconds after which a missing peer is an error.

    Notes
    -----
    Where a method ends in ``**about``, hpcdist passes what it knows about the call, and an override
    must accept it. A backend may ignore all of it:

    api : str
        Public name of the operation that the user called, for messages: an ``all_gather_object``
        makes an ``all_gather``.
    extra : int
        A number in which all ranks must agree, compared with the call's other arguments.
    monitored : float
        Seconds after which a barrier names the ranks that are missing.
    device : int
        Index of the GPU of a barrier, for backends that set ``has_devices``.
    """

    #: Whether a barrier runs on a GPU that can be chosen.
    has_devices = False
    #: The native communicator, if this is one; no class but MPI's is.
    native: Comm | None = None
    #: Level of the agreement of the ranks before each operation; 0: there is none.
    check: int = 0

    def __init__(
        self, rank: int, size: int, name: str = "", timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.timeout = timeout
        self.seq = 0

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Group ranks on this rank's node; only this rank if the backend does not know."""
        return (self.rank,)

    @property
    def local_rank(self) -> int:
        """Index of this rank among those of its node."""
        return self.node_ranks.index(self.rank)

    def free(self, drain: float = 5.0) -> None:
        """Free the group's resources; wait up to `drain` seconds for operations in flight.

        Each member calls it once; further calls are safe.
        """

    def _refuse(self, operation: str) -> Any:
        raise DistBackendError(
            f"{type(self).__name__} does not offer {operation} (group {self.name!r}, rank "
            f"{self.rank}); a backend offers an operation by overriding its method"
        )

    def create_group(
        self, ranks: Sequence[int], name: str, timeout_s: float, tag: int = 0
    ) -> GroupBackend:
        """Make the backend of a subgroup; only its members call it."""
        return self._refuse("create_group")

    def all_reduce(self, tensor: TensorLike, op: Op, async_op: bool = False, **about: Any) -> Any:
        """Reduce over all ranks, in place on each."""
        return self._refuse("all_reduce")

    def all_reduce_coalesced(self, tensors: Any, op: Op, async_op: bool = False) -> Any:
        """Reduce several tensors in one call."""
        return self._refuse("all_reduce_coalesced")

    def broadcast(self, tensor: TensorLike, root: int, async_op: bool = False, **about: Any) -> Any:
        """Copy root's tensor to all ranks."""
        return self._refuse("broadcast")

    def reduce(
        self, tensor: TensorLike, root: int, op: Op, async_op: bool = False, **about: Any
    ) -> Any:
        """Reduce over all ranks, onto root."""
        return self._refuse("reduce")

    def all_gather(
        self, tensor_list: Tensors, tensor: TensorLike, async_op: bool = False, **about: Any
    ) -> Any:
        """Collect a tensor of each rank on all ranks; sizes may differ."""
        return self._refuse("all_gather")

    def all_gather_into_tensor(
        self, output: TensorLike, input: TensorLike, async_op: bool = False, **about: Any
    ) -> Any:
        """Collect equal tensors of each rank into one."""
        return self._refuse("all_gather_into_tensor")

    def all_gather_coalesced(
        self, output_lists: Iterable[Tensors], input_list: Tensors, async_op: bool = False
    ) -> Any:
        """Collect several tensors of each rank in one call."""
        return self._refuse("all_gather_coalesced")

    def gather(
        self,
        tensor: TensorLike,
        gather_list: Tensors | None,
        root: int,
        async_op: bool = False,
        **about: Any,
    ) -> Any:
        """Collect a tensor of each rank on root; the list is None elsewhere."""
        return self._refuse("gather")

    def scatter(
        self,
        tensor: TensorLike,
        scatter_list: Tensors | None,
        root: int,
        async_op: bool = False,
        **about: Any,
    ) -> Any:
        """Give each rank its tensor of root's list; the list is None elsewhere."""
        return self._refuse("scatter")

    def reduce_scatter(
        self, output: TensorLike, input_list: Tensors, op: Op, async_op: bool = False, **about: Any
    ) -> Any:
        """Reduce a list element by element; rank i keeps element i."""
        return self._refuse("reduce_scatter")

    def reduce_scatter_tensor(
        self, output: TensorLike, input: TensorLike, op: Op, async_op: bool = False, **about: Any
    ) -> Any:
        """Reduce one tensor; rank i keeps its i-th part."""
        return self._refuse("reduce_scatter_tensor")

    def all_to_all(
        self, outputs: Tensors, inputs: Tensors, async_op: bool = False, **about: Any
    ) -> Any:
        """Send the i-th input to rank i, receive the i-th output from it."""
        return self._refuse("all_to_all")

    def all_to_all_single(
        self,
        output: TensorLike,
        input: TensorLike,
        output_splits: Any = None,
        input_splits: Any = None,
        async_op: bool = False,
        **about: Any,
    ) -> Any:
        """Exchange parts of one tensor, split along dimension 0, between all ranks."""
        return self._refuse("all_to_all_single")

    def share(self, nbytes: int, *, api: str | None = None) -> Any:
        """Memory for a tensor that all ranks of the node map; None: there is none."""
        return None

    def place(self, tensor: TensorLike) -> tuple[int, int] | None:
        """Where a tensor lies in such memory, or None."""
        return None

    #: Whether groups over it have windows.
    supports_window = False

    def barrier(self, async_op: bool = False, **about: Any) -> Any:
        """Wait until all ranks have called."""
        return self._refuse("barrier")

    @property
    def agreed_on(self) -> Any:
        """The backend over which the ranks agree about each collective: this one, or another."""
        return self

    def refuse(
        self,
        error: BaseException,
        *,
        api: str | None = None,
        others_arrive: str | None = None,
        parts: int = 1,
    ) -> None:
        """Send the other ranks the reason why this one does not make the next collective.

        A backend without an agreement before each operation cannot do this: the others time out.
        """

    def isend(self, tensor: TensorLike, dst: int, tag: int = 0) -> Any:
        """Begin to send; returns a Work."""
        return self._refuse("isend")

    def irecv(self, tensor: TensorLike, src: int, tag: int = 0) -> Any:
        """Begin to receive, from any rank if src is -1; returns a Work."""
        return self._refuse("irecv")

    def send(self, tensor: TensorLike, dst: int, tag: int = 0) -> None:
        """Send and wait."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: TensorLike, src: int, tag: int = 0) -> int:
        """Receive and wait; returns the sender's rank."""
        work = self.irecv(tensor, src, tag)
        work.wait()
        return src if src >= 0 else work.source_rank()
