"""The libraries that are compared: how each makes the call, on the same buffers.

A library is a class with a `name` and two methods: ``open(job)`` gets it ready or raises
:class:`Unsupported`, ``call(case)`` gives a function and its arguments, or raises Unsupported. The
function is called with just these in a loop, so nothing of ours stands between.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from hpcdist import group
from hpcdist.ops import all_to_all, barrier, broadcast, gather, reduce, scatter
from hpcdist.work import ReduceOp

from .errors import Unsupported
from .job import Job
from .measure import Batch
from .operations import Case

__all__ = ["LIBRARIES", "Hpcdist", "Library", "Mpi4py", "Unchecked"]

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Library:
    """What is compared."""

    name = ""

    def open(self, job: Job) -> None:
        """Get ready. All ranks call it.

        Parameters
        ----------
        job : Job
            The ranks.

        Raises
        ------
        Unsupported
            If it is not here.
        """

    def call(self, case: Case) -> Call:
        """The function that does it, and its arguments.

        Parameters
        ----------
        case : Case
            What is to be done.

        Returns
        -------
        tuple
            The function and the tuple of its arguments.

        Raises
        ------
        Unsupported
            If the library has no such operation.
        """
        raise NotImplementedError

    def batch(self, case: Case) -> Batch:
        """What makes a number of calls.

        Parameters
        ----------
        case : Case
            What is to be done.

        Returns
        -------
        callable
            Takes the number.

        Raises
        ------
        Unsupported
            If the library has no such operation.
        """
        function, arguments = self.call(case)

        def run(calls: int) -> None:
            for _ in repeat(None, calls):
                function(*arguments)

        return run


class Hpcdist(Library):
    """hpcdist with the entry check, as it comes."""

    name = "hpcdist"
    check = 1

    def call(self, case: Case) -> Call:
        """See :meth:`Library.call`."""
        name, root = case.operation.name, case.root
        op: tuple[Any, ...] = ()
        if case.operation.reduces and case.redop != "SUM":
            op = (getattr(ReduceOp, case.redop),)
        if name == "all_reduce":
            return reduce.all_reduce, (case.send, *op)
        if name == "reduce":
            return reduce.reduce, (case.send, root, *op)
        if name == "reduce_scatter_tensor":
            return reduce.reduce_scatter_tensor, (case.recv, case.send, *op)
        if name == "broadcast":
            return broadcast.broadcast, (case.send, root)
        if name == "all_gather":
            return gather.all_gather, (case.parts(case.recv), case.send)
        if name == "all_gather_into_tensor":
            return gather.all_gather_into_tensor, (case.recv, case.send)
        if name == "gather":
            return gather.gather, (
                case.send,
                case.parts(case.recv) if case.is_root else None,
                root,
            )
        if name == "scatter":
            return scatter.scatter, (
                case.recv,
                case.parts(case.send) if case.is_root else None,
                root,
            )
        if name == "all_to_all_single":
            return all_to_all.all_to_all_single, (case.recv, case.send)
        return barrier.barrier, ()

    def batch(self, case: Case) -> Batch:
        """See :meth:`Library.batch`; the level of the check is set for the calls alone."""
        inner, comm = super().batch(case), group.world.comm

        def run(calls: int) -> None:
            level, comm.check = comm.check, self.check
            try:
                inner(calls)
            finally:
                comm.check = level

        return run


class Unchecked(Hpcdist):
    """hpcdist with ``HPCDIST_CHECK=off``."""

    name = "hpcdist-off"
    check = 0


class Mpi4py(Library):
    """mpi4py on NumPy views of the same memory: one call of the library's."""

    name = "mpi4py"

    def open(self, job: Job) -> None:
        """See :meth:`Library.open`."""
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise Unsupported(f"cannot be imported: {error}") from None
        self._mpi = MPI
        self._comm = MPI.Comm.fromhandle(group.world.comm.handle).Dup()

    def call(self, case: Case) -> Call:
        """See :meth:`Library.call`."""
        comm, name, root = self._comm, case.operation.name, case.root
        place = self._mpi.IN_PLACE
        if name == "barrier":
            return comm.Barrier, ()
        try:
            case.dtype.numpy_dtype  # noqa: B018 - raises where NumPy has no such dtype
        except TypeError:
            raise Unsupported(f"NumPy has no {case.dtype}") from None
        if case.operation.reduces and case.dtype.name == "float16":
            raise Unsupported("MPI has no float16 to reduce")
        send, recv = case.send.numpy(), case.recv.numpy()
        op = self._op(case)
        if name == "all_reduce":
            return comm.Allreduce, (place, send, *op)
        if name == "reduce":
            both = (place, send) if case.is_root else (send, None)
            return comm.Reduce, (*both, *(op or (self._mpi.SUM,)), root)
        if name == "reduce_scatter_tensor":
            return comm.Reduce_scatter_block, (send, recv, *op)
        if name == "broadcast":
            return comm.Bcast, (send, root)
        if name in ("all_gather", "all_gather_into_tensor"):
            return comm.Allgather, (send, recv)
        if name == "gather":
            return comm.Gather, (send, recv if case.is_root else None, root)
        if name == "scatter":
            return comm.Scatter, (send if case.is_root else None, recv, root)
        return comm.Alltoall, (send, recv)

    def _op(self, case: Case) -> tuple[Any, ...]:
        if not case.operation.reduces or case.redop == "SUM" and case.dtype.kind != "bool":
            return ()
        names = {"PRODUCT": "PROD"}
        if case.dtype.kind == "bool":
            names = {"SUM": "LOR", "PRODUCT": "LAND", "MIN": "LAND", "MAX": "LOR", "BAND": "LAND"}
            names |= {"BOR": "LOR", "BXOR": "LXOR"}
        found = getattr(self._mpi, names.get(case.redop, case.redop), None)
        if found is None:
            raise Unsupported(f"MPI has no operation {case.redop}")
        return (found,)


#: In the order in which they are printed.
LIBRARIES: tuple[type[Library], ...] = (Hpcdist, Unchecked, Mpi4py)
