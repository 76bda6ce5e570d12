"""What carries a group's operations: the type of ``ProcessGroup.carrier``.

Six things stand there: the native :class:`~hpcdist._engine.Comm`; a
:class:`~hpcdist.backends.base.GroupBackend`; a :class:`~hpcdist.backends.dispatch.Dispatch` to
several of these, or a :class:`~hpcdist.backends.hooked.Hooked`; and, for a group that cannot be
used, :class:`~hpcdist.groups.world.Absent` or :class:`~hpcdist.groups.world.Outside`. A type
checker compares the first two with this type; the others answer to any name, so they are cast to
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, overload

from hpcdist._engine import Comm, Work
from hpcdist.typing import Op, TensorLike

# What a backend reads and writes; several.
_Tensor = TensorLike
_List = Iterable[TensorLike]
# A public name; None: the method's own.
_Api = str | None
# A Work with `async_op`, else None. The operations that hpcdist itself begins tell the two apart.
_Handle = Work | None


class Carrier(Protocol):
    """The operations, and what else all offer; an annotation only, never a base.

    What the methods do is said in :class:`~hpcdist.backends.base.GroupBackend`.
    """

    @property
    def check(self) -> int: ...
    @check.setter
    def check(self, value: int) -> None: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, value: float) -> None: ...
    # itself, or the host's in a group of several backends; None if that is not MPI's
    @property
    def native(self) -> Comm | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def node_ranks(self) -> tuple[int, ...]: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def supports_window(self) -> bool: ...
    def free(self, drain: float = 5.0) -> None: ...
    def create_group(
        self, ranks: Sequence[int], name: str, timeout: float, /, tag: int = 0
    ) -> Carrier: ...
    def share(self, nbytes: int, *, api: _Api = None) -> Any: ...
    def place(self, tensor: _Tensor) -> tuple[int, int] | None: ...
    def refuse(
        self,
        error: BaseException,
        *,
        api: _Api = None,
        others_arrive: str | None = None,
        parts: int = 1,
    ) -> None: ...
    # fmt: off
    # (The last of several forms, without a mark, is the one that `inspect` sees.)
    @overload
    def all_reduce(
        self, tensor: _Tensor, op: Op, async_op: Literal[True], *, api: _Api = None, extra: int = 0
    ) -> Work: ...
    @overload
    def all_reduce(
        self, tensor: _Tensor, op: Op, async_op: bool = False, *, api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def all_reduce(
        self, tensor: _Tensor, op: Op, async_op: bool = False, *, api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def all_reduce_coalesced(self, tensors: _List, op: Op, async_op: bool = False) -> _Handle: ...
    @overload
    def broadcast(
        self, tensor: _Tensor, root: int, async_op: Literal[True], *,
        api: _Api = None, extra: int = 0
    ) -> Work: ...
    @overload
    def broadcast(
        self, tensor: _Tensor, root: int, async_op: bool = False, *,
        api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def broadcast(
        self, tensor: _Tensor, root: int, async_op: bool = False, *,
        api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def reduce(
        self, tensor: _Tensor, root: int, op: Op, async_op: bool = False, *, api: _Api = None
    ) -> _Handle: ...
    def all_gather(
        self, outputs: _List, tensor: _Tensor, /, async_op: bool = False, *, api: _Api = None
    ) -> _Handle: ...
    @overload
    def all_gather_into_tensor(
        self, output: _Tensor, input: _Tensor, async_op: Literal[True], *,
        api: _Api = None, extra: int = 0
    ) -> Work: ...
    @overload
    def all_gather_into_tensor(
        self, output: _Tensor, input: _Tensor, async_op: bool = False, *,
        api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def all_gather_into_tensor(
        self, output: _Tensor, input: _Tensor, async_op: bool = False, *,
        api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def all_gather_coalesced(
        self, output_lists: Iterable[_List], inputs: _List, /, async_op: bool = False
    ) -> _Handle: ...
    def gather(
        self, tensor: _Tensor, gather_list: _List | None, root: int, async_op: bool = False, *,
        api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def scatter(
        self, tensor: _Tensor, scatter_list: _List | None, root: int, async_op: bool = False, *,
        api: _Api = None, extra: int = 0
    ) -> _Handle: ...
    def reduce_scatter(
        self, output: _Tensor, inputs: _List, op: Op, /, async_op: bool = False, *, api: _Api = None
    ) -> _Handle: ...
    def reduce_scatter_tensor(
        self, output: _Tensor, input: _Tensor, op: Op, async_op: bool = False, *, api: _Api = None
    ) -> _Handle: ...
    def all_to_all(
        self, outputs: _List, inputs: _List, async_op: bool = False, *, api: _Api = None
    ) -> _Handle: ...
    def all_to_all_single(
        self, output: _Tensor, input: _Tensor, output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None, async_op: bool = False, *, api: _Api = None
    ) -> _Handle: ...
    def barrier(
        self, async_op: bool = False, *, api: _Api = None, monitored: float | None = None
    ) -> _Handle: ...
    def isend(self, tensor: _Tensor, dst: int, tag: int = 0) -> Work: ...
    def irecv(self, tensor: _Tensor, src: int, tag: int = 0) -> Work: ...
    def send(self, tensor: _Tensor, dst: int, tag: int = 0) -> None: ...
    def recv(self, tensor: _Tensor, src: int, tag: int = 0) -> int: ...
    # fmt: on
