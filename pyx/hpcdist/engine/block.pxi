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
    block.rank = comm.c.rank
    j.dtype = HD_UINT8
    j.ndim = 1
    j.dims[0] = j.count = nbytes
    j.layout = hd_mix(1, <uint64_t> nbytes)
    j.made = &block.b
    run(comm, &j, False, block, None)
    return block if block.b != NULL else None


cdef bint holds(Comm comm, object tensor) except -1:
    """See Comm.shares."""
    cdef hd_buf b
    check_alive(comm)
    keep = fill(tensor, &b, False, "tensor")
    return hd_block_holds(comm.c, b.ptr, b.n * <int64_t> hd_itemsize(b.dtype))
