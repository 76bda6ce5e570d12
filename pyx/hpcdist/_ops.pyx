"""Reduce operations, which element types they take, and the kernels on this process's own memory.

Independent of MPI. ``_engine`` contains a second copy of the same kernels, tied to MPI:
:func:`force_isa` has no effect there, while ``HPCDIST_SIMD`` governs both. All functions are local
to this process.
"""

cimport cython

import math
import warnings

from libc.stdint cimport int64_t, uintptr_t

cdef extern from "hd_types.h" nogil:
    enum:
        HD_NDTYPES
        HD_NOPS
        HD_PREMUL_SUM
    size_t hd_itemsize(int dtype)
    const char *hd_dtype_name(int dtype)
    const char *hd_op_name(int op)
    const char *hd_op_refusal(int op, int dtype)

cdef extern from "hd_kernels.h" nogil:
    ctypedef void (*hd_reduce_fn)(const void *one, const void *other, void *result, int64_t n)
    hd_reduce_fn hd_reduce_kernel(int op, int dtype)
    int hd_scale_div(void *buf, int64_t n, int dtype, int64_t divisor)
    int hd_scale_mul(void *dst, const void *src, int64_t n, int dtype, double factor)
    const char *hd_kernels_isa()
    int hd_kernels_force(const char *isa)
    int hd_kernels_available(const char *isa)
    int hd_kernels_env_ignored()


# Element types by code, and instruction sets by preference.
DTYPE_NAMES = tuple([hd_dtype_name(code).decode() for code in range(HD_NDTYPES)])
_DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
_OP_CODES = {hd_op_name(code).decode(): code for code in range(HD_NOPS)}
_ISAS = ("avx512", "avx2", "neon", "scalar")


_MEMBERS = {}


cdef ReduceOp _make(int code, double factor):
    cdef ReduceOp made = ReduceOp.__new__(ReduceOp)
    made.code = code
    made.factor = factor
    return made


def _member(name):
    return _MEMBERS.setdefault(name, _make(_OP_CODES[name], 1.0))


def _restore(name, factor):
    return _member(name) if factor == 1.0 else _make(_OP_CODES[name], factor)


def _premul_sum(factor):
    try:
        value = float(factor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"the factor of PREMUL_SUM must be a number or a tensor of one element, not {factor!r}"
        ) from error
    if not math.isfinite(value):
        raise ValueError(f"the factor of PREMUL_SUM must be finite, not {value!r}")
    return _restore("PREMUL_SUM", value)


@cython.final
cdef class ReduceOp:
    """How a reduction combines the values of the ranks.

    The members are ``SUM``, ``AVG``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR``, ``BXOR`` and
    ``PREMUL_SUM``; ``ReduceOp.PREMUL_SUM(factor)`` multiplies every rank's values by `factor`
    before they are summed. Instances never change, compare by value, can be dictionary keys and
    can be pickled.

    Parameters
    ----------
    op : ReduceOp, str, torch.distributed.ReduceOp or torch.distributed.ReduceOp.RedOpType
        What to convert; a string is a member's name in either case, such as ``"sum"``.

    Attributes
    ----------
    name : str
        Such as ``"SUM"``.
    code : int
        0 to 8 in the order above, which is that of torch's ``RedOpType``.
    factor : float
        The multiplier of ``PREMUL_SUM``, rounded to float32 for anything narrower than float64; 1.0
        for every other operation.

    Notes
    -----
    A local value: making or converting one involves no other rank. Names and semantics are those of
    ``torch.distributed.ReduceOp``. On bool, SUM, MAX and BOR mean *or*; PRODUCT, MIN and BAND mean
    *and*; BXOR means *xor*. In MIN and MAX of floats NaN wins, and -0.0 is less than 0.0.
    """

    def __init__(self, op):
        cdef ReduceOp known = as_reduce_op(op)
        self.code = known.code
        self.factor = known.factor

    @property
    def name(self):
        """The operation's name, such as ``"SUM"``."""
        return hd_op_name(self.code).decode()

    def __call__(self, factor):
        """A PREMUL_SUM with this factor.

        Parameters
        ----------
        factor : float
            A finite number, or a tensor of one element, that multiplies every rank's values.

        Returns
        -------
        ReduceOp

        Raises
        ------
        TypeError
            For any other operation than PREMUL_SUM, or a factor that is not a number.
        ValueError
            For a factor that is infinite or NaN.
        """
        if self.code != HD_PREMUL_SUM:
            raise TypeError(f"{self!r} takes no factor; only ReduceOp.PREMUL_SUM(factor) does")
        return _premul_sum(factor)

    def __repr__(self):
        if self.code == HD_PREMUL_SUM and self.factor != 1.0:
            return f"ReduceOp.PREMUL_SUM({self.factor!r})"
        return f"ReduceOp.{self.name}"

    def __eq__(self, other):
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self.code == (<ReduceOp>other).code and self.factor == (<ReduceOp>other).factor

    def __hash__(self):
        return hash((self.code, self.factor))

    def __reduce__(self):
        return _restore, (self.name, self.factor)

    SUM = _member("SUM")
    AVG = _member("AVG")
    PRODUCT = _member("PRODUCT")
    MIN = _member("MIN")
    MAX = _member("MAX")
    BAND = _member("BAND")
    BOR = _member("BOR")
    BXOR = _member("BXOR")
    PREMUL_SUM = _member("PREMUL_SUM")


cdef ReduceOp as_reduce_op(object op):
    """Converts `op` to one of ours; the most common case, one of ours already, costs nothing."""
    if isinstance(op, ReduceOp):
        return <ReduceOp>op
    if isinstance(op, str):
        name = (<str>op).upper()
    else:
        # torch has RedOpType (ReduceOp.SUM) and ReduceOp around it (for PREMUL_SUM's factor).
        # Recognised by their names, so that torch need not be imported.
        if type(op).__name__ == "ReduceOp" and hasattr(op, "op"):
            if op.op.name == "PREMUL_SUM":
                return _premul_sum(op.__getstate__()[1])
            op = op.op
        name = op.name if type(op).__name__ == "RedOpType" else None
    if name not in _OP_CODES:
        known = ", ".join([f"ReduceOp.{member}" for member in _OP_CODES])
        raise TypeError(f"{op!r} is not a reduce operation; use one of {known}")
    return _member(name)


cdef int _dtype_code(object dtype) except -1:
    if isinstance(dtype, str):
        if dtype in _DTYPE_CODES:
            return _DTYPE_CODES[dtype]
    elif isinstance(dtype, int) and 0 <= dtype < HD_NDTYPES:
        return dtype
    raise ValueError(f"{dtype!r} is no element type; use a code below {HD_NDTYPES} or one of "
                     f"{', '.join(DTYPE_NAMES)}")


def op_refusal(op, dtype):
    """Why this operation does not reduce this element type, by the table of the public surface.

    Parameters
    ----------
    op : ReduceOp
        Or anything :class:`ReduceOp` converts.
    dtype : int or str
        Code or name of an element type; see ``hpcdist.dtypes``.

    Returns
    -------
    str or None
        A sentence that says why and what to do instead; None if the combination is supported.

    Raises
    ------
    TypeError
        If `op` is not a reduce operation.
    ValueError
        If `dtype` is not an element type.
    """
    cdef const char *why = hd_op_refusal(as_reduce_op(op).code, _dtype_code(dtype))
    return None if why == NULL else why.decode()


def op_supported(op, dtype):
    """Whether every collective that reduces takes this operation on this element type.

    Parameters and errors are those of :func:`op_refusal`.
    """
    return op_refusal(op, dtype) is None


cdef int64_t _count(const unsigned char[::1] buf, int dtype) except -1:
    cdef int64_t itemsize = <int64_t>hd_itemsize(dtype)
    if buf.shape[0] % itemsize:
        raise ValueError(f"{buf.shape[0]} bytes are no whole number of {DTYPE_NAMES[dtype]}, "
                         f"of {itemsize} bytes each")
    return buf.shape[0] // itemsize


cdef int _check_pair(unsigned char[::1] written, const unsigned char[::1] read,
                     bint same_allowed) except -1:
    cdef uintptr_t a, b, nbytes = written.shape[0]
    if written.shape[0] != read.shape[0]:
        raise ValueError(f"the buffers differ in size: {written.shape[0]} and {read.shape[0]} "
                         "bytes")
    if nbytes == 0:
        return 0
    a = <uintptr_t>&written[0]
    b = <uintptr_t>&read[0]
    if a == b and same_allowed:
        return 0
    if a < b + nbytes and b < a + nbytes:
        raise ValueError("the buffers overlap")
    return 0


def reduce_into(unsigned char[::1] result not None, const unsigned char[::1] one not None,
                dtype, op, other=None):
    """Combine two buffers of this process element by element, as one step of a reduction does.

    Runs without the GIL.

    Parameters
    ----------
    result : buffer of uint8
        Receives ``one op other``; contiguous, at any alignment.
    one : buffer of uint8
        As many bytes; does not overlap `result`.
    dtype : int or str
        Code or name of the element type of the bytes.
    op : ReduceOp
        AVG and PREMUL_SUM add; their scaling is :func:`scale_div` and :func:`scale_mul`.
    other : buffer of uint8, optional
        As `one`; `result` itself, whose bytes are replaced, if it is not given.

    Raises
    ------
    TypeError
        If the operation does not take the element type; the message says why.
    ValueError
        If the sizes differ or are not multiples of the element size, or the buffers overlap.
    """
    cdef int code = _dtype_code(dtype)
    cdef ReduceOp how = as_reduce_op(op)
    cdef int64_t n = _count(result, code)
    cdef const unsigned char[::1] second = result if other is None else other
    _check_pair(result, one, False)
    _check_pair(result, second, other is None)
    cdef hd_reduce_fn kernel = hd_reduce_kernel(how.code, code)
    if kernel == NULL:
        raise TypeError(op_refusal(how, code))
    if n:
        with nogil:
            kernel(&one[0], &second[0], &result[0], n)


def scale_div(unsigned char[::1] buf not None, dtype, int64_t divisor):
    """Divide every element of a buffer, as AVG does by the number of ranks.

    Runs without the GIL.

    Parameters
    ----------
    buf : buffer of uint8
        Divided in place; contiguous, at any alignment.
    dtype : int or str
        Code or name of the element type. Integers truncate towards zero; float16 and bfloat16 are
        divided in float32 and rounded once.
    divisor : int
        1 or more.

    Raises
    ------
    TypeError
        If AVG does not take the element type.
    ValueError
        If `divisor` is below 1 or the size is not a multiple of the element size.
    """
    cdef int code = _dtype_code(dtype)
    cdef int64_t n = _count(buf, code)
    if divisor < 1:
        raise ValueError(f"the divisor must be 1 or more, not {divisor}")
    why = op_refusal(ReduceOp.AVG, code)
    if why is not None:
        raise TypeError(why)
    if n:
        with nogil:
            hd_scale_div(&buf[0], n, code, divisor)


def scale_mul(unsigned char[::1] dst not None, const unsigned char[::1] src not None, dtype,
              double factor):
    """Multiply every element of a buffer, as PREMUL_SUM does before it adds.

    Runs without the GIL.

    Parameters
    ----------
    dst : buffer of uint8
        Receives ``src * factor``; contiguous, at any alignment.
    src : buffer of uint8
        As many bytes; `dst` itself, or without overlap.
    dtype : int or str
        Code or name of the element type. All but float64 and complex128 multiply in float32, by
        the factor rounded to float32.
    factor : float
        The multiplier.

    Raises
    ------
    TypeError
        If PREMUL_SUM does not take the element type.
    ValueError
        If the sizes differ or are not multiples of the element size, or the buffers partly overlap.
    """
    cdef int code = _dtype_code(dtype)
    cdef int64_t n = _count(dst, code)
    _check_pair(dst, src, True)
    why = op_refusal(ReduceOp.PREMUL_SUM, code)
    if why is not None:
        raise TypeError(why)
    if n:
        with nogil:
            hd_scale_mul(&dst[0], &src[0], n, code, factor)


def kernel_isa():
    """The instruction set this module's kernels use.

    Returns
    -------
    str
        ``"avx512"``, ``"avx2"``, ``"neon"`` or ``"scalar"``: the best this machine has, unless
        ``HPCDIST_SIMD`` was set to another when hpcdist was imported.
    """
    return hd_kernels_isa().decode()


def available_isas():
    """The instruction sets that this build and this processor both have.

    Returns
    -------
    tuple of str
        Widest first; the last is always ``"scalar"``.
    """
    return tuple([isa for isa in _ISAS if hd_kernels_available(isa.encode())])


def force_isa(name):
    """Make this module's kernels use another instruction set. For tests.

    All instruction sets give the same bits.

    Parameters
    ----------
    name : str
        One of :func:`available_isas`, or ``"auto"`` to choose again.

    Raises
    ------
    ValueError
        If this build or this processor does not have it.
    """
    if hd_kernels_force(str(name).encode()) != 0:
        raise ValueError(f"{name!r} is not among the instruction sets of this build and processor: "
                         f"{', '.join(available_isas())}")


if hd_kernels_env_ignored():
    warnings.warn(
        "HPCDIST_SIMD names an instruction set that this build or processor does not have; using "
        f"{kernel_isa()}. It may be: auto, {', '.join(available_isas())}",
        RuntimeWarning,
        stacklevel=2,
    )
