"""Loops in C over one MPI call: the baseline that ``python -m hpcdist bench`` compares hpcdist with.

A loop contains nothing but the call. The memory is the caller's, the element type and the operation
are those that hpcdist passes to MPI, and the communicator is a duplicate. :func:`copy` and :func:`combine` make
no call at all: they move a rank's share of the bytes that an operation cannot avoid.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from hpcdist.libmpi cimport (
    MPI_COMM_NULL, MPI_ERRORS_RETURN, MPI_IN_PLACE, MPI_MAX_ERROR_STRING, MPI_OP_NULL, MPI_STATUS_IGNORE,
    MPI_STATUSES_IGNORE, MPI_SUCCESS,
    MPI_Allgather, MPI_Allreduce, MPI_Alltoall, MPI_Barrier, MPI_Bcast, MPI_Comm, MPI_Comm_dup, MPI_Comm_free,
    MPI_Comm_rank, MPI_Comm_set_errhandler, MPI_Datatype, MPI_Error_string, MPI_Gather, MPI_Iallgather, MPI_Iallreduce,
    MPI_Ialltoall, MPI_Ibarrier, MPI_Ibcast, MPI_Igather, MPI_Irecv, MPI_Ireduce, MPI_Ireduce_scatter_block,
    MPI_Iscatter, MPI_Isend, MPI_Op, MPI_Recv, MPI_Reduce, MPI_Reduce_scatter_block, MPI_Request, MPI_Scatter, MPI_Send,
    MPI_Wait, MPI_Waitall,
)

from hpcdist.errors import DistBackendError

cdef extern from "hd_mpi_ops.h" nogil:
    int hd_mpi_ops_init()
    MPI_Datatype hd_mpi_type(int)
    MPI_Op hd_mpi_op(int, int)

cdef extern from "hd_kernels.h" nogil:
    ctypedef void (*hd_reduce_fn)(const void*, const void*, void*, int64_t) noexcept nogil
    hd_reduce_fn hd_reduce_kernel(int, int)

cdef extern from "hd_types.h" nogil:
    size_t hd_itemsize(int)

cdef extern from * nogil:
    """
    #define comm_of_int(n) ((MPI_Comm)(intptr_t)(n))
    """
    MPI_Comm comm_of_int(size_t)

cdef enum Kind:
    ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, BARRIER

cdef struct Call:  # of one collective; count: elements of one rank's part
    int kind, count, root
    void* send
    void* recv
    MPI_Datatype type
    MPI_Op op

cdef dict kinds = {
    "all_reduce": ALL_REDUCE,
    "broadcast": BROADCAST,
    "reduce": REDUCE,
    "all_gather": ALL_GATHER,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "all_to_all_single": ALL_TO_ALL,
    "gather": GATHER,
    "scatter": SCATTER,
    "barrier": BARRIER,
}


cdef class Loop:
    """The loops, on a duplicate of a communicator. All its ranks make and free it together.

    Parameters
    ----------
    handle : int
        The communicator, as an integer.
    """

    cdef MPI_Comm comm
    cdef int rank

    def __cinit__(self, object handle):
        cdef size_t number = int(handle) & 0xFFFFFFFFFFFFFFFF
        self.comm = MPI_COMM_NULL
        well(MPI_Comm_dup(comm_of_int(number), &self.comm), "MPI_Comm_dup")
        MPI_Comm_set_errhandler(self.comm, MPI_ERRORS_RETURN)
        well(MPI_Comm_rank(self.comm, &self.rank), "MPI_Comm_rank")
        well(hd_mpi_ops_init(), "MPI_Op_create")

    def free(self):
        """Frees the duplicate; may be repeated."""
        if self.comm != MPI_COMM_NULL:
            well(MPI_Comm_free(&self.comm), "MPI_Comm_free")

    def collective(self, str name, size_t send, size_t recv, int count, int dtype, int op, int root, long calls):
        """Calls a collective.

        Parameters
        ----------
        name : str
            The public name of hpcdist's operation.
        send, recv : int
            Addresses. all_reduce and reduce are done in place, in `send`.
        count : int
            Elements of one rank's part.
        dtype, op : int
            hpcdist's codes.
        root : int
            Rank of the root; ignored where there is none.
        calls : int
            How often.

        Raises
        ------
        ValueError
            MPI has no such operation.
        DistBackendError
            MPI reported an error.
        """
        self.run(name, send, recv, count, dtype, op, root, calls, False)

    def nonblocking(self, str name, size_t send, size_t recv, int count, int dtype, int op, int root, long calls):
        """Begins a collective by its nonblocking call and waits for it. Arguments and errors as of :meth:`collective`."""
        self.run(name, send, recv, count, dtype, op, root, calls, True)

    cdef int run(self, str name, size_t send, size_t recv, int count, int dtype, int op, int root, long calls,
                 bint begins) except -1:
        cdef Call call
        cdef int rc
        call.kind = kinds[name]
        call.send, call.recv = <void*> send, <void*> recv
        call.count, call.root = count, root
        call.type, call.op = hd_mpi_type(dtype), hd_mpi_op(op, dtype)
        if call.op == MPI_OP_NULL and call.kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER):
            raise ValueError("MPI has no such operation on this type")
        with nogil:
            if begins:
                rc = self.begin_and_wait(&call, calls)
            else:
                rc = self.call(&call, calls)
        return well(rc, name)

    cdef int call(self, const Call* a, long calls) noexcept nogil:
        cdef MPI_Comm c = self.comm
        # in locals: MPI could change what `a` points to, as far as the compiler knows
        cdef void* s = a.send
        cdef void* r = a.recv
        cdef int n = a.count, root = a.root, kind = a.kind, rc = MPI_SUCCESS
        cdef MPI_Datatype t = a.type
        cdef MPI_Op o = a.op
        cdef bint is_root = self.rank == root
        cdef long i = 0
        if kind == ALL_REDUCE:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Allreduce(MPI_IN_PLACE, s, n, t, o, c)
                i += 1
        elif kind == BROADCAST:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Bcast(s, n, t, root, c)
                i += 1
        elif kind == REDUCE:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Reduce(MPI_IN_PLACE if is_root else s, s, n, t, o, root, c)
                i += 1
        elif kind == ALL_GATHER:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Allgather(s, n, t, r, n, t, c)
                i += 1
        elif kind == REDUCE_SCATTER:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Reduce_scatter_block(s, r, n, t, o, c)
                i += 1
        elif kind == ALL_TO_ALL:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Alltoall(s, n, t, r, n, t, c)
                i += 1
        elif kind == GATHER:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Gather(s, n, t, r, n, t, root, c)
                i += 1
        elif kind == SCATTER:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Scatter(s, n, t, r, n, t, root, c)
                i += 1
        else:
            while i < calls and rc == MPI_SUCCESS:
                rc = MPI_Barrier(c)
                i += 1
        return rc

    cdef int begin(self, const Call* a, MPI_Request* req) noexcept nogil:
        cdef MPI_Comm c = self.comm
        cdef void* s = a.send
        cdef void* r = a.recv
        cdef int n = a.count
        cdef MPI_Datatype t = a.type
        if a.kind == ALL_REDUCE:
            return MPI_Iallreduce(MPI_IN_PLACE, s, n, t, a.op, c, req)
        if a.kind == BROADCAST:
            return MPI_Ibcast(s, n, t, a.root, c, req)
        if a.kind == REDUCE:
            return MPI_Ireduce(MPI_IN_PLACE if self.rank == a.root else s, s, n, t, a.op, a.root, c, req)
        if a.kind == ALL_GATHER:
            return MPI_Iallgather(s, n, t, r, n, t, c, req)
        if a.kind == REDUCE_SCATTER:
            return MPI_Ireduce_scatter_block(s, r, n, t, a.op, c, req)
        if a.kind == ALL_TO_ALL:
            return MPI_Ialltoall(s, n, t, r, n, t, c, req)
        if a.kind == GATHER:
            return MPI_Igather(s, n, t, r, n, t, a.root, c, req)
        if a.kind == SCATTER:
            return MPI_Iscatter(s, n, t, r, n, t, a.root, c, req)
        return MPI_Ibarrier(c, req)

    cdef int begin_and_wait(self, const Call* a, long calls) noexcept nogil:
        cdef MPI_Request req
        cdef int rc = MPI_SUCCESS
        cdef long i = 0
        while i < calls and rc == MPI_SUCCESS:
            rc = self.begin(a, &req)
            if rc == MPI_SUCCESS:
                rc = MPI_Wait(&req, MPI_STATUS_IGNORE)
            i += 1
        return rc

    def ping_pong(self, size_t send, size_t recv, int count, int dtype, int peer, bint begins, long calls):
        """Sends to the peer and receives from it, or in the opposite order.

        Parameters
        ----------
        send, recv : int
            Addresses.
        count, dtype : int
            Elements, and hpcdist's code of their type.
        peer : int
            The other rank.
        begins : bool
            Whether this rank sends first.
        calls : int
            Number of round trips.

        Raises
        ------
        DistBackendError
            MPI reported an error.
        """
        cdef void* s = <void*> send
        cdef void* r = <void*> recv
        cdef MPI_Datatype t = hd_mpi_type(dtype)
        cdef MPI_Comm c = self.comm
        cdef int rc = MPI_SUCCESS
        cdef long i = 0
        with nogil:
            while i < calls and rc == MPI_SUCCESS:
                if begins:
                    rc = MPI_Send(s, count, t, peer, 0, c)
                    if rc == MPI_SUCCESS:
                        rc = MPI_Recv(r, count, t, peer, 0, c, MPI_STATUS_IGNORE)
                else:
                    rc = MPI_Recv(r, count, t, peer, 0, c, MPI_STATUS_IGNORE)
                    if rc == MPI_SUCCESS:
                        rc = MPI_Send(s, count, t, peer, 0, c)
                i += 1
        well(rc, "ping_pong")

    def stream(self, size_t address, int count, int dtype, int peer, bint sends, int window, long calls):
        """Sends a window of messages at once and waits for an answer, or receives them and answers.

        Parameters
        ----------
        address : int
            Of one message; all messages of a window use the same memory.
        count, dtype : int
            Elements, and hpcdist's code of their type.
        peer : int
            The other rank.
        sends : bool
            Whether this rank sends.
        window : int
            Messages in flight at once.
        calls : int
            Number of windows.

        Raises
        ------
        DistBackendError
            MPI reported an error.
        MemoryError
            No memory for the requests.
        """
        cdef void* p = <void*> address
        cdef MPI_Datatype t = hd_mpi_type(dtype)
        cdef MPI_Datatype byte = hd_mpi_type(1)
        cdef MPI_Comm c = self.comm
        cdef MPI_Request* requests = <MPI_Request*> calloc(window if window > 0 else 1, sizeof(MPI_Request))
        cdef int rc = MPI_SUCCESS, k
        cdef char answer = 0
        cdef long i = 0
        if requests == NULL:
            raise MemoryError(f"no memory for {window} requests")
        with nogil:
            while i < calls and rc == MPI_SUCCESS:
                k = 0
                while k < window and rc == MPI_SUCCESS:
                    if sends:
                        rc = MPI_Isend(p, count, t, peer, 1, c, &requests[k])
                    else:
                        rc = MPI_Irecv(p, count, t, peer, 1, c, &requests[k])
                    k += 1
                if rc == MPI_SUCCESS:
                    rc = MPI_Waitall(window, requests, MPI_STATUSES_IGNORE)
                if rc == MPI_SUCCESS:
                    if sends:
                        rc = MPI_Recv(&answer, 1, byte, peer, 2, c, MPI_STATUS_IGNORE)
                    else:
                        rc = MPI_Send(&answer, 1, byte, peer, 2, c)
                i += 1
        free(requests)
        well(rc, "stream")


cdef int well(int rc, str what) except -1:
    cdef char text[1024]
    cdef int length = 0
    if rc != MPI_SUCCESS:
        if MPI_MAX_ERROR_STRING > 1024 or MPI_Error_string(rc, text, &length) != MPI_SUCCESS:
            length = 0
        raise DistBackendError(f"MPI failed in the C loop over {what}: {text[:length].decode(errors='replace')}")
    return 0


def copy(size_t send, size_t recv, size_t size, long calls):
    """Copies memory.

    Parameters
    ----------
    send, recv : int
        Addresses.
    size : int
        Bytes.
    calls : int
        How often.
    """
    cdef long _i
    with nogil:
        for _i in range(calls):
            memcpy(<void*> recv, <void*> send, size)


def combine(size_t send, size_t recv, int64_t count, int blocks, int dtype, int op, bint back, long calls):
    """Reduces the blocks of a tensor into one, and may write the result into all of them.

    Parameters
    ----------
    send, recv : int
        Addresses of the blocks, one behind the other, and of the result, which may be the first block.
    count : int
        Elements of a block.
    blocks : int
        How many.
    dtype, op : int
        hpcdist's codes.
    back : bool
        Whether the result is copied into the blocks behind the first.
    calls : int
        How often.

    Raises
    ------
    ValueError
        The operation has no meaning for the type.
    """
    cdef hd_reduce_fn reduce = hd_reduce_kernel(op, dtype)
    cdef int64_t item = hd_itemsize(dtype), step = (32 << 10) // item, at, n
    cdef char* to
    cdef long _i
    cdef int k
    if reduce == NULL:
        raise ValueError("no such operation on this type")
    with nogil:
        for _i in range(calls):
            at = 0
            while at < count:  # by pieces that stay in the first-level cache
                n = min(step, count - at)
                to = <char*> recv + at * item
                if blocks == 1 and recv != send:
                    memcpy(to, <char*> send + at * item, n * item)
                for k in range(1, blocks):
                    reduce(<char*> send + (k * count + at) * item,
                           to if k > 1 else <char*> send + at * item, to, n)
                if back:
                    for k in range(1, blocks):
                        memcpy(<char*> send + (k * count + at) * item, to, n * item)
                at += n
