# Operations whose tensors have a part for each rank: bodies of Comm's methods.


cdef object gather_into(Comm comm, Api api, object output, object input, object async_op, object extra):
    """Collects every rank's tensor into one: see Comm.all_gather_into_tensor."""
    cdef hd_job j
    cdef hd_buf b, o
    begin(&j, comm, HD_ALL_GATHER, api)
    try:
        keep = (fill(input, &b, False, "input"), fill(output, &o, True, "output"))
        same_dtype(b.dtype, o.dtype, "output", "input")
        if o.n != b.n * comm.c.size:
            raise ValueError(
                f"output has {o.n} elements; it must have {comm.c.size} (the group's size) times input's {b.n}"
            )
        contiguous(&b, "input")
        contiguous(&o, "output")
        if comm.c.on_device and overlap(&b, &o) and (
            b.ptr != o.ptr + <int64_t> comm.c.rank * b.n * <int64_t> hd_itemsize(b.dtype)
        ):
            raise ValueError("input lies in output, but not where this rank's block goes; pass a separate tensor, "
                             "e.g. input.clone()")
        subject(&j, &b, True)
        j.extra = extra
    except BaseException as error:
        refused(comm, &j, error, False)
        raise
    j.nin = j.nout = 1
    j.in1.ptr = b.ptr
    j.in1.n = b.n
    j.out1.ptr = o.ptr
    j.out1.n = o.n
    return run(comm, &j, async_op, keep, [output])


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
            same_order(j.in_[r].strides, j.out[r].strides, "this rank's tensor of input_list", "output_list", r)
        own.step = comm.c.size + 1
        own.first, own.exact = r - r * own.step, True  # none for the other inputs
        apart(&j, j.out, j.nout, own, "input_list", "output_list")
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
