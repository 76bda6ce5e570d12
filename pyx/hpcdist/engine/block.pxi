# Memory for tensors that all ranks of a node map.

cdef class Block:
    """This rank's part of a block of node memory, as a buffer of bytes; made by :meth:`Comm.share`.

    The tensor on it keeps it alive, also beyond the end of the group.
    """

    cdef hd_block* b
    cdef readonly int64_t nbytes
    cdef object __weakref__

    def __init__(self):
        raise TypeError("use Comm.share")

    def __dealloc__(self):
        if self.b != NULL:
            hd_block_return(self.b)

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, <void*> hd_block_part(self.b, self.rank), self.nbytes, 0, flags)

    cdef int rank

    def __repr__(self):
        return f"<hpcdist._engine.Block of {self.nbytes} bytes>"


cdef object share_block(Comm comm, int64_t nbytes, object api):
    """See Comm.share."""
    cdef hd_job j
    cdef Block block = Block.__new__(Block)
    if nbytes < 0:
        raise ValueError(f"a tensor of {nbytes} bytes")
    block.nbytes = nbytes
    begin(&j, comm, HD_BARRIER, api_named(api, SHARE))
    j.api_hash = SHARE.hash  # what a rank writes there first is its own affair
    block.rank = comm.c.rank
    j.dtype = HD_UINT8
    j.ndim = 1
    j.dims[0] = j.count = nbytes
    j.layout = hd_mix(1, <uint64_t> nbytes)
    j.new_block = &block.b
    run(comm, &j, False, block, None)
    return block if block.b != NULL else None


cdef object place_of(Comm comm, object tensor):
    """See Comm.place."""
    cdef hd_buf b
    cdef hd_spot spot
    check_alive(comm)
    keep = fill(tensor, &b, False, "tensor")
    if not hd_block_holds(comm.c, b.ptr, b.n * <int64_t> hd_itemsize(b.dtype), &spot):
        return None
    return spot.block, spot.at


cdef class Part:
    """Bytes of a rank's part of a block, as a buffer; made by :meth:`Comm.part`. It keeps the memory mapped."""

    cdef hd_block* b
    cdef int rank
    cdef int64_t at
    cdef readonly int64_t nbytes

    def __init__(self):
        raise TypeError("use Comm.part")

    def __dealloc__(self):
        if self.b != NULL:
            hd_block_unref(self.b)

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, hd_block_part(self.b, self.rank) + self.at, self.nbytes, 0, flags)

    @property
    def whole(self):
        """bool: whether the rank still has its tensor there; not after an operation on it that failed."""
        return bool(hd_block_whole(self.b, self.rank))


cdef Part part_of(Comm comm, int rank, uint64_t block, int64_t at, int64_t nbytes):
    """See Comm.part."""
    cdef Part part = Part.__new__(Part)
    check_alive(comm)
    root_in_range(comm, rank, "rank")
    part.b = hd_block_ref(comm.c, block)
    if part.b == NULL:
        raise DistBackendError(f"there is no block {block} in group '{comm.name}'")
    part.rank, part.at, part.nbytes = rank, at, nbytes
    return part


cdef int combines(hd_job* j, hd_buf* from_, object op) except -1:
    """What is combined with a window's memory, and how."""
    subject(j, from_, False)
    reduces(j, as_reduce_op(op))
    if j.redop in (HD_AVG, HD_PREMUL_SUM) or hd_reduce_kernel(j.redop, j.dtype) == NULL:
        raise TypeError(f"accumulate has no {op!r} of {hd_dtype_name(j.dtype).decode()}")
    return 0


cdef int accumulate_into(Comm comm, Part part, object target, object source, object op, object seconds) except -1:
    """See Comm.accumulate."""
    cdef hd_job j
    cdef hd_buf to, from_
    cdef int code, rank = -1
    cdef hd_block* block = NULL
    check_alive(comm)
    begin(&j, comm, HD_BARRIER, ACCUMULATE)
    keep = fill(target, &to, True, "target"), fill(source, &from_, False, "tensor")
    combines(&j, &from_, op)
    if seconds is not None:
        j.timeout = seconds_of(seconds)
    if from_.n == 0:
        return 0
    if part is not None:
        block, rank = part.b, part.rank
    enter(comm.c, True)
    with nogil:
        code = hd_block_accumulate(comm.c, &j, block, rank, from_.ptr, to.ptr, from_.n)
        hd_comm_exit(comm.c)
    return 0 if code == HD_OK else raise_error_of(&j, code)


cdef int refuse_withdrawn_rank(Comm comm, int rank, object api) except -1:
    """See Comm.refuse_withdrawn."""
    cdef hd_job j
    cdef bint withdrawn
    check_alive(comm)
    enter(comm.c, True)
    try:
        withdrawn = hd_peer_has_withdrawn(comm.c, rank)
        if withdrawn:
            begin(&j, comm, HD_BARRIER, api_named(api, ACCUMULATE))
            hd_peer_withdrawn(&j, rank)
    finally:
        hd_comm_exit(comm.c)
    return raise_error_of(&j, j.code) if withdrawn else 0


cdef int refuse_nan_in(Comm comm, object tensor, object api) except -1:
    """See Comm.refuse_nan."""
    cdef hd_job j
    cdef hd_buf b
    if not hd_nan_wanted:
        return 0
    check_alive(comm)
    begin(&j, comm, HD_BARRIER, api_named(api, ACCUMULATE))
    try:
        keep = fill(tensor, &b, False, "tensor")
    except TypeError:  # a dtype that only windows move
        return 0
    subject(&j, &b, False)
    reads(&j, &b)
    j.inline_ = 1
    j.site_id = site_here()
    if hd_nan_fail_alone(&j, b"nothing was written"):
        raise_error_of(&j, j.code)
    return 0
