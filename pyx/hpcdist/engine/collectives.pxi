# The collectives: from their arguments to a job that runs. Bodies of Comm's methods.


cdef inline object one_tensor(
    Comm comm, int kind, Api api, object tensor, object root, object op, object async_op, object extra,
    object source=None
):
    """all_reduce, reduce and broadcast: one tensor, which is input, output or both; and what an all_reduce reads."""
    cdef hd_job j
    cdef hd_buf b
    cdef hd_own own
    cdef bint written = True
    begin(&j, comm, kind, api)
    try:
        if kind != HD_ALL_REDUCE:
            j.root = root_in_range(comm, root, "root")
            written = (comm.c.rank == j.root) == (kind == HD_REDUCE)
        keep = fill(tensor, &b, written, "tensor")
        subject(&j, &b, True)
        writes(&j, &b)
        if source is not None:
            keep = (reads_apart(&j, &b, comm.c.on_device, source), keep)
            own.first, own.step, own.exact = 0, 0, True
            input_outside_output(&j, j.out, 1, own, "source", "tensor")
        if kind != HD_BROADCAST:
            reduces(&j, as_reduce_op(op))
        j.extra = extra
    except BaseException as error:
        refused(comm, &j, error, kind == HD_ALL_REDUCE and getattr(tensor, "is_sparse", False))
        raise
    if kind == HD_REDUCE:
        reads(&j, &b)
    return run(comm, &j, async_op, keep, None if async_op is False else [tensor])


cdef object one_of_blocks(
    Comm comm, int kind, Api api, object output, object input, object op, object async_op, object extra
):
    """all_gather_into_tensor and reduce_scatter_tensor: one of the tensors has a block for each rank."""
    cdef hd_job j
    cdef hd_buf b, o
    begin(&j, comm, kind, api)
    try:
        keep = (fill(input, &b, False, "input"), fill(output, &o, True, "output"))
        same_dtype(b.dtype, o.dtype, "output", "input")
        if kind == HD_ALL_GATHER:
            blocks_fit(comm, &o, &b, "output", "input")
        else:
            blocks_fit(comm, &b, &o, "input", "output")
        contiguous(&b, "input")
        contiguous(&o, "output")
        subject(&j, &b, True)
        reads(&j, &b)
        writes(&j, &o)
        if kind == HD_ALL_GATHER:
            in_own_block(comm, &b, &o)
        else:
            reduces(&j, as_reduce_op(op))
            scratch_for_result(&j)
        j.extra = extra
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    return run(comm, &j, async_op, keep, [output])


cdef object reduce_several(Comm comm, object tensors, object op, object async_op):
    """See Comm.all_reduce_coalesced."""
    cdef hd_job j
    begin(&j, comm, HD_ALL_REDUCE, ALL_REDUCE_COALESCED)
    try:
        tensors = list(tensors)
        if not tensors:
            raise ValueError("tensors is empty")
        j.out = segments(len(tensors))
        j.listed = 1
        keep = collect(&j, tensors, j.out, True, "tensors")
        j.nout = len(tensors)
        reduces(&j, as_reduce_op(op))
    except BaseException as error:
        refused(comm, &j, error, isinstance(error, TypeError) and complex_among(tensors))
        raise
    return run(comm, &j, async_op, keep, tensors)


cdef object reduce_list(Comm comm, Api api, object output, object inputs, object op, object async_op):
    """See Comm.reduce_scatter."""
    cdef hd_job j
    cdef hd_buf b
    cdef hd_seg* own
    begin(&j, comm, HD_REDUCE_SCATTER, api)
    try:
        inputs = list(inputs)
        whole_list(comm, inputs, "input_list")
        out = fill(output, &b, True, "output")
        j.in_ = segments(len(inputs))
        j.listed = 1
        keep = collect(&j, inputs, j.in_, False, "input_list")
        j.nin = len(inputs)
        same_dtype(j.dtype, b.dtype, "output", "input_list")
        own = &j.in_[comm.c.rank]
        if own.n != b.n:
            raise ValueError(f"output has {b.n} elements, but input_list[{comm.c.rank}] has {own.n}")
        same_form(b.n, form_of(&b), own.form, "output", "input_list", comm.c.rank)
        reduces(&j, as_reduce_op(op))
        writes(&j, &b)
        scratch_for_result(&j)
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    return run(comm, &j, async_op, (keep, out), [output])


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
        items = list(items) if mine else []
        own_part = fill(tensor, &b, kind == HD_SCATTER, "tensor")
        all_parts = root_list(comm, &j, &b, items, root, name) if mine else []
        keep = (own_part, all_parts) if kind == HD_GATHER else (all_parts, own_part)
        subject(&j, &b, False)
        j.pairwise = 1
        j.root = root
        j.extra = extra
        if kind == HD_GATHER:
            reads(&j, &b)
            j.in1.form = form_of(&b)
        else:
            writes(&j, &b)
            j.out1.form = form_of(&b)
        j.listed = mine
        if mine and comm.c.on_device:
            own.first, own.step, own.exact = root if kind == HD_GATHER else -root, 1, True
            if kind == HD_GATHER:
                input_outside_output(&j, j.out, j.nout, own, "tensor", name)
            else:
                input_outside_output(&j, j.out, j.nout, own, name, "tensor")
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    if kind == HD_GATHER:
        outputs = items
    else:
        outputs = [tensor]
    return run(comm, &j, async_op, keep, outputs)


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
            same_form(mine.n, j.in_[i].form, mine.form, "tensor", "tensor_list", comm.c.rank)
        j.nin = n
        j.nout = n * size
        if comm.c.on_device:
            own.first, own.step, own.exact = comm.c.rank, size, True
            input_outside_output(&j, j.out, j.nout, own, "tensor", "tensor_list")
        elif n > 1:  # each is copied to its own place before any is sent
            places = segments(n)
            for i in range(n):
                places[i] = j.out[i * size + comm.c.rank]
            own.first, own.step, own.exact = 0, 1, False
            input_outside_output(&j, places, n, own, "tensor", "the places of this rank's tensors")
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    finally:
        free(places)
    return run(comm, &j, async_op, keep, flat)


cdef object exchange_lists(Comm comm, Api api, object outputs, object inputs, object async_op):
    """One tensor for each rank: see Comm.all_to_all."""
    cdef hd_job j
    cdef hd_own own
    cdef int r, dtype
    begin(&j, comm, HD_ALL_TO_ALL, api)
    try:
        outputs, inputs = list(outputs), list(inputs)
        whole_list(comm, outputs, "output_list")
        whole_list(comm, inputs, "input_list")
        j.in_ = segments(len(inputs))
        j.out = segments(len(outputs))
        j.listed = j.pairwise = 1
        keep_out = collect(&j, outputs, j.out, True, "output_list")
        dtype = j.dtype
        keep = (collect(&j, inputs, j.in_, False, "input_list"), keep_out)
        same_dtype(j.dtype, dtype, "output_list", "input_list")
        j.nin = j.nout = comm.c.size
        j.layout = 0
        j.count = j.in_[0].n
        for r in range(comm.c.size):
            j.uneven |= j.in_[r].n != j.count or j.in_[r].form != j.in_[0].form
            j.uneven |= j.out[r].n != j.count or j.out[r].form != j.in_[0].form
        r = comm.c.rank
        if unverified(comm):
            if j.in_[r].n != j.out[r].n:
                raise ValueError(
                    f"input_list[{r}], which stays here, has {j.in_[r].n} elements, but output_list[{r}] has "
                    f"{j.out[r].n}"
                )
            same_form(j.in_[r].n, j.in_[r].form, j.out[r].form, "this rank's tensor of input_list", "output_list", r)
        own.step = comm.c.size + 1
        own.first, own.exact = r - r * own.step, True  # none for the other inputs
        input_outside_output(&j, j.out, j.nout, own, "input_list", "output_list")
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    return run(comm, &j, async_op, keep, outputs)


cdef object exchange_blocks(
    Comm comm, Api api, object output, object input, object output_splits, object input_splits, object async_op
):
    """One block of a tensor for each rank: see Comm.all_to_all_single."""
    cdef hd_job j
    cdef hd_buf b, o
    cdef int r
    begin(&j, comm, HD_ALL_TO_ALL, api)
    try:
        keep = (fill(input, &b, False, "input"), fill(output, &o, True, "output"))
        same_dtype(b.dtype, o.dtype, "output", "input")
        contiguous(&b, "input")
        contiguous(&o, "output")
        if overlap(&b, &o):
            raise ValueError("output and input overlap; all_to_all_single needs two separate tensors")
        j.in_ = segments(comm.c.size)
        j.out = segments(comm.c.size)
        subject(&j, &b, False)
        split(comm, &b, input_splits, j.in_, "input")
        split(comm, &o, output_splits, j.out, "output")
        j.nin = j.nout = comm.c.size
        j.pairwise = 1
        j.count = j.in_[0].n
        for r in range(comm.c.size):
            j.uneven |= j.in_[r].n != j.count or j.out[r].n != j.count
            j.in_[r].form = j.out[r].form = row_form(&b)  # the inputs of all ranks have rows of one shape
        r = comm.c.rank
        if unverified(comm) and j.in_[r].n != j.out[r].n:
            raise ValueError(
                f"input's block for this rank, which stays here, has {j.in_[r].n} elements, but its place in output has "
                f"{j.out[r].n}"
            )
        if comm.c.check == 0 and (input_splits or output_splits):
            j.uneven = 1  # without the check, the ranks cannot agree on the even form
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    return run(comm, &j, async_op, keep, [output])
