# Sends and receives: from validated arguments to a request that MPI has.

cdef str peer_text(hd_job* j):
    if j.kind == HD_SEND:
        return f", to {j.message.peer}"
    return f", from {j.message.peer}" if j.message.peer >= 0 else ", from any"


cdef object post(Comm comm, object tensor, int peer, int tag, int kind, Api api, bint on_device, int tag_kind):
    """Starts a send or a receive and leaves it to the poller if it does not end at once."""
    cdef hd_buf b
    check_alive(comm)
    keep = fill(tensor, &b, kind == HD_RECV, "tensor")
    if b.strides != 0:
        raise disordered(kind == HD_SEND)
    if on_device and b.n * hd_itemsize(b.dtype) <= HD_DEVICE_LEAST:
        raise ValueError(f"device memory goes as it is in messages of more than {HD_DEVICE_LEAST} bytes")
    route(comm, peer, kind, True)  # also for a message to itself: both ends are in flight at once
    enter(comm.c, True)
    try:
        return post_now(comm, keep, tensor, &b, peer, tag, kind, api, on_device, tag_kind, NULL)
    finally:
        hd_comm_exit(comm.c)


cdef object post_now(Comm comm, object keep, object tensor, hd_buf* b, int peer, int tag, int kind, Api api,
                     bint on_device, int tag_kind, hd_job** posted):
    """`posted`: a list that the caller leaves to the poller; NULL: the message is left to it here."""
    cdef hd_job* job = new_message(comm, b, peer, tag, kind, api, tag_kind)
    cdef Work work
    cdef tuple shown = None
    job.message.on_device = on_device
    if profiled():  # before it is recorded: a handler's exception in there ends the call
        try:
            shown = begin_shown(job, tensor, peer_text(job))
        except BaseException:
            free_job(job)
            raise
    work = start_message(comm, job, keep, tensor, posted)
    if shown is not None:
        try:
            end_shown(shown)
        except BaseException:  # nobody gets the Work
            work.take_back([])
            raise
    return work


cdef hd_job* new_message(Comm comm, hd_buf* b, int peer, int tag, int kind, Api api, int tag_kind) except NULL:
    cdef hd_job* job = new_job()
    begin(job, comm, kind, api)
    aim(job, b, peer, tag, kind)
    job.message.tag_kind = tag_kind
    return job


cdef Work start_message(Comm comm, hd_job* job, object keep, object tensor, hd_job** posted):
    """Gives it to MPI. No Python code runs in here; `posted` as for post_now."""
    cdef Work work
    job.site_id = site_here()
    note_line(job)
    hd_rec_begin(job, False)
    work = adopt(comm, job, keep, tensor)
    hd_p2p_start(comm.c, job)
    if hd_job_state(job) == HD_DONE:
        job.refs = 1  # nobody but the Work knows it
    elif posted != NULL:
        job.next = posted[0]
        posted[0] = job
    else:
        hd_p2p_watch(job)
    return work


cdef int tag_of(Comm comm, object tag) except -1:
    cdef int overflow = 0
    cdef long long number
    if type(tag) is int:
        number = PyLong_AsLongLongAndOverflow(tag, &overflow)
        if not overflow and 0 <= number <= comm.c.tag_limit:
            return <int> number
    try:
        n = operator.index(tag)  # of any size: a C int would overflow before it is looked at
    except TypeError:
        raise TypeError(f"tag must be a whole number, not {type(tag).__name__}: {tag!r}") from None
    if n < 0 or n > comm.c.tag_limit:
        raise ValueError(f"tag {n} is outside 0..{comm.c.tag_limit}, what this MPI leaves to users")
    return n


def check_tag(Comm comm, tag):
    """Raises TypeError or ValueError for a tag that this MPI does not leave to users."""
    tag_of(comm, tag)


def tags(Comm comm):
    """How many tags this MPI leaves to users; the same on all ranks."""
    return comm.c.tag_limit + 1


cdef int route(Comm comm, int peer, int kind, bint itself) except -1:
    cdef hd_comm* c = comm.c
    if peer == c.rank and not itself:
        raise ValueError(
            f"rank {peer} cannot {'send to' if kind == HD_SEND else 'receive from'} itself and wait; "
            f"use {'isend' if kind == HD_SEND else 'irecv'}, or copy the tensor"
        )
    if peer >= c.size or peer < (-1 if kind == HD_RECV else 0):
        raise ValueError(f"rank {peer} is not in group '{c.name.decode()}' of {c.size} ranks")
    if kind == HD_RECV and c.size == 1 and not itself:
        raise ValueError("a group of one rank has no other rank to receive from")
    return 0


def disordered(bint sends):
    """The error of a message whose elements are not in C order: it carries no strides, so both ends assume that order.

    Parameters
    ----------
    sends : bool
        Whether the tensor is sent, or received into.
    """
    return ValueError(
        "tensor is not C-contiguous, and the other rank does not know in which order its elements lie: "
        + ("send tensor.contiguous()" if sends else "receive into a contiguous tensor, and copy from there")
    )


cdef void aim(hd_job* j, hd_buf* b, int peer, int tag, int kind):
    subject(j, b, False)
    j.message.peer = peer
    j.message.tag = tag
    if kind == HD_SEND:
        j.in1.ptr = b.ptr
        j.in1.n = b.n
    else:
        j.out1.ptr = b.ptr
        j.out1.n = b.n


cdef int transfer(Comm comm, object tensor, int peer, int tag, int kind, Api api) except -2:
    """A blocking send or receive; the sender's rank."""
    cdef hd_job* j
    cdef hd_buf b
    cdef int source
    check_alive(comm)
    keep = fill(tensor, &b, kind == HD_RECV, "tensor")
    if b.strides != 0:
        raise disordered(kind == HD_SEND)
    route(comm, peer, kind, False)
    j = new_job()
    begin(j, comm, kind, api)
    aim(j, &b, peer, tag, kind)
    j.inline_ = 1
    try:
        source = transfer_now(comm, j, tensor, keep)
    finally:
        hd_job_clear(j)
        free_job(j)
    return source


cdef int transfer_now(Comm comm, hd_job* j, object tensor, object keep) except -2:
    cdef int code
    cdef tuple shown = None
    if profiled():
        shown = begin_shown(j, tensor, peer_text(j))
    enter(comm.c, True)
    j.site_id = site_here()
    hd_rec_begin(j, False)
    if hd_p2p_is_brief(j):
        hd_p2p_start(comm.c, j)
    else:
        with nogil:
            hd_p2p_start(comm.c, j)
    if hd_p2p_soon(j):
        code = j.code
    else:
        with nogil:
            code = hd_p2p_wait(j, -1, 1)
    if code != HD_ERR_INTERRUPT:
        hd_comm_exit(comm.c)
    else:
        try:
            error = interrupted(j)
        finally:
            hd_comm_exit(comm.c)
    if shown is not None:
        end_shown(shown)
    if code == HD_OK:
        return j.message.source
    if hd_p2p_unfinished(j):
        Py_INCREF(keep)  # MPI cannot take a send back: it may read the tensor for ever
    if code != HD_ERR_INTERRUPT:
        error = error_of(code, j.text)
        name_lost(error, comm.c)
    raise error


cdef object interrupted(hd_job* j):
    """Ends a message in which a signal handler raised: the exception, with a note about the message.

    A receive is cancelled, or its message has arrived and is received to its end. So no message is
    lost, unless a second signal cuts that short, or the message's time is over.
    """
    cdef int taken = -1
    try:
        propagate()
        error = KeyboardInterrupt()
    except BaseException as raised:
        error = raised
    if j.kind == HD_SEND:
        hd_p2p_give_up(j)
        note = "the send goes on: the tensor must not be changed" if hd_p2p_unfinished(j) else "the tensor was sent"
    else:
        try:
            while taken < 0:
                with nogil:
                    taken = hd_p2p_take_back(j, 0.05)
                PyErr_CheckSignals()
        except BaseException as second:
            second.__context__ = error
            error = second
        if taken < 0:
            hd_p2p_give_up(j)
            note = "its message was on its way and is lost: the tensor must not be used"
        elif taken:
            note = "nothing was received: the message, when it comes, is for the next receive"
        elif j.code == HD_OK:
            note = f"the receive is complete: {j.count} elements from rank {j.message.source} are in the tensor"
        else:
            note = error_of(j.code, j.text).args[0]
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"[hpcdist] interrupted in {j.api.decode()} of group '{j.comm.name.decode()}': {note}")
    return error
