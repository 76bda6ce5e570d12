# Tensors, lists of them and their parts as the segments of a job: helpers of the collectives.


cdef object collect(hd_job* j, list tensors, hd_seg* list, bint writable, str role):
    """A list of tensors of one dtype, and the objects that keep them alive. Its sizes become part of the agreement."""
    cdef hd_buf b
    cdef Py_ssize_t i
    cdef uint64_t h = len(tensors)
    keep = []
    for i in range(len(tensors)):
        keep.append(fill(tensors[i], &b, writable, role))
        if i == 0:
            subject(j, &b, False)
        elif b.dtype != j.dtype:
            raise TypeError(
                f"{role}[{i}] is {hd_dtype_name(b.dtype).decode()}, but {role}[0] is {hd_dtype_name(j.dtype).decode()}"
            )
        list[i].ptr = b.ptr
        list[i].n = b.n
        list[i].form = form_of(&b)
        h = hd_mix(hd_mix(h, b.shape), b.strides)
    j.layout = h
    if writable:
        separate(j, list, len(tensors), role)
    return keep


cdef object reads_apart(hd_job* j, hd_buf* b, bint on_device, object source):
    """What an all_reduce reads instead of its tensor, and what keeps it alive."""
    cdef hd_buf s
    keep = fill(source, &s, False, "source")
    same_dtype(s.dtype, b.dtype, "tensor", "source")
    if s.shape != b.shape or s.strides != b.strides:
        raise ValueError("source and tensor differ in their shapes, or in the order of their elements in memory")
    if on_device:
        raise ValueError("a source apart from the tensor can only be in host memory")
    reads(j, &s)
    return keep


cdef int separate(hd_job* j, hd_seg* list, int n, str role) except -1:
    cdef int one = 0, other = 0
    cdef int found = hd_overlap(list, n, hd_itemsize(j.dtype), &one, &other)
    if found < 0:
        raise MemoryError(f"no memory to look at the {n} tensors of {role}")
    if found:
        raise ValueError(
            f"{role}[{one}] and {role}[{other}] overlap in memory, and both are written to; pass separate tensors"
        )
    return 0


cdef int input_outside_output(hd_job* j, hd_seg* outputs, int nout, hd_own own, str role, str places) except -1:
    """Refuses inputs that lie in outputs where the data could not be moved without a copy."""
    cdef int one = 0, other = 0
    cdef int found = hd_input_in_output(j.in_, j.nin, outputs, nout, hd_itemsize(j.dtype), own, &one, &other)
    if found < 0:
        raise MemoryError(f"no memory to look at the {nout} tensors of {places}")
    if found:
        name = f"{role}[{one}]" if j.nin > 1 else role
        raise ValueError(
            f"{name} lies in {places}[{other}], which is written to before it has been read; pass a separate tensor, "
            f"e.g. {name}.clone()"
        )
    return 0


cdef int whole_list(Comm comm, list tensors, str role) except -1:
    if len(tensors) != comm.c.size:
        raise ValueError(f"{role} has {len(tensors)} tensors; the group has {comm.c.size} ranks")
    return 0


cdef int same_dtype(int a, int b, str first, str second) except -1:
    if a != b:
        raise TypeError(f"{second} is {hd_dtype_name(a).decode()}, but {first} is {hd_dtype_name(b).decode()}")
    return 0


cdef int contiguous(hd_buf* b, str role) except -1:
    if b.strides != 0:
        raise ValueError(f"{role} must be C-contiguous, because its blocks are; pass {role}.contiguous()")
    return 0


cdef int same_form(int64_t n, uint64_t one, uint64_t other, str role, str places, int place) except -1:
    """Of two tensors of n elements; a single one is the same number in any shape."""
    if n > 1 and one != other:
        raise ValueError(
            f"{role} and {places}[{place}] have different shapes, or their elements in different orders in memory "
            f"(strides), and nothing is copied silently: pass tensors of one shape, {role}.contiguous() and contiguous "
            f"{places}"
        )
    return 0


cdef bint unverified(Comm comm) noexcept:
    """Whether no rank compares, pair by pair, what is sent with what is expected: see hd_verify_pairs."""
    return comm.c.size == 1 or not comm.c.check


cdef uint64_t row_form(hd_buf* b) noexcept:
    cdef uint64_t h = <uint64_t> b.ndim
    cdef int i
    for i in range(1, min(b.ndim, HD_MAX_DIMS)):
        h = hd_mix(h, <uint64_t> b.dims[i])
    return h | (<uint64_t> 1 << 63) if b.n else 0


cdef bint overlap(hd_buf* a, hd_buf* b):
    cdef int64_t item = hd_itemsize(a.dtype)
    return a.n > 0 and b.n > 0 and a.ptr < b.ptr + b.n * item and b.ptr < a.ptr + a.n * item


cdef int blocks_fit(Comm comm, hd_buf* all, hd_buf* block, str several, str one) except -1:
    if all.n != block.n * comm.c.size:
        raise ValueError(
            f"{several} has {all.n} elements; it must have {comm.c.size} (the group's size) times {one}'s {block.n}"
        )
    return 0


cdef int in_own_block(Comm comm, hd_buf* b, hd_buf* o) except -1:
    """For an all_gather of device memory: an input that lies in the output is this rank's block of it."""
    if comm.c.on_device and overlap(b, o) and (
        b.ptr != o.ptr + <int64_t> comm.c.rank * b.n * <int64_t> hd_itemsize(b.dtype)
    ):
        raise ValueError("input lies in output, but not where this rank's block goes; pass a separate tensor, "
                         "e.g. input.clone()")
    return 0


cdef int scratch_for_result(hd_job* j) except -1:
    """For a reduce_scatter: memory for a result that would overwrite its input."""
    if hd_scratch_for(j.comm, j):
        raise MemoryError(f"no memory for an output of {j.out1.n} elements that lies in the input")
    if j.scratch != NULL and j.comm.on_device:
        raise ValueError("output lies in the input; pass a separate tensor")
    return 0


cdef object root_list(Comm comm, hd_job* j, hd_buf* b, object items, int root, str name):
    """The root's list of a gather or scatter, whose tensor is b; returns what keeps its memory."""
    cdef int r
    tensors = [*items]
    whole_list(comm, tensors, name)
    cdef hd_seg* list = segments(len(tensors))
    if j.kind == HD_GATHER:
        j.out = list
        j.nout = comm.c.size
    else:
        j.in_ = list
        j.nin = comm.c.size
    keep = collect(j, tensors, list, j.kind == HD_GATHER, name)
    same_dtype(b.dtype, j.dtype, name, "tensor")
    if list[root].n != b.n:
        raise ValueError(f"{name}[{root}] has {list[root].n} elements, tensor has {b.n}")
    if unverified(comm):
        same_form(b.n, form_of(b), list[root].form, "tensor", name, root)
    for r in range(comm.c.size):
        j.uneven |= list[r].n != b.n or list[r].form != form_of(b)
    return keep


cdef list turned(Comm comm, object output_lists, list inputs):
    """From one list per rank to one per input."""
    by_rank = [list(o) for o in output_lists]
    whole_list(comm, by_rank, "output_tensor_lists")
    if any(len(outputs) != len(inputs) for outputs in by_rank):
        raise ValueError(f"each of output_tensor_lists must have {len(inputs)} tensors, one per input")
    return [[outputs[i] for outputs in by_rank] for i in range(len(inputs))]


cdef int64_t whole(object n, str role) except? -2:
    try:
        return operator.index(n)  # Cython would accept 1.5 as 1
    except TypeError:
        raise TypeError(f"{role}_split_sizes must hold whole numbers, not {n!r}") from None
    except OverflowError:
        raise ValueError(f"{role}_split_sizes has an entry of {n}, more than any tensor has rows") from None


cdef int split(Comm comm, hd_buf* b, object splits, hd_seg* list, str role) except -1:
    """Blocks of a tensor along its first dimension: equal ones, or of as many rows as the splits say."""
    cdef int64_t rows = b.dims[0] if b.ndim else b.n
    cdef int64_t row = b.n // rows if rows else 0
    cdef int64_t at = 0, n, total = 0
    cdef int r, size = comm.c.size
    if splits is not None and len(splits) == 0:
        splits = None  # as torch: an empty list means equal blocks
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{role}'s first dimension, {rows}, is not divisible by the group's size, {size}; pass {role}_split_sizes"
            )
    else:
        if len(splits) != size:
            raise ValueError(f"{role}_split_sizes has {len(splits)} entries; the group has {size} ranks")
    for r in range(size):
        n = rows // size if splits is None else whole(splits[r], role)
        if n < 0:
            raise ValueError(f"{role}_split_sizes has a negative entry: {n}")
        if n > rows:  # a sum of such entries may come out right, modulo 2^64
            raise ValueError(
                f"{role}_split_sizes add up to more than {role}'s first dimension, {rows}: one entry is {n}"
            )
        list[r].ptr = b.ptr + at * row * <int64_t> hd_itemsize(b.dtype)
        list[r].n = n * row
        at += n
    if at != rows:
        raise ValueError(f"{role}_split_sizes add up to {at}, but {role}'s first dimension is {rows}")
    return 0
