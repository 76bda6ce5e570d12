# Memory of a window that other ranks reach by messages: see hd_window.c.

#: Bytes up to which data travel with the request, or with the answer.
WINDOW_SHORT = HD_WINDOW_SHORT
#: Bytes of an answer without data.
WINDOW_REPLY = sizeof(hd_answer)
#: What a request asks for.
PUT, GET, ACCUMULATION = HD_PUT, HD_GET, HD_ACCUMULATE

cdef list endless = []  # tensors that MPI may touch for ever


cdef class Exposed:
    """Memory of this rank that the others of a group may use; made by :meth:`Comm.expose`."""

    cdef hd_exposed* e
    cdef object keep

    def __init__(self):
        raise TypeError("use Comm.expose")

    def __dealloc__(self):
        if self.e != NULL and not hd_forked:
            self.withdraw()
            hd_window_free(self.e)

    def withdraw(self):
        """Ends that. Requests under way end, and those that come are refused. May be repeated."""
        cdef int over
        if self.e == NULL or self.keep is None or hd_forked:
            return
        with nogil:
            over = hd_window_withdraw(self.e)
        if not over:
            endless.append(self.keep)
        self.keep = None


cdef object exposed(Comm comm, int64_t window, object tensor):
    """See Comm.expose."""
    cdef hd_buf b
    cdef Exposed made = Exposed.__new__(Exposed)
    check_alive(comm)
    made.keep = fill(tensor, &b, True, "tensor")
    enter(comm.c, True)
    made.e = hd_window_expose(comm.c, <uint64_t> window, b.ptr, b.n * <int64_t> hd_itemsize(b.dtype))
    hd_comm_exit(comm.c)
    if made.e == NULL:
        raise MemoryError("no memory, or no thread, for a window")
    return made


def request_of(Comm comm, int call, int64_t window, uint64_t number, int64_t at, int64_t nbytes, tensor=None, op=None):
    """The message that asks a rank to move or combine bytes of its window.

    Parameters
    ----------
    comm : Comm
        The group's.
    call : int
        PUT, GET or ACCUMULATION.
    window : int
        The number under which the rank has exposed it.
    number : int
        Of this request; modulo the tags, the tag of its data and its answer.
    at, nbytes : int
        Where in the window, and how many.
    tensor : tensor, optional
        What an accumulation combines with the memory,
    op : ReduceOp, optional
        and how.

    Returns
    -------
    bytes

    Raises
    ------
    TypeError
        If the tensor's type does not have the operation.
    """
    cdef hd_job j
    cdef hd_buf b
    cdef hd_request q
    memset(&q, 0, sizeof(q))
    q.window, q.number, q.at, q.bytes = <uint64_t> window, number, at, nbytes
    q.call, q.tag = call, <int32_t> (number % <uint64_t> (comm.c.tag_limit + 1))
    if op is not None:
        begin(&j, comm, HD_BARRIER, ACCUMULATE)
        keep = fill(tensor, &b, False, "tensor")
        combines(&j, &b, op)
        q.dtype, q.redop = j.dtype, j.redop
    return (<char*> &q)[:sizeof(q)]


def outcome_of(const unsigned char[::1] answer, uint64_t number):
    """What an answer says of the request with this number.

    Parameters
    ----------
    answer : buffer of bytes
        At least WINDOW_REPLY.
    number : int
        Of the request.

    Returns
    -------
    str
        Why the request was refused; "" if it was served.
    """
    cdef hd_answer a
    memcpy(&a, &answer[0], sizeof(a))
    if a.number != number:
        return "it answered another request"
    if a.outcome == HD_SERVED:
        return ""
    if a.outcome == HD_NOT_THERE:
        return "it has withdrawn the memory"
    if a.outcome == HD_OUT_OF_RANGE:
        return "the request does not fit its memory"
    return "it has no memory for the data" if a.outcome == HD_NO_ROOM else "it has not received the data"
