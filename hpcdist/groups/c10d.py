"""The operations of a group in the form of torch's C++ layer: options in, always a Work out.

torch has some of them under names that hpcdist's group uses in the form of the public functions
(``broadcast``, ``reduce``, ...); those are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hpcdist._buffer import limited
from hpcdist._engine import Work
from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier

__all__ = [
    "AllToAllOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "LowLevel",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
]

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
    """Accepted for compatibility. Source: the class of this name in torch."""

    device: Any = field(default=None, init=False)
    device_ids: list[int] = field(default_factory=list, init=False)


@dataclass
class BroadcastOptions(_Rooted):
    """Accepted for compatibility. Source: the class of this name in torch."""

    rootTensor: int = field(default=0, init=False)


@dataclass
class GatherOptions(_Rooted):
    """Accepted for compatibility. Source: the class of this name in torch."""


@dataclass
class ReduceOptions(BroadcastOptions):
    """Accepted for compatibility. Source: the class of this name in torch."""

    reduceOp: Any = field(default=ReduceOp.SUM, init=False)


@dataclass
class ReduceScatterOptions(AllreduceOptions):
    """Accepted for compatibility. Source: the class of this name in torch."""


@dataclass
class ScatterOptions(_Rooted):
    """Accepted for compatibility. Source: the class of this name in torch."""


def _one(given: Any) -> Any:
    """Return the tensor of a list of one, or a tensor itself."""
    if not isinstance(given, (list, tuple)):
        return given
    if len(given) != 1:
        raise ValueError(f"a list of one tensor is needed, not of {len(given)}")
    return given[0]


class LowLevel:
    """The part of :class:`hpcdist.ProcessGroup` with the methods of torch's C++ layer."""

    __slots__ = ()

    carrier: Carrier  # of ProcessGroup

    def _with(self, options: Any, timeout: timedelta | None, call: Callable[[], Any]) -> Work:
        limit = getattr(options, "timeout", None) if timeout is None else timeout
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else 0.0
        with limited(max(seconds, 0.0)):
            work: Work = call()
        return work

    def allreduce(
        self,
        tensors: Any,
        op: Any = ReduceOp.SUM,
        timeout: timedelta | None = None,
        *,
        opts: AllreduceOptions | None = None,
    ) -> Work:
        """Begin to reduce a tensor in place, as :func:`hpcdist.all_reduce`.

        All ranks of the group must call it.

        Parameters
        ----------
        tensors : tensor or list of one tensor
            What is reduced.
        op : ReduceOp or AllreduceOptions
            How.
        timeout : datetime.timedelta, optional
            Of this call; None means the group's.
        opts : AllreduceOptions, optional
            In place of `op` and `timeout`.

        Returns
        -------
        Work
            The handle.
        """
        options = op if hasattr(op, "reduceOp") else opts
        op = op if options is None else options.reduceOp
        tensor = _one(tensors)
        return self._with(options, timeout, lambda: self.carrier.all_reduce(tensor, op, True))

    def allreduce_coalesced(
        self, tensors: Sequence[Any], opts: AllreduceCoalescedOptions | None = None
    ) -> Work:
        """Begin to reduce several tensors, as :func:`hpcdist.all_reduce_coalesced`.

        All ranks of the group must call it.

        Parameters
        ----------
        tensors : list of tensor
            What is reduced.
        opts : AllreduceCoalescedOptions, optional
            How.

        Returns
        -------
        Work
            The handle.
        """
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        listed = list(tensors)
        return self._with(opts, None, lambda: self.carrier.all_reduce_coalesced(listed, op, True))

    def allgather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Any,
        timeout: timedelta | None = None,
        *,
        opts: Any = None,
    ) -> Work:
        """Begin to collect a tensor of each rank, as :func:`hpcdist.all_gather`.

        All ranks of the group must call it.

        Parameters
        ----------
        output_tensors : list of tensor, or list of one such list
            Destinations, one per rank.
        input_tensors : tensor or list of one tensor
            What this rank sends.
        timeout : datetime.timedelta or options, optional
            Of this call; None means the group's.
        opts : object, optional
            In place of `timeout`.

        Returns
        -------
        Work
            The handle.
        """
        options, timeout = (timeout, None) if hasattr(timeout, "timeout") else (opts, timeout)
        nested = len(output_tensors) == 1 and isinstance(output_tensors[0], (list, tuple))
        outputs = output_tensors[0] if nested else output_tensors
        tensor = _one(input_tensors)
        return self._with(options, timeout, lambda: self.carrier.all_gather(outputs, tensor, True))

    def allgather_coalesced(
        self, output_lists: Sequence[Any], input_list: Sequence[Any], opts: Any = None
    ) -> Work:
        """Begin to collect several tensors, as :func:`hpcdist.all_gather_coalesced`.

        All ranks of the group must call it.

        Parameters
        ----------
        output_lists : list of list of tensor
            Destinations, a list per rank.
        input_list : list of tensor
            What this rank sends.
        opts : object, optional
            Options with a `timeout`.

        Returns
        -------
        Work
            The handle.
        """
        call = self.carrier.all_gather_coalesced
        return self._with(opts, None, lambda: call(output_lists, input_list, True))

    def alltoall(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Any],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """Begin to send a tensor to each rank, as :func:`hpcdist.all_to_all`.

        All ranks of the group must call it.

        Parameters
        ----------
        output_tensors, input_tensors : list of tensor
            Destinations and what is sent, one per rank.
        opts : AllToAllOptions, optional
            Options with a `timeout`.

        Returns
        -------
        Work
            The handle.
        """
        call = self.carrier.all_to_all
        return self._with(opts, None, lambda: call(output_tensors, input_tensors, True))

    def alltoall_base(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> Work:
        """Begin to send a part of a tensor to each rank, as :func:`hpcdist.all_to_all_single`.

        All ranks of the group must call it.

        Parameters
        ----------
        output, input : tensor
            Destination, and what is sent.
        output_split_sizes, input_split_sizes : list of int
            Rows per rank; empty means equal parts.
        opts : AllToAllOptions or datetime.timedelta, optional
            Options with a `timeout`, or that.
        timeout : datetime.timedelta, optional
            Of this call; None means the group's.

        Returns
        -------
        Work
            The handle.
        """
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        splits = list(output_split_sizes) or None, list(input_split_sizes) or None
        call = self.carrier.all_to_all_single
        return self._with(opts, timeout, lambda: call(output, input, *splits, True))

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        """Begin to receive from any rank, as :func:`hpcdist.irecv`; a rank of the group must send.

        Parameters
        ----------
        tensors : tensor or list of one tensor
            Destination.
        tag : int
            Tag of the message.

        Returns
        -------
        Work
            The handle; ``source_rank()`` is the sender.
        """
        return self.carrier.irecv(_one(tensors), -1, tag)
