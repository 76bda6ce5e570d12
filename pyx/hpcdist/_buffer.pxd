"""Buffers: any tensor or array as pointer, element count, dtype and layout, without a copy."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "hd_types.h":
    const char* hd_dtype_name(int) nogil
    size_t hd_itemsize(int) nogil

cdef extern from "hd_buf.h":
    int HD_MAX_DIMS
    ctypedef struct hd_buf:
        char* ptr
        int64_t n
        int dtype
        int ndim
        int64_t* dims
        uint64_t shape
        uint64_t strides

# Fills *b from a tensor or array. role names it in error messages. Returns the object that keeps
# the memory alive: obj itself, or a view of its buffer.
cdef object fill(object obj, hd_buf* b, bint writable, str role)

# The same for a torch tensor in the memory of a device: `kind` is DLPack's number, `name` the name
# in messages. Returns the index of the device.
cdef int fill_device(object obj, hd_buf* b, bint writable, int kind, str name, str role) except -1

# Seconds that `limited` gives the operations this thread begins; 0: the group's timeout.
cdef double call_limit() noexcept nogil
