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

# Fills *b from a tensor or array. role names it in error messages. The answer is the object that keeps the
# memory alive: obj itself, or a view that holds its buffer.
cdef object fill(object obj, hd_buf* b, bint writable, str role)

# The same for a torch tensor in the memory of a device: kind as DLPack numbers it, `name` as messages call it. The
# answer is the index of the device.
cdef int fill_device(object obj, hd_buf* b, bint writable, int kind, str name, str role) except -1

# Seconds that what this thread begins has, by `limited`; 0: as its group says.
cdef double call_limit() noexcept nogil
