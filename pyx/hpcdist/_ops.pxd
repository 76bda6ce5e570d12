"""Reduce operations and element types, for the other native modules."""

cimport cython


@cython.final
cdef class ReduceOp:
    cdef readonly int code
    cdef readonly double factor

cdef ReduceOp as_reduce_op(object op)
