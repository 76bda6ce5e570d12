# From validated arguments to a job that runs: inline on the caller's thread, or queued for the lane.


cdef class Api:
    """A public operation's name as C text, with its hash: part of what the ranks agree on."""

    cdef bytes text
    cdef const char* name
    cdef uint64_t hash
    cdef int number  # the flight recorder's; -1: not known yet
    cdef bint own
    cdef bytes counted_text
    cdef const char* counted  # NULL, or what its `extra` is

    def __cinit__(self, str name, bint own=False):
        self.text = name.encode()
        self.name = self.text
        self.hash = hd_hash_text(self.name)
        self.number = -1
        self.own = own


cdef dict apis = {}  # never emptied: jobs keep the pointers


cdef class _AsyncHere:
    """Type of :data:`ASYNC_HERE`."""

    def __repr__(self):
        return "ASYNC_HERE"


#: As `async_op`: asynchronous, while other ranks may make the call synchronously. torch's own calls
#: allow that.
ASYNC_HERE = _AsyncHere()
cdef object async_here = ASYNC_HERE
#: Seconds that a monitored barrier has to end after it has given up.
cdef double MONITORED_SLACK = 0.2
#: Bytes: messages of device memory up to this size go through the host.
DEVICE_LEAST = HD_DEVICE_LEAST
OBJECTS, SIGNAL, ANNOUNCEMENT, PIECE = HD_OBJECTS, HD_SIGNAL, HD_ANNOUNCEMENT, HD_PIECE  # for isend and irecv


cdef Api api_named(object name, Api default):
    if name is None:
        return default
    api = apis.get(name)
    if api is None:
        api = apis[name] = Api(name, True)
    return api


def counting(str api, str what):
    """Gives the number `extra` of calls under a public name a word, for errors of ranks that differ in it.

    Parameters
    ----------
    api : str
        Name that the calls pass as `api`.
    what : str
        Such as "backward pass".

    Returns
    -------
    str
        The name.
    """
    cdef Api known = api_named(api, None)
    if known.counted == NULL:  # jobs keep the pointer
        known.counted_text = what.encode()
        known.counted = known.counted_text
    return api


cdef Api BARRIER = Api("barrier")
cdef Api ALL_REDUCE = Api("all_reduce")
cdef Api ALL_REDUCE_COALESCED = Api("all_reduce_coalesced")
cdef Api BROADCAST = Api("broadcast")
cdef Api REDUCE = Api("reduce")
cdef Api ALL_GATHER = Api("all_gather")
cdef Api ALL_GATHER_INTO = Api("all_gather_into_tensor")
cdef Api ALL_GATHER_COALESCED = Api("all_gather_coalesced")
cdef Api GATHER = Api("gather")
cdef Api SCATTER = Api("scatter")
cdef Api REDUCE_SCATTER = Api("reduce_scatter")
cdef Api REDUCE_SCATTER_TENSOR = Api("reduce_scatter_tensor")
cdef Api ALL_TO_ALL = Api("all_to_all")
cdef Api ALL_TO_ALL_SINGLE = Api("all_to_all_single")
cdef Api SEND = Api("send")
cdef Api RECV = Api("recv")
cdef Api ISEND = Api("isend")
cdef Api IRECV = Api("irecv")
cdef Api SHARE = Api("empty")
cdef Api SIGNALS = Api("signal")
cdef Api WAIT_SIGNAL = Api("wait_signal")
cdef Api ACCUMULATE = Api("accumulate")
cdef Api DESTROY = Api("destroy_process_group")


cdef void begin(hd_job* j, Comm comm, int kind, Api api):
    cdef double limit = call_limit()
    hd_job_init(j, comm.c, kind, api.name)
    if limit > 0:
        j.timeout = limit
    j.api_hash = api.hash
    j.async_may_differ = api.own
    j.extra_is = api.counted
    if api.number >= 0:
        j.name_id = <uint16_t> api.number
    elif hd_rec.ring != NULL:
        j.name_id = api.number = hd_rec_name(api.name)


cdef void subject(hd_job* j, hd_buf* b, bint shape_agrees):
    """The tensor that messages describe."""
    cdef int i
    j.dtype = b.dtype
    j.count = b.n
    j.ndim = b.ndim
    for i in range(b.ndim if b.ndim < HD_MAX_DIMS else HD_MAX_DIMS):
        j.dims[i] = b.dims[i]
    j.permuted = b.strides != 0
    j.layout = hd_mix(b.shape, b.strides) if shape_agrees else 0


cdef inline void reads(hd_job* j, hd_buf* b) noexcept:
    """The only input."""
    j.nin = 1
    j.in1.ptr = b.ptr
    j.in1.n = b.n


cdef inline void writes(hd_job* j, hd_buf* b) noexcept:
    """The only output."""
    j.nout = 1
    j.out1.ptr = b.ptr
    j.out1.n = b.n


cdef uint64_t form_of(hd_buf* b) noexcept:
    """Shape and strides, for calls whose tensors are compared pair by pair."""
    return hd_mix(b.shape, b.strides) | 1 if b.n else 0


cdef int reduces(hd_job* j, ReduceOp op) except -1:
    cdef const char* why = hd_op_refusal(op.code, j.dtype)
    if why != NULL:
        raise TypeError(f"{op!r} on {hd_dtype_name(j.dtype).decode()}: {why.decode()}")
    j.redop = op.code
    j.factor = op.factor
    return 0


cdef hd_seg* segments(Py_ssize_t n) except NULL:
    cdef hd_seg* list = <hd_seg*> calloc(n if n > 0 else 1, sizeof(hd_seg))
    if list == NULL:
        raise MemoryError(f"no memory for a list of {n} tensors")
    return list


cdef int root_in_range(Comm comm, object rank, str name) except -1:
    cdef int root = rank
    if root < 0 or root >= comm.c.size:
        raise ValueError(f"{name}={root} is not a rank of group '{comm.c.name.decode()}' of {comm.c.size} ranks")
    return root


def complex_among(object tensors):
    """Whether some of a list's tensors are complex: such a list may be reduced as pairs of real numbers.

    Parameters
    ----------
    tensors : iterable of tensor
        Anything.

    Returns
    -------
    bool
        If True, the other ranks do not hear of a list that is refused with a TypeError.
    """
    return isinstance(tensors, (list, tuple)) and any(
        getattr(getattr(t, "dtype", None), "is_complex", False)
        or getattr(getattr(t, "dtype", None), "kind", "") == "c"
        for t in tensors
    )


#: Whether the others arrive at the call that is refused: it is a whole operation; a part, if they agreed on the one
#: before; a part, in any case; an operation that this rank cannot finish.
cdef enum OthersArrive:
    NOTHING_BEGUN, IF_AGREED, IN_ANY_CASE, NOT_FINISHED


#: Seconds for operations that are over to leave the lane.
cdef double SETTLING = 0.05


cdef bytes reason_of(object error):
    try:
        return f"{type(error).__name__}: {error}".encode("utf-8", "replace")
    except Exception:  # no memory, or a text that cannot be created
        return b"an error that could not be put into words"


cdef int refused(Comm comm, hd_job* j, object error, bint another_way, OthersArrive arrive=NOTHING_BEGUN,
                 uint32_t after=0) except -1:
    """Clears a job whose arguments were refused, and tells the reason to the other ranks, which wait in it or will.

    another_way: the caller does the operation otherwise. KeyboardInterrupt and the like are not a
    refusal if nothing was begun: a handler may make the call again. after: for IF_AGREED, the
    collective that the ranks must have agreed on.
    """
    cdef hd_job r
    cdef hd_comm* c = comm.c
    hd_job_clear(j)
    if not another_way:
        mark_told(error)
    if another_way or hd_forked or c == NULL or c.freed or not c.check or c.size == 1:
        return 0
    if not isinstance(error, Exception) and arrive == NOTHING_BEGUN:
        return 0
    try:
        reason = reason_of(error)
        hd_job_init(&r, c, HD_BARRIER, j.api)
        r.refusal.why = reason
        r.refusal.code = (
            HD_OK if arrive == NOTHING_BEGUN else HD_ERR_BACKEND if arrive == NOT_FINISHED else HD_ERR_UNDONE)
        r.refusal.if_agreed = arrive == IF_AGREED
        r.refusal.after = after
        r.seen = 1  # this rank already knows
        r.name_id = j.name_id
        if arrive == IF_AGREED:  # one that queues has a number, also if the others turn out not to come
            with nogil:
                hd_lane_drain(c, SETTLING)
        if hd_lane_try(c):
            if c.closing or (arrive == IF_AGREED and c.agreed != after):
                hd_lane_leave(c)
                return 0
            c.seq += 1
            r.seq = c.seq
            r.inline_ = 1
            r.site_id = site_here()
            hd_rec_begin(&r, False)
            with nogil:
                hd_lane_run(c, &r)
            hd_job_clear(&r)
        else:
            queue(comm, &r, reason, [])
    except Exception:
        pass  # the others wait until their timeout; this rank's error is reported
    return 0


cdef int refuse_parts(Comm comm, object error, Api api, object others_arrive, bint begun, int parts) except -1:
    """See Comm.refuse."""
    cdef hd_job j
    cdef int i
    cdef uint32_t after = comm.c.seq if comm.c != NULL else 0
    cdef OthersArrive kind = NOT_FINISHED if begun else NOTHING_BEGUN if others_arrive is None else (
        IF_AGREED if others_arrive == "if agreed" else IN_ANY_CASE)
    for i in range(parts):
        begin(&j, comm, HD_BARRIER, api)
        refused(comm, &j, error, False, kind, after)
        if kind == NOTHING_BEGUN:
            if comm.c == NULL or comm.c.seq == after:  # it does not count as a refusal
                break
            kind = IN_ANY_CASE
    return 0


cdef object run(Comm comm, hd_job* j, object asynchronous, object keep, list outputs):
    """Runs or queues the job on the caller's stack; frees what it allocated.

    keep is a tuple that begins with the inputs, or the inputs alone; it and outputs are for a Work.
    """
    cdef bint async_op = asynchronous is True
    if not async_op and asynchronous is not False:
        try:
            async_op = checked_async(asynchronous)
        except BaseException as error:
            refused(comm, j, error, False)
            raise
    # Under a name that the caller gives, which is hpcdist itself, the ranks need not agree on who waits.
    j.all_async = async_op and not j.async_may_differ and asynchronous is not async_here
    if not profiled():
        return run_now(comm, j, async_op, keep, outputs)
    try:
        shown = begin_shown(j, keep, ", async" if async_op else "")
    except BaseException as error:
        refused(comm, j, error, False)
        raise
    try:
        return run_now(comm, j, async_op, keep, outputs)
    finally:
        end_shown(shown)


cdef int raise_error_of(hd_job* j, int code) except -1:
    """Raises the error of a job that ran inline, and clears it."""
    error = None if code == HD_ERR_INTERRUPT else error_of_job(j)
    hd_job_clear(j)
    if error is None:
        propagate()
        raise KeyboardInterrupt
    raise error


cdef object run_now(Comm comm, hd_job* j, bint async_op, object keep, list outputs):
    cdef hd_comm* c = comm.c
    if not is_usable(comm):
        try:
            check_alive(None if j.closing else comm)
        except BaseException:
            hd_job_clear(j)
            raise
    if not async_op or hd_session_serialized(c.session):
        if hd_lane_try(c):
            if c.closing and not j.closing:  # set after check_alive(), by a thread that waits for this lane
                hd_lane_leave(c)
                hd_job_clear(j)
                raise gone_error(c)
            c.seq += 1
            j.seq = c.seq
            j.inline_ = 1
            j.site_id = site_here()
            hd_rec_begin(j, False)
            with nogil:
                hd_lane_run(c, j)
            if j.code == HD_OK:
                hd_job_clear(j)
                return finished_work(comm, outputs) if async_op else None
            hd_lane_seen(c)
            raise_error_of(j, j.code)
        try:
            refuse_in_handler(comm, j.api)
        except BaseException:
            hd_job_clear(j)
            raise
    try:
        work = queue(comm, j, keep, outputs)
    except BaseException as error:
        hd_job_init(j, c, HD_BARRIER, j.api)
        refused(comm, j, error, False)
        raise
    if async_op:
        return work
    if not wait_queued(<Work> work, j.timeout + MONITORED_SLACK if j.monitored else -1):
        (<Work> work).j.seen = 1
        raise DistTimeoutError(
            f"timeout after {j.timeout:g} s in {j.api.decode()} of group '{c.name.decode()}' (this is rank {c.rank} of "
            f"{c.size}): an earlier operation of the group has not ended, which some ranks may not have joined"
        )
    return None


cdef bint wait_queued(Work work, double limit) except -1:
    """Waits for a synchronous call that had to queue, as if it ran inline. False: the limit of a monitored one passed."""
    try:
        if limit >= 0:
            return work.ended_within(limit)
        work.wait()
    except BaseException as error:
        last = taken_back(work, error)
        if last is error:
            raise
        raise last
    return True


cdef object taken_back(Work work, object error):
    """Ends a call in which a signal handler raised: no data moves after it. Returns the last such exception.

    If all ranks have met, the operation finishes first, as an inline one does. Without the entry
    check the other ranks could not be told, and it goes on.
    """
    cdef hd_job* j = work.j
    cdef hd_comm* c = work.comm.c
    cdef int state = hd_job_state(j)
    if state == HD_DONE or hd_forked or not c.check:
        return error
    while state != HD_DONE and hd_comm_enter(c, 0):
        with nogil:
            state = hd_lane_take_back(c, j)
            if state == HD_RUNNING and hd_job_wait(j, 0.05):
                state = HD_DONE
            hd_comm_exit(c)
        if state == HD_QUEUED:
            break
        try:
            PyErr_CheckSignals()
        except BaseException as another:
            another.__context__ = error
            error = another
    j.seen = 1
    if state == HD_DONE and j.code != HD_OK and not c.freed:
        hd_lane_seen(c)
    return error


cdef Work queue(Comm comm, hd_job* j, object keep, list outputs):
    cdef hd_job* job
    cdef Work work
    cdef int rc
    try:
        job = new_job()
    except BaseException:
        hd_job_clear(j)
        raise
    comm.c.seq += 1
    j.seq = comm.c.seq
    j.site_id = site_here()
    note_line(j)
    hd_rec_begin(j, True)
    j.begun = hd_now()
    move(job, j)
    work = adopt(comm, job, keep, outputs)
    rc = hd_lane_submit(comm.c, job)
    if rc:
        comm.c.seq -= 1
        job.code = HD_ERR_CLOSED
        hd_rec_end(job)
        unref(job)
        if rc < 0:
            raise gone_error(comm.c)
        raise DistBackendError(f"the lane's thread could not be started (error {rc}): too many processes or threads?")
    return work


cdef void move(hd_job* to, hd_job* j):
    cdef void* room = to.room
    memcpy(to, j, sizeof(hd_job))
    to.room = room
    if j.in_ == &j.in1:
        to.in_ = &to.in1
    if j.out == &j.out1:
        to.out = &to.out1


cdef Work adopt(Comm comm, hd_job* job, object keep, object outputs):
    """A Work with a job of two owners; the job keeps the tensors and the communicator."""
    cdef Work work = Work.__new__(Work)
    Py_INCREF(keep)
    Py_INCREF(comm)
    job.keep = <void*> keep
    job.group = <void*> comm
    job.refs = 2
    work.j = job
    work.comm = comm
    work.outputs = outputs
    return work
