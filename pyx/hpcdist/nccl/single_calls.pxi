# The operations that training calls most, from the tensor to NCCL without Python in between.

cdef struct way:
    signed char known    # whether it has been looked up
    signed char kind     # ncclDataType_t
    signed char lanes    # NCCL elements per element of hpcdist
    signed char how      # ncclRedOp_t, or -1 for PREMUL_SUM

cdef way ways[32][16]


cdef way* way_of(int dtype, int op) except NULL:
    """As :func:`reduction`, which raises for what NCCL cannot do."""
    cdef way* found = &ways[dtype][op]
    if not found.known:
        found.kind, found.lanes, found.how = reduction(dtype, op)
        found.known = 1
    return found


cdef bint on_host(object array, object api):
    """Whether this is an exchange of hpcdist's own: it has a name, and is a NumPy array."""
    return api is not None and type(array).__module__ == "numpy"


cdef int equal(str api, hd_buf* a, hd_buf* b, int index, int other) except -1:
    if a.dtype != b.dtype:
        raise ValueError(f"{api}: output and input must have one dtype, and have 2")
    if index != other:
        raise ValueError(f"{api}: the tensors are on several devices: {index}, {other}")
    return 0


cdef int fits(str api, int64_t found, int64_t wanted, str what) except -1:
    if found != wanted:
        raise ValueError(f"{api}: {what} has {found} elements, and needs {wanted}")
    return 0


cdef int in_order(str api, hd_buf* b, str what) except -1:
    """Only in C order do the blocks of different ranks lie one behind the other."""
    if b.strides:
        raise ValueError(f"{api}: {what} must be C-contiguous, because its blocks are; pass {what}.contiguous()")
    return 0


cdef int in_own_block(str api, hd_buf* block, hd_buf* whole, int rank) except -1:
    """In the tensor of all ranks' blocks, NCCL accepts one rank's block only in its own place."""
    cdef size_t item = hd_itemsize(block.dtype)
    cdef char* at = <char*> block.ptr
    cdef char* begin = <char*> whole.ptr
    if at < begin + whole.n * item and begin < at + block.n * item and at != begin + rank * block.n * item:
        raise ValueError(
            f"{api}: input and output overlap in memory, and not where this rank's block belongs; pass separate tensors"
        )
    return 0


cdef class SingleCalls:
    """The operations that are one NCCL call each, on a group's queue.

    Parameters
    ----------
    queue : StreamQueue
        Starts them.
    stage : callable
        ``stage(queue, call, arrays, written, *rest, async_op, api, extra)`` runs an operation on
        copies of arrays of the host.
    """

    cdef readonly StreamQueue queue
    cdef object stage

    def __init__(self, StreamQueue queue not None, stage):
        self.queue = queue
        self.stage = stage

    def all_reduce(self, tensor, op=ReduceOp.SUM, object async_op=False, *, api=None, extra=0):
        """Reduce over all ranks, in place on each."""
        cdef StreamQueue queue = self.queue
        cdef hd_buf b
        cdef one_call c
        cdef way* w
        cdef int index
        cdef ReduceOp known = as_reduce_op(op)
        if on_host(tensor, api):
            return self.stage(queue, self.all_reduce, [tensor], [tensor], op, async_op=async_op, api=api, extra=extra)
        name = "all_reduce" if api is None else api
        index = fill_device(tensor, &b, True, queue.memory, queue.device_type, "all_reduce: tensor")
        w = way_of(b.dtype, known.code)
        c.kind = ALL_REDUCE_CALL
        c.send = c.recv = b.ptr
        c.count = b.n * w.lanes
        c.dtype = w.kind
        c.how = w.how
        describe(&c.about, HD_ALL_REDUCE, b.dtype, known.code, -1, b.n, b.n, b.n)
        facts = (known, b.n, b.dtype, extra, b.shape, b.strides) if queue.compare is not None else None
        return queue.one(name, index, &c, tensor, tensor, async_op, facts, known.factor if w.how < 0 else None)

    def broadcast(self, tensor, int root, object async_op=False, *, api=None, extra=0):
        """Copy root's tensor to all ranks."""
        cdef StreamQueue queue = self.queue
        cdef hd_buf b
        cdef one_call c
        cdef int index
        if on_host(tensor, api):
            return self.stage(queue, self.broadcast, [tensor], [tensor], root, async_op=async_op, api=api, extra=extra)
        name = "broadcast" if api is None else api
        index = fill_device(tensor, &b, True, queue.memory, queue.device_type, "broadcast: tensor")
        kind, lanes = movement(b.dtype)
        c.kind = BROADCAST_CALL
        c.send = c.recv = b.ptr
        c.count = b.n * <int> lanes
        c.dtype = kind
        c.how = root
        describe(&c.about, HD_BROADCAST, b.dtype, -1, root, b.n, b.n, b.n)
        facts = (b.n, b.dtype, root, extra, b.shape, b.strides) if queue.compare is not None else None
        return queue.one(name, index, &c, tensor, tensor, async_op, facts, None)

    def all_gather_into_tensor(self, output, input, object async_op=False, *, api=None, extra=0):
        """Collect one tensor of each rank, of equal sizes, into one."""
        cdef StreamQueue queue = self.queue
        cdef hd_buf out, own
        cdef one_call c
        cdef int index, other
        if on_host(output, api):
            return self.stage(queue, self.all_gather_into_tensor, [output, input], [output], async_op=async_op,
                              api=api, extra=extra)
        name = "all_gather_into_tensor" if api is None else api
        index = fill_device(output, &out, True, queue.memory, queue.device_type, "all_gather_into_tensor: output")
        other = fill_device(input, &own, False, queue.memory, queue.device_type, "all_gather_into_tensor: input")
        equal(name, &out, &own, index, other)
        fits(name, out.n, own.n * queue.size, "output")
        in_order(name, &out, "output")
        in_order(name, &own, "input")
        in_own_block(name, &own, &out, queue.rank)
        kind, lanes = movement(own.dtype)
        c.kind = ALL_GATHER_CALL
        c.send = own.ptr
        c.recv = out.ptr
        c.count = own.n * <int> lanes
        c.dtype = kind
        describe(&c.about, HD_ALL_GATHER, own.dtype, -1, -1, own.n, own.n, out.n)
        facts = (own.dtype, own.n, extra, own.shape) if queue.compare is not None else None
        return queue.one(name, index, &c, input, output, async_op, facts, None)

    def reduce_scatter_tensor(self, output, input, op=ReduceOp.SUM, object async_op=False, *, api=None):
        """Reduce one tensor; rank i keeps its i-th part."""
        cdef StreamQueue queue = self.queue
        cdef hd_buf out, whole
        cdef one_call c
        cdef way* w
        cdef int index, other
        cdef ReduceOp known = as_reduce_op(op)
        name = "reduce_scatter_tensor" if api is None else api
        index = fill_device(output, &out, True, queue.memory, queue.device_type, "reduce_scatter_tensor: output")
        other = fill_device(input, &whole, False, queue.memory, queue.device_type, "reduce_scatter_tensor: input")
        equal(name, &out, &whole, index, other)
        fits(name, whole.n, out.n * queue.size, "input")
        in_order(name, &out, "output")
        in_order(name, &whole, "input")
        in_own_block(name, &out, &whole, queue.rank)
        w = way_of(out.dtype, known.code)
        c.kind = REDUCE_SCATTER_CALL
        c.send = whole.ptr
        c.recv = out.ptr
        c.count = out.n * w.lanes
        c.dtype = w.kind
        c.how = w.how
        describe(&c.about, HD_REDUCE_SCATTER, out.dtype, known.code, -1, whole.n, whole.n, out.n)
        facts = (known, out.dtype, out.n, out.shape) if queue.compare is not None else None
        return queue.one(name, index, &c, input, output, async_op, facts, known.factor if w.how < 0 else None)
