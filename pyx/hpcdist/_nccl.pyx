"""The binding of NCCL: communicators, and the queue that starts operations on streams.

It knows neither torch nor how the ranks meet. :mod:`hpcdist.backends.nccl` gives it streams,
communicators, the check before an operation and the recording. Every call of NCCL runs without the
GIL.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from hpcdist._buffer cimport call_limit, fill_device, hd_buf
from hpcdist._nccl_loader cimport functions
from hpcdist._ops cimport ReduceOp, as_reduce_op
from hpcdist.libnccl cimport *

import struct
import threading
import time

from hpcdist._nccl_loader import version_text
from hpcdist.config import DEFAULT_TIMEOUT  # for callers without a group: a group passes its own
from hpcdist.errors import (
    DistBackendError,
    DistError,
    DistTimeoutError,
    RankFailedError,
    checked_async,
    forked_error,
)

cdef extern from "hd_types.h":
    enum:
        HD_BOOL, HD_UINT8, HD_INT8, HD_INT32, HD_UINT32, HD_INT64, HD_UINT64, HD_FLOAT16, HD_BFLOAT16, HD_FLOAT32
        HD_FLOAT64, HD_COMPLEX64, HD_COMPLEX128, HD_FLOAT8_E4M3FN, HD_FLOAT8_E5M2, HD_NDTYPES
        HD_SUM, HD_AVG, HD_PRODUCT, HD_MIN, HD_MAX, HD_PREMUL_SUM, HD_NOPS
    size_t hd_itemsize(int) nogil
    const char* hd_dtype_name(int) nogil
    const char* hd_op_name(int) nogil

cdef extern from "hd_base.h":
    enum:
        HD_ERR_BACKEND

cdef extern from "hd_kinds.h":
    enum:
        HD_BARRIER, HD_ALL_REDUCE, HD_REDUCE, HD_REDUCE_SCATTER, HD_BROADCAST, HD_ALL_GATHER, HD_GATHER, HD_SCATTER
        HD_ALL_TO_ALL, HD_SEND, HD_RECV

cdef extern from "hd_beside.h" nogil:
    ctypedef struct hd_beside_call:
        unsigned seq
        int peer
        int64_t count, in_n, out_n
        signed char kind, dtype, redop
        unsigned short name
    ctypedef struct hd_beside:
        uint64_t (*begin)(hd_beside*, const hd_beside_call*) noexcept
        void (*end)(uint64_t, int) noexcept
        unsigned short (*name)(const char*) noexcept

cdef extern from "hd_nccl_watch.h" nogil:
    enum:
        HD_WATCH_LATE, HD_WATCH_CUDA, HD_WATCH_ABORTED, HD_WATCH_RUNS, HD_WATCH_DONE, HD_WATCH_FAILED, HD_WATCH_CAPTURED
        HD_START_MEMORY, HD_START_OTHER_CAPTURES
    ctypedef struct hd_guard:
        int inside
        int taken
        int failed
        int raised
        char* where
        char* what
        char* text
        hd_beside* beside
    ctypedef struct hd_cuda:
        int (*create)(void**, unsigned) noexcept nogil
        int (*record)(void*, void*) noexcept nogil
        int (*query)(void*) noexcept nogil
        int (*wait)(void*, void*, unsigned) noexcept nogil
        int (*captures)(void*, int*) noexcept nogil
        int (*mode)(int*) noexcept nogil
        int (*context)(void**) noexcept nogil
        int (*enter)(void*) noexcept nogil
    ctypedef struct hd_gpu:
        pass
    ctypedef struct hd_watched:
        hd_watched* after
        hd_guard* guard
        const char* api
        unsigned long long number
        void* keep
        uint64_t record
        unsigned records
        int state
    hd_guard* hd_guard_new(const hd_nccl*, ncclComm_t)
    void hd_guard_put(hd_guard*)
    int hd_guard_enter(hd_guard*)
    void hd_guard_leave(hd_guard*)
    int hd_guard_take(hd_guard*)
    int hd_guard_failed(hd_guard*)
    int hd_guard_taken(hd_guard*)
    int hd_guard_empty(hd_guard*)
    void hd_guard_set_freed(hd_guard*)
    int hd_guard_await_freed(hd_guard*)
    void hd_guard_lose(hd_guard*, int, const char*, const char*)
    void hd_guard_name(hd_guard*, const char*)
    void hd_guard_beside(hd_guard*, hd_beside*)
    void hd_watched_explain(const hd_watched*, char*, size_t)
    hd_gpu* hd_gpu_of(const hd_cuda*, void*, int)
    int hd_start(hd_gpu*, hd_guard*, void*, void*, hd_watched**, const char**)
    void hd_starting(hd_watched*, double)
    int hd_started(hd_watched*, void*, double, const char**)
    int hd_order(hd_watched*, void*)
    int hd_captures(hd_gpu*, void*)
    void hd_watched_name(const hd_watched*, char*, size_t)
    int hd_watch_wait(hd_watched*, double)
    int hd_watch_listed(hd_watched*)
    void hd_watch_take(hd_watched*)
    void hd_watch_put(hd_watched*)
    void hd_watch_drop(hd_watched*)
    int hd_watch_forks()
    int hd_watch_forked()
    void hd_watch_stop()

cdef extern from *:
    """
    /* NCCL's groups belong to threads. */
    static __thread int hd_nccl_depth;
    """
    int hd_nccl_depth

include "seconds.pxi"
include "nccl/tables.pxi"


cdef int unforked() except -1:
    """Refuses all use of NCCL in a child that was forked after a group or a communicator was made."""
    if hd_watch_forked():
        raise forked_error("NCCL")
    return 0


def unique_id():
    """A new identity for a communicator, to be given to all its ranks.

    Returns
    -------
    bytes
        128 of them.
    """
    cdef const hd_nccl* nccl = functions()
    cdef hd_nccl_id made
    cdef int rc
    unforked()
    with nogil:
        rc = nccl.get_unique_id(&made)
    if rc != HD_NCCL_SUCCESS:
        raise failure("ncclGetUniqueId", rc, last_words(NULL))
    return PyBytes_FromStringAndSize(<char*> &made, sizeof(made))


def mem_alloc(size_t nbytes):
    """Memory on the current device that NCCL can register (2.19).

    Returns
    -------
    int
        Its address, for :func:`mem_free`.
    """
    cdef const hd_nccl* nccl = functions()
    cdef void* made = NULL
    cdef int rc
    unforked()
    if nccl.mem_alloc == NULL:
        raise too_old("ncclMemAlloc", "2.19")
    with nogil:
        rc = nccl.mem_alloc(&made, nbytes)
    if rc != HD_NCCL_SUCCESS:
        raise failure("ncclMemAlloc", rc, last_words(NULL))
    return <uintptr_t> made


def mem_free(uintptr_t data):
    """Free memory of :func:`mem_alloc`."""
    cdef const hd_nccl* nccl = functions()
    cdef int rc
    with nogil:
        rc = nccl.mem_free(<void*> data)
    if rc != HD_NCCL_SUCCESS:
        raise failure("ncclMemFree", rc, last_words(NULL))


def group_start():
    """Begin to collect operations; they start together in :func:`group_end`.

    Belongs to the calling thread.
    """
    global hd_nccl_depth
    cdef const hd_nccl* nccl = functions()
    cdef int rc
    unforked()
    with nogil:
        rc = nccl.group_start()
    if rc != HD_NCCL_SUCCESS:
        raise failure("ncclGroupStart", rc, last_words(NULL))
    hd_nccl_depth += 1


def group_end(comms=(), double timeout=DEFAULT_TIMEOUT):
    """Start the operations collected since :func:`group_start`.

    Parameters
    ----------
    comms : iterable of Communicator
        Those that were used in the group; those with blocking=0 are waited for.
    timeout : float
        Seconds for that.

    Raises
    ------
    DistBackendError, RankFailedError
        What NCCL reports.
    DistTimeoutError
        If they are still in progress then.
    """
    end_group()
    settle_group(comms, timeout)


cdef int end_group() except -1:
    global hd_nccl_depth
    cdef const hd_nccl* nccl = functions()
    cdef int rc
    unforked()
    hd_nccl_depth -= 1
    with nogil:
        rc = nccl.group_end()
    if rc != HD_NCCL_SUCCESS and rc != HD_NCCL_IN_PROGRESS:
        raise failure("ncclGroupEnd", rc, last_words(NULL))
    return 0


cdef int settle_group(object comms, double timeout) except -1:
    end = time.monotonic() + timeout
    if hd_nccl_depth == 0:  # the outermost group has started them
        for comm in comms:
            (<Communicator?> comm).settle("ncclGroupEnd", end)
    return 0


cdef int configure(hd_nccl_config* config, bint blocking) except -1:
    memset(config, 0, sizeof(hd_nccl_config))
    config.size = sizeof(hd_nccl_config)
    config.magic = 0xcafebeef
    config.version = HD_NCCL_FLOOR
    config.blocking = blocking
    config.cga_cluster_size = config.min_ctas = config.max_ctas = config.split_share = HD_NCCL_UNDEFINED
    return 0


include "nccl/operations.pxi"
include "nccl/communicator.pxi"


class Group:
    """Operations that start together: ``with Group(comm): comm.send(...); comm.recv(...)``.

    Parameters
    ----------
    *comms : Communicator
        Those used in it.
    """

    __slots__ = ("comms",)

    def __init__(self, *comms):
        self.comms = comms

    def __enter__(self):
        cdef Communicator comm
        group_start()
        for comm in self.comms:  # until the end of the block: the collected operations refer to them
            hd_guard_enter(comm.guard)
        return self

    def __exit__(self, kind, error, trace):
        cdef Communicator comm
        try:
            end_group()
        except DistBackendError:
            if kind is None:  # otherwise the first error is raised
                for comm in self.comms:
                    comm.alive()  # the call may have come back because of an abort
                raise
        finally:
            for comm in self.comms:
                hd_guard_leave(comm.guard)
        if kind is None:
            settle_group(self.comms, max([comm.timeout for comm in self.comms], default=DEFAULT_TIMEOUT))


include "nccl/noting.pxi"
include "nccl/stream_queue.pxi"
include "nccl/single_calls.pxi"
include "nccl/work.pxi"


def region(tensor, bint writable, int memory, str name, str role):
    """A tensor on a device as NCCL sees it.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense.
    writable : bool
        Whether it is written to.
    memory : int
        DLPack's number for its kind of memory.
    name : str
        torch's name for the device.
    role : str
        The tensor's name in messages.

    Returns
    -------
    tuple of int
        Address, elements, hpcdist's code of the element type, index of the device; numbers that
        stand for the shape and, where the elements are not in C order, for the strides, else 0.
    """
    cdef hd_buf b
    cdef int index = fill_device(tensor, &b, writable, memory, name, role)
    return <uintptr_t> b.ptr, b.n, b.dtype, index, b.shape, b.strides


cdef object adopt(ncclComm_t comm, int rc, str what, int size, int rank, bint blocking, double timeout):
    """The object around a new ncclComm_t, when it is ready."""
    cdef Communicator made = Communicator.__new__(Communicator)
    cdef const hd_nccl* nccl = functions()
    if rc != HD_NCCL_SUCCESS and rc != HD_NCCL_IN_PROGRESS:
        raise failure(what, rc, last_words(NULL))
    made.nccl = nccl
    made.comm = comm
    hd_watch_forks()
    made.guard = hd_guard_new(nccl, comm)
    if made.guard == NULL:
        raise MemoryError("there is no memory for a communicator")
    made.blocking = blocking
    made.size = size
    made.rank = rank
    made.state = "ready"
    made.timeout = timeout
    made.premul = {}
    try:
        made.settle(what, time.monotonic() + timeout)
        if size == 0:
            made.after(what, nccl.count(comm, &made.size))
            made.after(what, nccl.user_rank(comm, &made.rank))
    except BaseException:
        made.abort()
        raise
    return made


cdef object too_old(str name, str since):
    cdef int version = 0
    functions().get_version(&version)
    return DistBackendError(f"this NCCL ({version_text(version)}) has no {name}; it needs {since} or newer")


cdef bytes scalar_of(double factor, int dtype):
    if dtype == BFLOAT16:
        bits = struct.unpack("<I", struct.pack("<f", factor))[0]
        if bits & 0x7F800000 != 0x7F800000:
            bits += 0x7FFF + (bits >> 16 & 1)
        return struct.pack("<H", bits >> 16)
    if dtype not in (FLOAT16, FLOAT32, FLOAT64):
        raise TypeError("PREMUL_SUM takes floats only")
    return struct.pack(_FORMATS[dtype], factor)
