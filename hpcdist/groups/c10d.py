"""The operations of a group in the form of torch's C++ layer: options in, always a Work out.

Each has two forms there: lists and options (``broadcast([tensor], opts)``), and a short one
(``broadcast(tensor, root, timeout)``). The first argument after the tensors is either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FunctionType, NoneType
from typing import Any

from hpcdist._buffer import limited
from hpcdist._engine import ASYNC_HERE, Work
from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing, barrier_device
from hpcdist.backends.refusal import refusing
from hpcdist.groups.members import Members
from hpcdist.groups.numbers import whole
from hpcdist.groups.rooted import has_list, parts_of_root
from hpcdist.groups.tensors import reals_or_raise, sparse_or_raise
from hpcdist.typing import Op, TensorLike

#: torch's mark for "no timeout of its own".
_UNSET = timedelta(milliseconds=-1)


@dataclass
class _Options:
    """Settings of one call.

    Attributes
    ----------
    timeout : datetime.timedelta
        Of this call; not positive: the group's.
    asyncOp : bool
        Kept because torch's classes have it; the methods always return a handle.
    """

    timeout: timedelta = field(default=_UNSET, init=False)
    asyncOp: bool = field(default=True, init=False)


@dataclass
class _Rooted(_Options):
    rootRank: int = field(default=0, init=False)


@dataclass
class AllreduceOptions(_Options):
    """Of :meth:`hpcdist.ProcessGroup.allreduce`. Source: the class of this name in torch."""

    reduceOp: Any = field(default=ReduceOp.SUM, init=False)


@dataclass
class AllreduceCoalescedOptions(AllreduceOptions):
    """Of ``ProcessGroup.allreduce_coalesced``. Source: the class of this name in torch."""


@dataclass
class AllToAllOptions(_Options):
    """Of ``ProcessGroup.alltoall``, ``alltoall_base``. Source: the class of this name in torch."""


@dataclass
class BarrierOptions(_Options):
    """Of ``ProcessGroup.barrier``. Source: the class of this name in torch."""

    device: Any = field(default=None, init=False)
    device_ids: list[int] = field(default_factory=list, init=False)


@dataclass
class BroadcastOptions(_Rooted):
    """Of ``ProcessGroup.broadcast``. Source: the class of this name in torch."""

    rootTensor: int = field(default=0, init=False)


@dataclass
class GatherOptions(_Rooted):
    """Of ``ProcessGroup.gather``. Source: the class of this name in torch."""


@dataclass
class ReduceOptions(BroadcastOptions):
    """Of ``ProcessGroup.reduce``. Source: the class of this name in torch."""

    reduceOp: Any = field(default=ReduceOp.SUM, init=False)


@dataclass
class ReduceScatterOptions(AllreduceOptions):
    """Of ``ProcessGroup.reduce_scatter``. Source: the class of this name in torch."""


@dataclass
class ScatterOptions(_Rooted):
    """Of ``ProcessGroup.scatter``. Source: the class of this name in torch."""


def _one(tensors: Any) -> Any:
    """Return the tensor of a list of one, or a tensor itself."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"a list of one tensor is needed, not of {len(tensors)}")
    return tensors[0]


def _every(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the list of tensors in a list of one list, or a flat list itself."""
    nested = len(tensors) == 1 and isinstance(tensors[0], (list, tuple))
    return tensors[0] if nested else tensors


class C10d:
    """The operations of :class:`hpcdist.ProcessGroup`, under torch's names and with its meaning.

    They match the functions of the same operation on other ranks, also synchronous ones.
    """

    __slots__ = ()

    carrier: Carrier  # of ProcessGroup
    members: Members

    def _begin(
        self,
        operation: str,
        tensors: Any,
        opts: Any,
        timeout: Any,
        arguments: Callable[[], Sequence[Any]],
        api: str | None = None,
        named: Callable[[], dict[str, Any]] = dict,
    ) -> Work:
        """Begin an operation; the other ranks hear of what is wrong with the arguments."""
        comm = self.carrier
        with refusing(agreeing(comm, tensors), api or operation):
            args, about, seconds = arguments(), named(), _seconds(opts, timeout)
        if api is not None:
            about["api"] = api
        with limited(seconds):
            work: Work = getattr(comm, operation)(*args, ASYNC_HERE, **about)
        return work

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begin to copy the tensor of one rank to all, as :func:`hpcdist.broadcast`."""
        return self._begin(
            "broadcast", tensors, _options(opts), timeout, lambda: (_one(tensors), _root(opts))
        )

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Op | None = None
    ) -> Work:
        """Begin to reduce a tensor in place, as :func:`hpcdist.all_reduce`."""
        op = _op(opts) if op is None else op
        try:
            return self._begin(
                "all_reduce", tensors, _options(opts), timeout, lambda: (_one(tensors), op)
            )
        except TypeError as error:
            sparse_or_raise(self.carrier, _one(tensors), op, True, error)  # refuses to be begun
            raise

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """Begin to reduce several tensors, as :func:`hpcdist.all_reduce_coalesced`."""
        op = _op(opts)
        try:
            return self._begin(
                "all_reduce_coalesced", tensors, _options(opts), None, lambda: (list(tensors), op)
            )
        except TypeError as error:
            if not isinstance(tensors, (list, tuple)):
                raise
            with limited(_seconds(_options(opts), None)):
                work = reals_or_raise(self.carrier, tensors, op, ASYNC_HERE, error)
            assert work is not None
            return work

    def reduce(
        self, tensors: Any, opts: Any = None, op: Op | None = None, timeout: Any = None
    ) -> Work:
        """Begin to reduce a tensor onto one rank, as :func:`hpcdist.reduce`."""
        op = getattr(opts, "reduceOp", ReduceOp.SUM) if op is None else op
        return self._begin(
            "reduce", tensors, _options(opts), timeout, lambda: (_one(tensors), _root(opts), op)
        )

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Begin to collect a tensor of each rank, as :func:`hpcdist.all_gather`."""
        return self._begin(
            "all_gather",
            input_tensors,
            opts,
            timeout,
            lambda: (_every(output_tensors), _one(input_tensors)),
        )

    def allgather_coalesced(
        self, output_lists: Sequence[Any], input_list: Sequence[Any], opts: Any = None
    ) -> Work:
        """Begin to collect several tensors, as :func:`hpcdist.all_gather_coalesced`."""
        return self._begin(
            "all_gather_coalesced", input_list, opts, None, lambda: (output_lists, input_list)
        )

    def all_gather_single(self, output: TensorLike, input: TensorLike, opts: Any = None) -> Work:
        """Begin to collect equal tensors in one, as :func:`hpcdist.all_gather_single`."""
        return self._begin("all_gather_into_tensor", input, opts, None, lambda: (output, input))

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Begin to collect a tensor of each rank on one, as :func:`hpcdist.gather`."""

        def arguments() -> Sequence[Any]:
            tensor, root = _one(input_tensors), _root(opts)
            gathered = _every(output_tensors) if output_tensors else None
            here = self._has_list("gather", tensor, gathered, root, "destination")
            return tensor, gathered if here else None, root

        return self._begin("gather", input_tensors, _options(opts), timeout, arguments)

    def gather_single(self, output: TensorLike, input: TensorLike, opts: Any = None) -> Work:
        """Begin to collect equal tensors in one on one rank, as :func:`hpcdist.gather_single`."""

        def arguments() -> Sequence[Any]:
            root = _root(opts)
            return input, parts_of_root(self.carrier, self.members.name, input, output, root), root

        return self._begin("gather", input, _options(opts), None, arguments, "gather_single")

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Begin to give each rank its tensor of one rank's list, as :func:`hpcdist.scatter`."""

        def arguments() -> Sequence[Any]:
            tensor, root = _one(output_tensors), _root(opts)
            parts = _every(input_tensors) if input_tensors else None
            here = self._has_list("scatter", tensor, parts, root, "source")
            return tensor, parts if here else None, root

        return self._begin("scatter", output_tensors, _options(opts), timeout, arguments)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        op: Op | None = None,
    ) -> Work:
        """Begin to reduce a list element by element, as :func:`hpcdist.reduce_scatter`."""
        op = _op(opts) if op is None else op
        return self._begin(
            "reduce_scatter",
            output_tensors,
            _options(opts),
            timeout,
            lambda: (_one(output_tensors), _every(input_tensors), op),
        )

    def reduce_scatter_single(
        self, outputTensor: TensorLike, inputTensor: TensorLike, opts: Any = None
    ) -> Work:
        """Begin to reduce a tensor part by part, as :func:`hpcdist.reduce_scatter_single`."""
        return self._begin(
            "reduce_scatter_tensor",
            inputTensor,
            _options(opts),
            None,
            lambda: (outputTensor, inputTensor, _op(opts)),
        )

    def alltoall(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Begin to send a tensor to each rank, as :func:`hpcdist.all_to_all`."""
        return self._begin(
            "all_to_all", input_tensors, opts, timeout, lambda: (output_tensors, input_tensors)
        )

    def all_to_all_single(
        self,
        output: TensorLike,
        input: TensorLike,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Begin to send a part of a tensor to each rank, as :func:`hpcdist.all_to_all_single`."""

        def arguments() -> Sequence[Any]:
            splits = output_split_sizes, input_split_sizes
            return output, input, *(list(sizes) or None for sizes in splits)

        return self._begin("all_to_all_single", input, opts, timeout, arguments)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Begin to wait for all ranks, as :func:`hpcdist.barrier`."""

        def named() -> dict[str, Any]:
            return barrier_device(self.carrier, device_of(opts))

        return self._begin("barrier", None, opts, timeout, tuple, named=named)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:
        """Begin to send to a rank of the group, as :func:`hpcdist.isend`; it must receive."""
        return self.carrier.isend(_one(tensors), self.members.check(dstRank, "dstRank"), tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        """Begin to receive from a rank of the group, as :func:`hpcdist.irecv`; it must send."""
        return self.carrier.irecv(_one(tensors), self.members.check(srcRank, "srcRank"), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Begin to receive from any rank, as :func:`hpcdist.irecv`; a rank must send."""
        return self.carrier.irecv(_one(tensors), -1, tag)

    def _has_list(self, api: str, tensor: TensorLike, given: Any, root: Any, role: str) -> bool:
        return has_list(self.carrier, self.members.name, api, tensor, given, root, role)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single


def _options(opts: Any) -> Any:
    """Return the options of a call; None for a short form's root or operation in their place."""
    return opts if hasattr(opts, "timeout") else None


def _op(opts: Any) -> Any:
    """Return the operation of options, or a short form's, which is one itself."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def device_of(opts: Any) -> Any:
    """Return the index of the device that a barrier's options name; None if they name none."""
    chosen = getattr(opts, "device_ids", None)
    return chosen[0] if chosen else getattr(getattr(opts, "device", None), "index", None)


def _root(opts: Any) -> int:
    """Return the root of options, or a short form's, which is one itself."""
    return 0 if opts is None else whole(getattr(opts, "rootRank", opts), "root")


def _seconds(opts: Any, timeout: Any) -> float:
    """Return the seconds that a call has, by its options or its timeout; 0.0: the group's."""
    if timeout is None:
        timeout = getattr(opts, "timeout", opts)
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        timeout = timedelta(seconds=timeout)  # as torch's C++ layer allows
    if not isinstance(timeout, (timedelta, NoneType)):
        raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    return max(timeout.total_seconds(), 0.0) if timeout else 0.0


_WORDS = {
    "tensors": ("tensor or list of tensor", "What is moved or reduced."),
    "output_tensors": ("tensor, list of tensor, or list of one such list", "Destinations."),
    "input_tensors": ("tensor, list of tensor, or list of one such list", "What is sent."),
    "output_lists": ("list of list of tensor", "Destinations, a list per rank."),
    "input_list": ("list of tensor", "What this rank sends."),
    "outputTensor": ("tensor", "Destination."),
    "inputTensor": ("tensor", "What this rank sends."),
    "output": ("tensor", "Destination."),
    "input": ("tensor", "What this rank sends."),
    "output_split_sizes": ("list of int", "Rows from each rank; empty means equal parts."),
    "input_split_sizes": ("list of int", "Rows for each rank; empty means equal parts."),
    "opts": (
        "object, optional",
        "Options; in the short form the root, the operation or a timeout.",
    ),
    "op": ("ReduceOp, optional", "How, in the short form; None means that of `opts`, or the sum."),
    "timeout": ("datetime.timedelta or float, optional", "Of this call; None means the group's."),
    "dstRank": ("int", "Rank in the group."),
    "srcRank": ("int", "Rank in the group."),
    "tag": ("int", "Of the message."),
}


def _documented(method: FunctionType, text: str) -> str:
    """Return a docstring with what every method of the class has in common."""
    code = method.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    words = [f"{name} : {_WORDS[name][0]}\n    {_WORDS[name][1]}" for name in names]
    whole = [text]
    if "tag" not in names:
        whole.append("All ranks of the group must call it.")
    whole.append("\n".join(["Parameters", "----------", *words]))
    whole.append("Returns\n-------\nWork\n    The handle.")
    return "\n\n".join(whole)


for _name, _method in vars(C10d).items():
    if isinstance(_method, FunctionType) and not _name.startswith("_"):
        if _method.__doc__ and "\n" not in _method.__doc__:  # not seen under another name
            _method.__doc__ = _documented(_method, _method.__doc__)
