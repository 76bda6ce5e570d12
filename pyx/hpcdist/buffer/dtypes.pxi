# The type of an object's elements, by what it says of itself: a number of hd_types.h, or -1.


cdef int dtype_of_dlpack(int code, int bits, int lanes) noexcept:
    if lanes != 1:
        return -1
    if code == dlpack.kDLFloat:
        return HD_FLOAT32 if bits == 32 else HD_FLOAT64 if bits == 64 else HD_FLOAT16 if bits == 16 else -1
    if code == dlpack.kDLBfloat and bits == 16:
        return HD_BFLOAT16
    if code == dlpack.kDLInt:
        return (HD_INT64 if bits == 64 else HD_INT32 if bits == 32 else HD_INT16 if bits == 16
                else HD_INT8 if bits == 8 else -1)
    if code == dlpack.kDLUInt:
        return (HD_UINT8 if bits == 8 else HD_UINT64 if bits == 64 else HD_UINT32 if bits == 32
                else HD_UINT16 if bits == 16 else -1)
    if code == dlpack.kDLBool and bits == 8:
        return HD_BOOL
    if code == dlpack.kDLComplex:
        return HD_COMPLEX64 if bits == 64 else HD_COMPLEX128 if bits == 128 else -1
    if bits == 8:
        if code == dlpack.kDLFloat8_e4m3fn:
            return HD_FLOAT8_E4M3FN
        if code == dlpack.kDLFloat8_e5m2:
            return HD_FLOAT8_E5M2
        if code == dlpack.kDLFloat8_e4m3fnuz:
            return HD_FLOAT8_E4M3FNUZ
        if code == dlpack.kDLFloat8_e5m2fnuz:
            return HD_FLOAT8_E5M2FNUZ
        if code == dlpack.kDLFloat8_e8m0fnu:
            return HD_FLOAT8_E8M0FNU
    return -1


cdef int dtype_of_format(const char* f, Py_ssize_t itemsize) noexcept:
    """A struct-module format of one native element."""
    cdef char c
    if f == NULL:
        return HD_UINT8 if itemsize == 1 else -1
    if f[0] == c'@' or f[0] == c'=' or f[0] == c'<' or f[0] == c'|':
        f += 1
    c = f[0]
    if c == c'Z' and f[1] != 0 and f[2] == 0:
        return HD_COMPLEX64 if f[1] == c'f' else HD_COMPLEX128 if f[1] == c'd' else -1
    if c == 0 or f[1] != 0:
        return -1
    if c == c'?':
        return HD_BOOL
    if c == c'e':
        return HD_FLOAT16
    if c == c'f':
        return HD_FLOAT32
    if c == c'd':
        return HD_FLOAT64
    if c in (c'b', c'h', c'i', c'l', c'q', c'n'):
        return (HD_INT8 if itemsize == 1 else HD_INT16 if itemsize == 2 else HD_INT32 if itemsize == 4
                else HD_INT64)
    if c in (c'B', c'c', c'H', c'I', c'L', c'Q', c'N'):
        return (HD_UINT8 if itemsize == 1 else HD_UINT16 if itemsize == 2 else HD_UINT32 if itemsize == 4
                else HD_UINT64)
    return -1


cdef object known_int8 = None, known_uint8 = None  # torch's


cdef inline bint is_byte(int dtype) noexcept:
    return dtype == HD_INT8 or dtype == HD_UINT8


cdef bint is_packed(object obj) except -1:
    """Whether an element is a part of a byte, as of torch.int4: to DLPack it is the whole byte."""
    global known_int8, known_uint8
    dtype = getattr(obj, "dtype", None)
    if dtype is known_int8 or dtype is known_uint8:
        return False
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        return False
    known_int8, known_uint8 = torch.int8, torch.uint8
    return dtype is not known_int8 and dtype is not known_uint8
