# Tensors, lists of them and their parts as the segments of a job: helpers of Comm's methods.


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
        list[i].strides = b.strides
        h = hd_mix(hd_mix(h, b.shape), b.strides)
    j.layout = h
    if writable:
        separate(j, list, len(tensors), role)
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


cdef int apart(hd_job* j, hd_seg* outputs, int nout, hd_own own, str role, str places) except -1:
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


cdef int same_order(uint64_t one, uint64_t other, str role, str places, int place) except -1:
    if one != other:
        raise ValueError(
            f"{role} and {places}[{place}] have their elements in different orders in memory (strides), and nothing is "
            f"copied silently: pass {role}.contiguous() and contiguous {places}"
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


cdef int kept_apart(hd_job* j) except -1:
    """For a reduce_scatter: memory for a result that would overwrite its input."""
    if hd_keep_apart(j.comm, j):
        raise MemoryError(f"no memory for an output of {j.out1.n} elements that lies in the input")
    if j.apart != NULL and j.comm.on_device:
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
        same_order(b.strides, list[root].strides, "tensor", name, root)
    for r in range(comm.c.size):
        j.uneven |= list[r].n != b.n or list[r].form != form_of(b)
    return keep


cdef object rooted(Comm comm, int kind, Api api, object tensor, object items, object at, object async_op, extra):
    """gather and scatter: a list at the root, one tensor everywhere."""
    cdef hd_job j
    cdef hd_buf b
    cdef bint mine
    cdef int root
    cdef hd_own own
    name = "gather_list" if kind == HD_GATHER else "scatter_list"
    begin(&j, comm, kind, api)
    try:
        root = root_in_range(comm, at, "root")
        mine = comm.c.rank == root
        if mine and items is None:
            raise ValueError(f"the root must pass {name}")
        if not mine and items:
            raise ValueError(f"{name} belongs to the root (rank {root}) alone; this is rank {comm.c.rank}")
        own_part = fill(tensor, &b, kind == HD_SCATTER, "tensor")
        all_parts = root_list(comm, &j, &b, items, root, name) if mine else []
        keep = (own_part, all_parts) if kind == HD_GATHER else (all_parts, own_part)
        subject(&j, &b, False)
        j.pairwise = 1
        j.root = root
        j.extra = extra
        if kind == HD_GATHER:
            j.nin = 1
            j.in1.ptr = b.ptr
            j.in1.n = b.n
            j.in1.form = form_of(&b)
        else:
            j.nout = 1
            j.out1.ptr = b.ptr
            j.out1.n = b.n
            j.out1.form = form_of(&b)
        j.listed = mine
        if mine and comm.c.on_device:
            own.first, own.step, own.exact = root if kind == HD_GATHER else -root, 1, True
            if kind == HD_GATHER:
                apart(&j, j.out, j.nout, own, "tensor", name)
            else:
                apart(&j, j.out, j.nout, own, name, "tensor")
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    if kind == HD_GATHER:
        outputs = [*items] if mine else []
    else:
        outputs = [tensor]
    return run(comm, &j, async_op, keep, outputs)


cdef list turned(Comm comm, object output_lists, list inputs):
    """From one list per rank to one per input."""
    by_rank = [list(o) for o in output_lists]
    whole_list(comm, by_rank, "output_tensor_lists")
    if any(len(outputs) != len(inputs) for outputs in by_rank):
        raise ValueError(f"each of output_tensor_lists must have {len(inputs)} tensors, one per input")
    return [[outputs[i] for outputs in by_rank] for i in range(len(inputs))]


cdef object gather_lists(Comm comm, Api api, object outputs, object tensors, bint several, object async_op):
    """all_gather: a list with a tensor per rank, or, for several tensors, a list per rank."""
    cdef hd_job j
    cdef Py_ssize_t i, n
    cdef int size = comm.c.size, dtype
    cdef hd_seg* mine
    cdef hd_seg* places = NULL
    cdef hd_own own
    begin(&j, comm, HD_ALL_GATHER, api)
    try:
        inputs = list(tensors)
        n = len(inputs)
        output_lists = turned(comm, outputs, inputs) if several else [list(outputs)]
        if not n:
            raise ValueError("no input tensor")
        for each in output_lists:
            whole_list(comm, each, "tensor_list")
        j.in_ = segments(n)
        j.out = segments(n * size)
        j.listed = 1
        given = collect(&j, inputs, j.in_, False, "tensor")
        dtype = j.dtype
        flat = [t for each in output_lists for t in each]
        keep = (given, collect(&j, flat, j.out, True, "tensor_list"))  # the agreement: the lists' sizes
        same_dtype(dtype, j.dtype, "tensor_list", "tensor")
        for i in range(n):
            mine = &j.out[i * size + comm.c.rank]
            if mine.n != j.in_[i].n:
                raise ValueError(
                    f"tensor has {j.in_[i].n} elements, but its place tensor_list[{comm.c.rank}] has {mine.n}"
                )
            same_order(j.in_[i].strides, mine.strides, "tensor", "tensor_list", comm.c.rank)
        j.nin = n
        j.nout = n * size
        if comm.c.on_device:
            own.first, own.step, own.exact = comm.c.rank, size, True
            apart(&j, j.out, j.nout, own, "tensor", "tensor_list")
        elif n > 1:  # each is copied to its own place before any is sent
            places = segments(n)
            for i in range(n):
                places[i] = j.out[i * size + comm.c.rank]
            own.first, own.step, own.exact = 0, 1, False
            apart(&j, places, n, own, "tensor", "the places of this rank's tensors")
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    finally:
        free(places)
    return run(comm, &j, async_op, keep, flat)


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
        list[r].ptr = b.ptr + at * row * <int64_t> hd_itemsize(b.dtype)
        list[r].n = n * row
        at += n
    if at != rows:
        raise ValueError(f"{role}_split_sizes add up to {at}, but {role}'s first dimension is {rows}")
    return 0


cdef object reduce_blocks(Comm comm, Api api, object output, object input, object op, object async_op):
    """See Comm.reduce_scatter_tensor."""
    cdef hd_job j
    cdef hd_buf b, o
    begin(&j, comm, HD_REDUCE_SCATTER, api)
    try:
        keep = (fill(input, &b, False, "input"), fill(output, &o, True, "output"))
        same_dtype(b.dtype, o.dtype, "output", "input")
        if b.n != o.n * comm.c.size:
            raise ValueError(
                f"input has {b.n} elements; it must have {comm.c.size} (the group's size) times output's {o.n}"
            )
        contiguous(&b, "input")
        contiguous(&o, "output")
        subject(&j, &b, True)
        reduces(&j, as_reduce_op(op))
        j.nin = j.nout = 1
        j.in1.ptr = b.ptr
        j.in1.n = b.n
        j.out1.ptr = o.ptr
        j.out1.n = o.n
        kept_apart(&j)
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    return run(comm, &j, async_op, keep, [output])
