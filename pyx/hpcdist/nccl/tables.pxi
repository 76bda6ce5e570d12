# NCCL's numbers, its errors as exceptions, and how it handles hpcdist's element types and
# operations.

# ncclDataType_t and ncclRedOp_t
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = range(12)
SUM, PROD, MAX, MIN, AVG = range(5)
#: Bytes of an element, by ncclDataType_t.
ITEMSIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
_FORMATS = {FLOAT16: "<e", FLOAT32: "<f", FLOAT64: "<d"}
#: hpcdist's element types that NCCL has; it can only move the others, as bytes.
_NATIVE = {
    HD_INT8: INT8, HD_UINT8: UINT8, HD_INT32: INT32, HD_UINT32: UINT32, HD_INT64: INT64, HD_UINT64: UINT64,
    HD_FLOAT16: FLOAT16, HD_FLOAT32: FLOAT32, HD_FLOAT64: FLOAT64, HD_BFLOAT16: BFLOAT16,
    HD_FLOAT8_E4M3FN: FLOAT8_E4M3, HD_FLOAT8_E5M2: FLOAT8_E5M2,
}
_OPS = {HD_SUM: SUM, HD_AVG: AVG, HD_PRODUCT: PROD, HD_MIN: MIN, HD_MAX: MAX}
#: For bool, as bytes of 0 and 1: or is the maximum, and is the minimum.
_LOGICAL = {"SUM": MAX, "MAX": MAX, "BOR": MAX, "PRODUCT": MIN, "MIN": MIN, "BAND": MIN}
_PREMUL_KEPT = 64

_NAMES = {
    HD_NCCL_CUDA: "ncclUnhandledCudaError", HD_NCCL_SYSTEM: "ncclSystemError", HD_NCCL_INTERNAL: "ncclInternalError",
    HD_NCCL_ARGUMENT: "ncclInvalidArgument", HD_NCCL_USAGE: "ncclInvalidUsage", HD_NCCL_REMOTE: "ncclRemoteError",
    HD_NCCL_IN_PROGRESS: "ncclInProgress",
}
_ADVICE = {
    HD_NCCL_CUDA: "CUDA refused: is there a GPU, is the driver as new as this NCCL needs, has an earlier kernel failed?",
    HD_NCCL_SYSTEM: "The system refused: NCCL_DEBUG=INFO shows which call; often the network interface "
                    "(NCCL_SOCKET_IFNAME), /dev/shm or the limit on locked memory.",
    HD_NCCL_INTERNAL: "NCCL_DEBUG=INFO shows more.",
    HD_NCCL_ARGUMENT: "NCCL_DEBUG=WARN shows which argument.",
    HD_NCCL_USAGE: "Usually two ranks on one GPU (give each its own: torch.cuda.set_device(local_rank)) or ranks "
                   "that called different operations; NCCL_DEBUG=WARN shows which.",
    HD_NCCL_REMOTE: "Another rank died or its network failed; look at the other ranks' output.",
}


def failure(what, code, said=""):
    """The exception of an NCCL error.

    Parameters
    ----------
    what : str
        The call, with the place that made it.
    code : int
        An ncclResult_t.
    said : str
        The text of ``ncclGetLastError``.

    Returns
    -------
    DistBackendError or RankFailedError
        The latter for ncclRemoteError.
    """
    text = functions().error_string(code)
    short = text.decode("utf-8", "replace") if text != NULL else "?"
    kind = RankFailedError if code == HD_NCCL_REMOTE else DistBackendError
    detail = f". NCCL says: {said.strip()}" if said.strip() else ""
    advice = _ADVICE.get(code, "")
    name = _NAMES.get(code, "ncclResult_t")
    return kind(f"{what} failed: {short} ({name}, {code}){detail}. {advice}".rstrip(". ") + ".")


cdef str last_words(ncclComm_t comm):
    cdef const char* text = functions().last_error(comm)
    return text.decode("utf-8", "replace") if text != NULL else ""


def reduction(int dtype, int op):
    """How NCCL reduces an element type of hpcdist.

    Parameters
    ----------
    dtype : int
        hpcdist's code of the element type.
    op : int
        Code of the ReduceOp.

    Returns
    -------
    tuple of int
        ncclDataType_t, NCCL elements per element of ours (2 for complex), and ncclRedOp_t; -1 in
        place of the latter for PREMUL_SUM, whose operation is made with
        :meth:`Communicator.premul_sum`.

    Raises
    ------
    TypeError
        If NCCL cannot; the text says what to do.
    """
    name = hd_dtype_name(dtype).decode()
    how = hd_op_name(op).decode()
    lanes = 1
    if dtype == HD_BOOL:
        if how not in _LOGICAL:
            raise TypeError(f"NCCL has no {how} of bool; convert to uint8 or int32 first")
        return UINT8, 1, _LOGICAL[how]
    if dtype in (HD_COMPLEX64, HD_COMPLEX128):
        if op not in (HD_SUM, HD_AVG, HD_PREMUL_SUM):
            raise TypeError(f"there is no {how} of {name}: complex numbers have SUM, AVG and PREMUL_SUM")
        dtype = HD_FLOAT32 if dtype == HD_COMPLEX64 else HD_FLOAT64
        lanes = 2
    if dtype not in _NATIVE:
        raise TypeError(f"NCCL does not reduce {name}; convert to a wider type first, for example int32 or float32")
    if op == HD_PREMUL_SUM:
        if dtype not in (HD_FLOAT16, HD_BFLOAT16, HD_FLOAT32, HD_FLOAT64):
            raise TypeError(f"PREMUL_SUM takes floats and complex numbers, not {name}")
        return _NATIVE[dtype], lanes, -1
    if op not in _OPS:
        raise TypeError(f"NCCL has no bitwise operations ({how}); MPI does them on the host")
    return _NATIVE[dtype], lanes, _OPS[op]


def movement(int dtype):
    """How NCCL moves an element type of hpcdist: as itself, or as bytes.

    Parameters
    ----------
    dtype : int
        hpcdist's code of the element type.

    Returns
    -------
    tuple of int
        ncclDataType_t, and NCCL elements per element of ours.
    """
    if dtype in _NATIVE and hd_itemsize(dtype) > 1:
        return _NATIVE[dtype], 1
    return UINT8, <int> hd_itemsize(dtype)
