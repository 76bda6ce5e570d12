"""Tensors and arrays as memory the engine can move.

torch tensors go through the C function behind ``torch.Tensor.__dlpack_c_exchange_api__`` (about 50 ns), or through
their attributes on torch before 2.10; NumPy arrays and everything else with the buffer protocol through a
``Py_buffer``; other DLPack objects through ``torch.from_dlpack``. Everything is validated here, before MPI sees
it: type, device, dtype, layout, writability.
"""

import sys

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from hpcdist cimport dlpack
from hpcdist.dlpack cimport DLManagedTensorVersioned, DLPackExchangeAPI, DLTensor

cdef extern from "hd_base.h" nogil:
    uint64_t hd_mix(uint64_t, uint64_t)

cdef extern from "hd_types.h":
    enum:
        HD_BOOL, HD_UINT8, HD_INT8, HD_UINT16, HD_INT16, HD_UINT32, HD_INT32, HD_UINT64, HD_INT64
        HD_FLOAT16, HD_BFLOAT16, HD_FLOAT32, HD_FLOAT64, HD_COMPLEX64, HD_COMPLEX128
        HD_FLOAT8_E4M3FN, HD_FLOAT8_E5M2, HD_FLOAT8_E4M3FNUZ, HD_FLOAT8_E5M2FNUZ, HD_FLOAT8_E8M0FNU
        HD_NDTYPES

cdef extern from *:
    """
    /* The function behind a method without arguments, of objects of this type; NULL: there is none. Called directly, it
     * is found once and not at each call. */
    static PyCFunction hd_no_arguments(PyObject *method, PyObject *type)
    {
        const PyMethodDef *def;
        if (!Py_IS_TYPE(method, &PyMethodDescr_Type) || !PyType_IsSubtype((PyTypeObject *)type, PyDescr_TYPE(method)))
            return NULL;
        def = ((PyMethodDescrObject *)method)->d_method;
        return def->ml_flags == METH_NOARGS ? def->ml_meth : NULL;
    }
    """
    ctypedef object (*PyCFunction)(object, PyObject*)
    PyCFunction hd_no_arguments(object method, object type) noexcept

# A lower address may be the offset into a storage without memory; nearly all of a process's memory
# lies above.
cdef uintptr_t LOW = <uintptr_t> 1 << 40

# The last tensor type seen and its exchange function: training uses one or two types.
cdef object known_type = None
cdef object numpy_type = None  # to read a type's module costs as much as the rest of a small call's arguments
cdef dlpack.tensor_from_object known_function = NULL
cdef PyCFunction known_is_neg = NULL  # NULL: it is called as any other method
cdef dict functions = {}  # type -> address of its function, 0 if it has none
# The same for tensors on a device.
cdef object known_on_device = None
cdef dlpack.tensor_from_object function_on_device = NULL
cdef object known_device = None


cdef uintptr_t find_function(object tp):
    cdef DLPackExchangeAPI* api
    capsule = getattr(tp, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    try:
        api = <DLPackExchangeAPI*> PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    except (TypeError, ValueError):
        return 0
    if api.version.major != 1:
        return 0
    return <uintptr_t> api.dltensor_from_py_object_no_sync


cdef int layout_of(hd_buf* b, int ndim, const int64_t* shape, const int64_t* strides, int64_t unit) except -2:
    """Count, dims and hashes; strides in multiples of unit. Returns 0, or -1 for gaps or overlaps."""
    cdef int64_t n = 1, expect, step
    cdef int i, _
    cdef uint64_t h = 0x5be0cd19137e2179
    cdef bint plain = True
    for i in range(ndim):
        n *= shape[i]
        if i < HD_MAX_DIMS:
            b.dims[i] = shape[i]
        h = hd_mix(h, <uint64_t> shape[i])
    b.n = n
    b.ndim = ndim
    b.shape = hd_mix(h, <uint64_t> ndim)
    b.strides = 0
    if strides == NULL or n <= 1:
        return 0
    expect = unit
    for i in range(ndim - 1, -1, -1):
        if shape[i] != 1:
            if strides[i] != expect:
                plain = False
                break
            expect *= shape[i]
    if plain:
        return 0
    # Dense in another order? The strides, from the smallest up, must be the products of the extents.
    expect = unit
    for _ in range(ndim):
        step = -1
        for i in range(ndim):
            if shape[i] != 1 and strides[i] == expect:
                step = shape[i]
                break
        if step < 0:
            break
        expect *= step
        if expect == n * unit:
            break
    if expect != n * unit:
        return -1
    h = 1
    for i in range(ndim):
        if shape[i] != 1:
            h = hd_mix(h, <uint64_t> (strides[i] // unit))
    b.strides = h
    return 0


include "buffer/dtypes.pxi"
include "buffer/refusals.pxi"


cdef bint is_negated(object obj) except -1:
    """Whether a tensor's elements are to be negated when they are read."""
    return known_is_neg(obj, NULL) if known_is_neg != NULL and type(obj) is known_type else obj.is_neg()


cdef object fill_dlpack(object obj, hd_buf* b, bint writable, dlpack.tensor_from_object function, str role):
    cdef DLTensor t
    try:
        function(<void*> obj, &t)
    except Exception:
        return refuse(obj, role)
    if t.device.device_type != dlpack.kDLCPU and t.device.device_type != dlpack.kDLCUDAHost:
        return refuse(obj, role)
    b.dtype = dtype_of_dlpack(t.dtype.code, t.dtype.bits, t.dtype.lanes)
    if b.dtype < 0 or (is_byte(b.dtype) and is_packed(obj)):
        return refuse(obj, role)
    # DLPack exports the memory of a lazily negated or conjugated view, which contains other
    # numbers.
    if b.dtype >= HD_FLOAT16 and (is_negated(obj) or (b.dtype >= HD_COMPLEX64 and obj.is_conj())):
        return refuse(obj, role)
    b.ptr = <char*> t.data + t.byte_offset
    if layout_of(b, t.ndim, t.shape, t.strides, 1) < 0:
        raise gaps(role, obj)
    if <uintptr_t> b.ptr < LOW and b.n and nowhere(obj, b):
        return refuse(obj, role)
    return obj


cdef bint is_numpy(object tp):
    global numpy_type
    if tp is not numpy_type:
        if tp.__module__ != "numpy":
            return False
        numpy_type = tp
    return True


cdef object fill_protocol(object obj, hd_buf* b, bint writable, str role):
    cdef Py_buffer view
    cdef int rc
    try:
        # A view blocks resizing, as of a bytearray. An object may make other memory each time it is asked: the view
        # that is kept is the one that is used.
        keep = obj if is_numpy(type(obj)) else memoryview(obj)
        PyObject_GetBuffer(keep, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    except (BufferError, ValueError) as err:
        dtype = getattr(obj, "dtype", None)
        raise TypeError(
            f"{role}: {err}" if dtype is None else
            f"{role} has dtype {dtype}, which cannot be sent ({err}); arrays of numbers and booleans can"
        ) from None
    try:
        if writable and view.readonly:
            raise ValueError(f"{role} is read-only, and this operation writes to it")
        b.dtype = dtype_of_format(view.format, view.itemsize)
        if b.dtype < 0:
            kind = view.format.decode() if view.format != NULL else "unknown"
            raise TypeError(
                f"{role} has elements of format {kind!r} (itemsize {view.itemsize}), which hpcdist does not move"
            )
        b.ptr = <char*> view.buf
        rc = layout_of(b, view.ndim, <int64_t*> view.shape, <int64_t*> view.strides, view.itemsize)
        if rc < 0:
            raise gaps(role, obj)
    finally:
        PyBuffer_Release(&view)
    return keep


cdef object fill_attributes(object obj, hd_buf* b, bint writable, str role):
    """torch before 2.10: no exchange capsule."""
    cdef int64_t shape[64]
    cdef int64_t strides[64]
    cdef int i, ndim = obj.dim()
    torch = sys.modules["torch"]
    name = str(obj.dtype).removeprefix("torch.")
    b.dtype = -1
    for i in range(HD_NDTYPES):
        if hd_dtype_name(i).decode() == name:
            b.dtype = i
    if b.dtype < 0 or obj.layout != torch.strided or obj.device.type != "cpu" or ndim > 64:
        return refuse(obj, role)
    for i in range(ndim):
        shape[i] = obj.shape[i]
        strides[i] = obj.stride(i)
    b.ptr = <char*> <uintptr_t> obj.data_ptr()
    if layout_of(b, ndim, shape, strides, 1) < 0:
        raise gaps(role, obj)
    if <uintptr_t> b.ptr < LOW and b.n and nowhere(obj, b):
        return refuse(obj, role)
    return obj


cdef int read_only(object obj, str role) except -1:
    """DLPack 1.0 marks memory that must not be written to; an older version cannot mark it."""
    cdef DLManagedTensorVersioned* managed
    try:
        capsule = obj.__dlpack__(max_version=(1, 0))
    except TypeError:
        return 0
    if not PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        return 0
    managed = <DLManagedTensorVersioned*> PyCapsule_GetPointer(capsule, b"dltensor_versioned")
    if managed.flags & dlpack.DLPACK_FLAG_BITMASK_READ_ONLY:
        raise ValueError(f"{role} is read-only, and this operation writes to it")
    return 0


cdef object fill_slow(object obj, hd_buf* b, bint writable, str role):
    global known_type, known_function, known_is_neg
    cdef uintptr_t address
    tp = type(obj)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        if tp not in functions:
            if interprets(torch, tp):
                return refuse(obj, role)
            functions[tp] = find_function(tp)
        if obj.layout != torch.strided or obj.is_conj() or obj.is_neg() or obj.device.type == "meta":
            return refuse(obj, role)
        address = functions[tp]
        if address == 0:
            return fill_attributes(obj, b, writable, role)
        known_type = tp
        known_function = <dlpack.tensor_from_object> address
        known_is_neg = hd_no_arguments(tp.is_neg, tp)
        return fill_dlpack(obj, b, writable, known_function, role)
    if PyObject_CheckBuffer(obj):
        refuse_masked(obj, role)
        return fill_protocol(obj, b, writable, role)
    if hasattr(obj, "__dlpack__"):
        import torch
        try:
            if writable:
                read_only(obj, role)
            view = torch.from_dlpack(obj)
        except ValueError:
            raise
        except Exception as err:
            raise TypeError(f"{role} ({type(obj).__name__}) offers DLPack, but not on the host: {err}") from None
        return fill_slow(view, b, writable, role)
    return refuse(obj, role)


cdef object fill(object obj, hd_buf* b, bint writable, str role):
    # Calls alternate between parameters and tensors: the dictionary has both types, known_type the
    # last one.
    if type(obj) is known_type:
        return fill_dlpack(obj, b, writable, known_function, role)
    if type(obj) is numpy_type:
        return fill_protocol(obj, b, writable, role)
    return fill_slow(obj, b, writable, role)


cdef int fill_plain(object obj, hd_buf* b, bint writable, int kind) except -2:
    """A dense tensor on a device that needs no further checks: the index of the device; -1 for any other."""
    cdef DLTensor t
    try:
        function_on_device(<void*> obj, &t)
    except Exception:
        return -1
    b.dtype = dtype_of_dlpack(t.dtype.code, t.dtype.bits, t.dtype.lanes)
    if t.device.device_type != kind or b.dtype < 0 or (is_byte(b.dtype) and is_packed(obj)):
        return -1
    if b.dtype >= HD_FLOAT16 and (obj.is_neg() or (b.dtype >= HD_COMPLEX64 and obj.is_conj())):
        return -1
    b.ptr = <char*> t.data + t.byte_offset
    if layout_of(b, t.ndim, t.shape, t.strides, 1) < 0 or (<uintptr_t> b.ptr < LOW and b.n and nowhere(obj, b)):
        return -1
    return t.device.device_id


cdef int fill_device(object obj, hd_buf* b, bint writable, int kind, str name, str role) except -1:
    cdef int index
    # memory of the host says nothing of the device that a test's tensor is on; torch asked for the type costs 0.3 us
    if type(obj) is known_on_device and (kind != dlpack.kDLCPU or obj.device is known_device):
        index = fill_plain(obj, b, writable, kind)
        if index >= 0:
            return index
    return fill_device_slow(obj, b, writable, kind, name, role)


cdef int fill_device_slow(object obj, hd_buf* b, bint writable, int kind, str name, str role) except -1:
    global known_on_device, function_on_device, known_device
    cdef DLTensor t
    cdef uintptr_t address
    torch = sys.modules.get("torch")
    tp = type(obj)
    if torch is None or not isinstance(obj, torch.Tensor):
        raise TypeError(f"{role} is a {tp.__name__}; this process group moves torch tensors on {name} only")
    if interprets(torch, tp) or obj.layout != torch.strided or obj.is_conj() or obj.is_neg() or (
        obj.device.type != name
    ):
        refuse(obj, role, name)
    if tp not in functions:
        functions[tp] = find_function(tp)
    address = functions[tp]
    if address == 0:
        raise TypeError(f"{role}: torch 2.10 or newer is needed for tensors on {name}, this is {torch.__version__}")
    (<dlpack.tensor_from_object> address)(<void*> obj, &t)
    if t.device.device_type != kind:
        raise ValueError(f"{role} is on {obj.device}, in memory that this process group does not move")
    b.dtype = dtype_of_dlpack(t.dtype.code, t.dtype.bits, t.dtype.lanes)
    if b.dtype < 0 or (is_byte(b.dtype) and is_packed(obj)):
        refuse(obj, role, name)
    b.ptr = <char*> t.data + t.byte_offset
    if layout_of(b, t.ndim, t.shape, t.strides, 1) < 0:
        raise gaps(role, obj)
    if <uintptr_t> b.ptr < LOW and b.n and nowhere(obj, b):
        refuse(obj, role, name)
    known_on_device = tp
    function_on_device = <dlpack.tensor_from_object> address
    known_device = obj.device
    return t.device.device_id


# ---- the timeout of one call ----

cdef extern from *:
    """
    static __thread double hd_limit;
    """
    double hd_limit


cdef double call_limit() noexcept nogil:
    return hd_limit


class limited:
    """Give the operations that this thread begins in the block their own timeout, in seconds.

    Other threads, and the group, keep theirs. A number that is not positive has no effect.
    """

    __slots__ = ("_before", "_seconds")

    def __init__(self, double seconds):
        self._seconds = seconds

    def __enter__(self):
        global hd_limit
        self._before = hd_limit
        if self._seconds > 0:
            hd_limit = self._seconds

    def __exit__(self, kind, error, trace):
        global hd_limit
        hd_limit = self._before


def limit():
    """Seconds that the surrounding :class:`limited` sets; 0 if there is none."""
    return hd_limit


def describe(obj):
    """Shows the engine's view of a buffer; for tests and curious users.

    Parameters
    ----------
    obj : torch.Tensor, numpy.ndarray or buffer
        Anything an operation accepts.

    Returns
    -------
    dict
        ``pointer`` (int), ``elements``, ``dtype`` (name), ``shape`` (at most 8 dimensions) and ``contiguous``.

    Raises
    ------
    TypeError, ValueError
        As an operation would.
    """
    cdef hd_buf b
    keep = fill(obj, &b, False, "tensor")
    del keep
    return {
        "pointer": <uintptr_t> b.ptr,
        "elements": b.n,
        "dtype": hd_dtype_name(b.dtype).decode(),
        "shape": tuple(b.dims[i] for i in range(min(b.ndim, HD_MAX_DIMS))),
        "contiguous": b.strides == 0,
    }


def unreadable(obj):
    """Why a torch tensor on the host has no memory that could be read.

    Parameters
    ----------
    obj : torch.Tensor
        Of any strides.

    Returns
    -------
    str or None
        The end of a sentence about it; None if it has memory.
    """
    torch = sys.modules["torch"]
    if not (interprets(torch, type(obj)) or obj.is_nested):  # torch warns of the address of a FakeTensor
        try:
            if <uintptr_t> obj.data_ptr() >= LOW:
                return None
        except RuntimeError:  # it has none
            pass
    why = without_memory(torch, obj)
    if why is None and obj.layout != torch.strided:
        why = f"is a {obj.layout} tensor; pass a dense one, e.g. its to_dense()"
    return why
