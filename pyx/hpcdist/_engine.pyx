"""The MPI engine: communicators with their collectives, and MPI's start and end in this process.

Importing this module loads libmpi and starts nothing; :func:`init_mpi` does. The operations are C
code (``engine/*/*.c``) and run without the GIL; this module has the Python objects on top:
validation, ownership, exceptions.
"""

import _signal
import atexit
import faulthandler
import functools
import operator
import os
import sys
import threading
import time
import warnings
from datetime import timedelta
from itertools import islice

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals, PyErr_Occurred, PyErr_SetObject
from cpython.ref cimport PyObject, Py_DECREF, Py_INCREF
from libc.stdint cimport intptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strcpy, strncpy

from hpcdist cimport libmpi
from hpcdist._buffer cimport call_limit, fill
from hpcdist._ops cimport ReduceOp, as_reduce_op

from hpcdist import _loader, config, hardware, launchers
from hpcdist.errors import (
    DistBackendError,
    DistError,
    DistMismatchError,
    DistNaNError,
    DistTimeoutError,
    RankFailedError,
    Refusal,
    checked_async,
    forked_error,
    mark_told,
)

cdef extern from "Python.h":
    # Not cpython.exc's declaration: with it Cython would swallow the exception of the handler.
    int look_at_signals "PyErr_CheckSignals"() noexcept
    void PySys_WriteStderr(const char*, ...)
    int Py_AddPendingCall(int (*func)(void*) noexcept, void* arg) nogil
    long long PyLong_AsLongLongAndOverflow(object, int* overflow)
    int add_raising_call "Py_AddPendingCall"(int (*func)(void*) except -1, void* arg)

cdef extern from "hd_comm.h" nogil:
    MPI_Comm comm_from_int "(MPI_Comm)(intptr_t)"(intptr_t)
    intptr_t comm_to_int "(intptr_t)"(MPI_Comm)

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include "hd_recorder_file.h"
    static int hd_forked;
    static void hd_after_fork(void)
    {
        hd_forked = 1;
        hd_rec_drop();
    }
    static int hd_guard_fork(void) { return pthread_atfork(0, 0, hd_after_fork); }
    """
    int hd_forked
    int hd_guard_fork()

cdef class Comm
cdef class Work

include "seconds.pxi"
include "engine/errors.pxi"
include "engine/signals.pxi"
include "engine/sites.pxi"
include "engine/ranges.pxi"
include "engine/floats.pxi"
include "engine/work.pxi"
include "engine/submit.pxi"
include "engine/messages.pxi"
include "engine/block.pxi"
include "engine/window.pxi"
include "engine/request.pxi"
include "engine/comm.pxi"
include "engine/comm_life.pxi"
include "engine/survive.pxi"
include "engine/remake.pxi"
include "engine/spares.pxi"
include "engine/tensors.pxi"
include "engine/collectives.pxi"
include "engine/entry.pxi"
include "engine/batch.pxi"
include "engine/process.pxi"
include "engine/recorder.pxi"

hd_arm_early()  # from here on, a rank that fails before MPI starts ends the job
