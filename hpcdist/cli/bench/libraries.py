"""The libraries: hpcdist, the MPI library itself, mpi4py, and torch with gloo."""

from __future__ import annotations

import os
import socket
from typing import Any

from hpcdist import _bench
from hpcdist._ops import ReduceOp
from hpcdist.backends.mpi import LEVELS
from hpcdist.collectives import all_to_all, barrier, broadcast, gather, p2p, reduce, scatter
from hpcdist.groups import state as group
from hpcdist.operations import OPERATIONS

from .errors import Unsupported
from .floor import Floor
from .job import MpiJob
from .library import Call, Library, Messages, Wait
from .measure import Batch
from .operations import Case


class Hpcdist(Library):
    """hpcdist with the entry check, its default."""

    name = "hpcdist"
    check = LEVELS["on"]

    def call(self, case: Case) -> Call:
        op: tuple[Any, ...] = ()
        if case.operation.reduces and case.redop != "SUM":
            op = (getattr(ReduceOp, case.redop),)
        modules = all_to_all, barrier, broadcast, gather, reduce, scatter
        call = next(filter(None, (vars(each).get(case.operation.name) for each in modules)))
        return call, _arguments(case, op)

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

    def start(self, case: Case) -> Any:
        tensor, all_reduce = case.send, reduce.all_reduce

        def start() -> Wait:
            work = all_reduce(tensor, async_op=True)
            assert work is not None
            return work.wait

        return start

    def messages(self) -> Messages:
        def wait_all(works: list[Any]) -> None:
            for work in works:
                work.wait()

        return Messages(p2p.send, p2p.recv, p2p.isend, p2p.irecv, wait_all, lambda tensor: tensor)


class Unchecked(Hpcdist):
    """hpcdist with ``HPCDIST_CHECK=off``."""

    name = "hpcdist-off"
    check = LEVELS["off"]


class Fast(Hpcdist):
    """hpcdist with ``HPCDIST_CHECK=fast``, which is another check between nodes alone."""

    name = "hpcdist-fast"
    check = LEVELS["fast"]


class Async(Hpcdist):
    """hpcdist with ``async_op=True``, waited for at once: beside hpcdist it shows the handoff."""

    name = "hpcdist-async"

    def call(self, case: Case) -> Call:
        function, arguments = super().call(case)

        def call(*given: Any) -> None:
            function(*given, async_op=True).wait()

        return call, arguments


class CLoop(Library):
    """The MPI library itself: a loop in C over one call."""

    name = "c"

    def open(self, job: MpiJob) -> None:
        comm: Any = group.world.comm  # MPI's
        self._loop = _bench.Loop(comm.handle)
        self._collective = self._loop.collective

    def close(self) -> None:
        self._loop.free()

    def batch(self, case: Case) -> Batch:
        name = case.operation.name
        op = 0
        if case.operation.reduces:
            if case.redop == "AVG":
                raise Unsupported("MPI has no AVG")
            op = getattr(ReduceOp, case.redop).code
        _refuse_long(case)
        arguments = (name, case.send.data_ptr(), case.recv.data_ptr(), case.part)
        codes = (case.dtype.code, op, case.root)
        collective = self._collective
        collective(*arguments, *codes, 0)  # raises before anything is sent if it cannot

        def run(calls: int) -> None:
            collective(*arguments, *codes, calls)

        return run

    def ping_pong(self, send: Any, recv: Any, peer: int, begins: bool) -> Batch:
        loop, count = self._loop, send.numel()
        addresses = send.data_ptr(), recv.data_ptr()
        code = _code(send)

        def run(calls: int) -> None:
            loop.ping_pong(*addresses, count, code, peer, begins, calls)

        return run

    def stream(self, tensor: Any, peer: int, sends: bool, window: int) -> Batch:
        loop, address, count, code = self._loop, tensor.data_ptr(), tensor.numel(), _code(tensor)

        def run(calls: int) -> None:
            loop.stream(address, count, code, peer, sends, window, calls)

        return run


class CNonblocking(CLoop):
    """The same over the nonblocking call, waited for at once."""

    name = "c-async"

    def open(self, job: MpiJob) -> None:
        super().open(job)
        self._collective = self._loop.nonblocking


class Mpi4py(Library):
    """mpi4py on NumPy views of the same memory: one call of the library's."""

    name = "mpi4py"

    def open(self, job: MpiJob) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            problem: str | None = f"mpi4py cannot be imported: {error}"
        else:
            problem = None
        problem = job.problem(problem)  # before the first call that all have to make
        if problem is not None:
            raise Unsupported(problem)
        self._mpi = MPI
        comm: Any = group.world.comm  # MPI's
        self._duplicate = MPI.Comm.fromhandle(comm.handle).Dup()

    def close(self) -> None:
        self._duplicate.Free()

    def call(self, case: Case) -> Call:
        comm, name, root, place = (
            self._duplicate,
            case.operation.name,
            case.root,
            self._mpi.IN_PLACE,
        )
        if name == "barrier":
            return comm.Barrier, ()
        send, recv = self._array(case, case.send), self._array(case, case.recv)
        op = self._op(case) if case.operation.reduces else ()
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

    def start(self, case: Case) -> Any:
        array, op = self._array(case, case.send), self._op(case)
        call, place = self._duplicate.Iallreduce, self._mpi.IN_PLACE

        def start() -> Wait:
            return call(place, array, *op).Wait

        return start

    def messages(self) -> Messages:
        comm = self._duplicate
        wait_all = self._mpi.Request.Waitall
        return Messages(
            comm.Send, comm.Recv, comm.Isend, comm.Irecv, wait_all, lambda tensor: tensor.numpy()
        )

    def _array(self, case: Case, tensor: Any) -> Any:
        """A NumPy view that mpi4py finds an MPI type for."""
        _refuse_long(case)
        try:
            case.dtype.numpy_dtype  # noqa: B018 - raises where NumPy has no such dtype
        except TypeError:
            raise Unsupported(f"NumPy has no {case.dtype}") from None
        if case.dtype.name == "float16":
            raise Unsupported("mpi4py has no MPI type for float16")
        return tensor.numpy()

    def _op(self, case: Case) -> tuple[Any, ...]:
        if case.redop == "SUM" and case.dtype.kind != "bool":
            return ()
        names = {"PRODUCT": "PROD"}
        if case.dtype.kind == "bool":
            names = {"SUM": "LOR", "PRODUCT": "LAND", "MIN": "LAND", "MAX": "LOR", "BAND": "LAND"}
            names |= {"BOR": "LOR", "BXOR": "LXOR"}
        found = getattr(self._mpi, names.get(case.redop, case.redop), None)
        if found is None:
            raise Unsupported(f"MPI has no {case.redop}")
        return (found,)


class Gloo(Library):
    """torch.distributed with its gloo backend, in the same processes over TCP."""

    name = "gloo"

    def open(self, job: MpiJob) -> None:
        import torch.distributed as torch_dist

        missing = not torch_dist.is_available() or not torch_dist.is_gloo_available()
        problem = job.problem("this torch was built without gloo" if missing else None)
        if problem is not None:
            raise Unsupported(problem)
        hosts = job.gather(socket.gethostname())
        alone = len(set(hosts)) == 1
        if alone:
            # a host's name need not be an address of it; within a node loopback is gloo's best
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place = "127.0.0.1" if alone else hosts[0]
        store, port = None, 0
        try:
            if job.first:
                store = torch_dist.TCPStore(
                    place, 0, job.size, is_master=True, wait_for_workers=False
                )
                port = store.port
        except RuntimeError as error:
            problem = f"no store: {error}"
        port = max(job.gather(port))
        problem = job.problem(problem)
        if problem is None:
            try:
                store = store or torch_dist.TCPStore(
                    place, port, job.size, is_master=False, wait_for_workers=False
                )
                torch_dist.init_process_group(
                    "gloo", store=store, rank=job.rank, world_size=job.size
                )
            except RuntimeError as error:
                problem = f"gloo does not start: {error}"
        problem = job.problem(problem)
        if problem is not None:
            raise Unsupported(problem.splitlines()[0])
        self._dist = torch_dist

    def close(self) -> None:
        self._dist.destroy_process_group()

    def call(self, case: Case) -> Call:
        lib, name = self._dist, case.operation.name
        if name == "barrier":
            return lib.barrier, ()
        if case.dtype.name not in _GLOO:
            raise Unsupported(f"gloo has no {case.dtype}")
        op: tuple[Any, ...] = ()
        if case.operation.reduces:
            if case.redop == "AVG" or case.dtype.kind == "float" and case.redop.startswith("B"):
                raise Unsupported(f"gloo has no {case.redop} on {case.dtype}")
            if case.redop != "SUM":
                op = (getattr(lib.ReduceOp, case.redop),)
        # torch 2.13 has other names for two, and warns of these at each call
        call = getattr(lib, OPERATIONS[name].c10d, None) or getattr(lib, name)
        return call, _arguments(case, op)

    def start(self, case: Case) -> Any:
        all_reduce, arguments = self.call(case)

        def start() -> Wait:
            return all_reduce(*arguments, async_op=True).wait

        return start

    def messages(self) -> Messages:
        lib = self._dist

        def wait_all(works: list[Any]) -> None:
            for work in works:
                work.wait()

        return Messages(lib.send, lib.recv, lib.isend, lib.irecv, wait_all, lambda tensor: tensor)


#: Element types of gloo's collectives.
_GLOO = frozenset({"uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"})

#: Measured only where they are asked for.
ASKED_FOR: tuple[type[Library], ...] = (Fast, Async, CNonblocking)

#: In the order in which they are printed.
LIBRARIES: tuple[type[Library], ...] = (
    *(Hpcdist, Unchecked, CLoop, Floor, Mpi4py, Gloo),
    *ASKED_FOR,
)


def _arguments(case: Case, op: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the public function takes, hpcdist's as torch's."""
    places = OPERATIONS[case.operation.name]
    send: Any = case.send
    recv: Any = case.recv
    if places.name == "all_gather" or places.name == "gather" and case.is_root:
        recv = case.parts(recv)
    elif places.name == "gather":
        recv = None
    elif places.name == "scatter":
        send = case.parts(send) if case.is_root else None
    given = {places.outputs: recv, places.inputs: send, places.root: case.root}
    return (*(given[place] for place in range(3) if place in given), *op)


def _refuse_long(case: Case) -> None:
    """One MPI call takes an int for a count."""
    if case.part > 2**31 - 1:
        raise Unsupported("more elements than one MPI call takes")


def _code(tensor: Any) -> int:
    from hpcdist.dtypes import lookup

    return lookup(tensor.dtype).code
