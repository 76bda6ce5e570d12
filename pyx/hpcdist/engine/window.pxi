# Memory of a window that other ranks reach by messages: see hd_window.c.

#: What a request asks for.
PUT, GET, ACCUMULATION = HD_PUT, HD_GET, HD_ACCUMULATE

cdef list endless = []  # tensors that MPI may touch for ever
cdef uint64_t requests = 0  # that this process has made
cdef dict given_up = {}  # number of a request -> it, while its answer may still come


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


cdef class Request:
    """What this rank asks of another one's window, and the messages of which that consists: see hd_window.h.

    Parameters
    ----------
    comm : Comm
        The group's.
    rank : int
        Whose window it is.
    api : str
        Public name of the operation.
    call : int
        PUT, GET or ACCUMULATION.
    window : int
        The number under which the rank has exposed it.
    at : int
        Bytes before the first one in the window.
    tensor : tensor or array
        C-contiguous: what is written there or combined with what is there, or takes what is read.
    op : ReduceOp, optional
        How an accumulation combines.

    Raises
    ------
    TypeError
        If the tensor's type does not have the operation.
    """

    cdef Comm comm
    cdef Api api
    cdef int rank, call, tag
    cdef uint64_t number
    cdef hd_buf data  # as bytes
    cdef object keep
    cdef bytes asked
    cdef bytearray answer
    cdef list works  # for the answer; for data that come neither with it nor with the request; of the request
    cdef Work late   # for the answer, once it was given up

    def __init__(self, Comm comm, int rank, str api, int call, int64_t window, int64_t at, tensor, op=None):
        global requests
        cdef hd_job j
        cdef hd_request q
        check_alive(comm)
        route(comm, rank, HD_SEND, True)
        self.comm, self.rank, self.api, self.call, self.works = comm, rank, api_named(api, None), call, []
        self.keep = fill(tensor, &self.data, call == HD_GET, "tensor")
        if self.data.strides != 0:
            raise disordered(call != HD_GET)
        memset(&q, 0, sizeof(q))
        if op is not None:
            begin(&j, comm, HD_BARRIER, ACCUMULATE)
            combines(&j, &self.data, op)
            q.dtype, q.redop = j.dtype, j.redop
        as_bytes(&self.data, self.data.ptr, self.data.n * <int64_t> hd_itemsize(self.data.dtype))
        self.number = requests
        requests += 1
        self.tag = <int> (self.number % <uint64_t> (comm.c.tag_limit + 1))
        q.window, q.number, q.at, q.bytes = <uint64_t> window, self.number, at, self.data.n
        q.call, q.tag = call, self.tag
        self.asked = (<char*> &q)[:sizeof(q)]
        if call != HD_GET and self.short():
            self.asked += self.data.ptr[:self.data.n]
        self.answer = bytearray(sizeof(hd_answer) + (self.data.n if call == HD_GET and self.short() else 0))

    cdef inline bint short(self) noexcept:
        return self.data.n <= HD_WINDOW_SHORT

    def ask(self, double seconds):
        """Asks, and waits until the rank has answered. To be called once.

        Parameters
        ----------
        seconds : float
            For the answer; 0 means the group's timeout.

        Returns
        -------
        str
            Why the rank has refused; "" if the data are where they belong.

        Raises
        ------
        DistTimeoutError, RankFailedError, DistMismatchError, KeyboardInterrupt
            There is no answer. What was asked for goes on, but into no memory of the tensor's.
        """
        cdef object shown = None
        cdef str refused
        if profiled():
            shown = begin_range(f"hpcdist::{self.api.text.decode()} ({self.data.n} B, "
                                f"{self.comm.c.name.decode()}, with {self.rank})")
        try:
            try:
                self.begin(seconds)
                (<Work> self.works[0]).wait_now(-1)
                refused = self.refusal()
                if not refused:
                    for work in self.works[1:]:
                        (<Work> work).wait_now(-1)
            except BaseException:
                self.give_up()
                raise
            if refused:
                self.let_go()
            elif self.call == HD_GET and self.short():
                memcpy(self.data.ptr, <char*> self.answer + sizeof(hd_answer), <size_t> self.data.n)
            return refused
        finally:
            if shown is not None:
                end_range(shown)

    cdef int begin(self, double seconds) except -1:
        """No Python code runs in here: all messages are begun, unless there is no memory for one."""
        cdef bint fetches = self.call == HD_GET
        forget_answered()
        enter(self.comm.c, True)
        try:
            self.receive(HD_WINDOW_ANSWER, self.answer, seconds)
            if not self.short():
                # Before the request: other threads ask too, and the rank waits for the data of a
                # request before it looks at the next one.
                self.post(&self.data, self.tag, HD_RECV if fetches else HD_SEND,
                          HD_WINDOW_FETCHES if fetches else HD_WINDOW_BRINGS, self.keep, seconds)
            self.send_request(seconds)
        finally:
            hd_comm_exit(self.comm.c)
        return 0

    cdef int receive(self, int tag_kind, bytearray into, double seconds) except -1:
        cdef hd_buf b
        as_bytes(&b, into, len(into))
        return self.post(&b, self.tag, HD_RECV, tag_kind, into, seconds)

    cdef int send_request(self, double seconds) except -1:
        cdef hd_buf b
        as_bytes(&b, self.asked, len(self.asked))
        return self.post(&b, 0, HD_SEND, HD_WINDOW_REQUEST, self.asked, seconds)

    cdef int post(self, hd_buf* b, int tag, int kind, int tag_kind, object keep, double seconds) except -1:
        """`seconds`: 0 is the group's timeout, less is none."""
        cdef hd_job* job = new_message(self.comm, b, self.rank, tag, kind, self.api, tag_kind)
        if seconds != 0:
            job.timeout = max(seconds, 0)
        self.works.append(start_message(self.comm, job, keep, keep, NULL))
        return 0

    cdef str refusal(self):
        """Why the rank has refused; "" if it was served."""
        cdef hd_answer a
        memcpy(&a, <char*> self.answer, sizeof(a))
        if a.number != self.number:
            return "it answered another request"
        if a.outcome == HD_SERVED:
            return ""
        if a.outcome == HD_NOT_THERE:
            return "it has withdrawn the memory"
        if a.outcome == HD_OUT_OF_RANGE:
            return "the request does not fit its memory"
        return "it has no memory for the data" if a.outcome == HD_NO_ROOM else "it has not received the data"

    # ---- without an answer ----

    cdef int let_go(self) except -1:
        for work in self.works:
            (<Work> work).let_go()
        return 0

    cdef int give_up(self) except -1:
        """The answer may still come, and with it the data of a long get: they are received, and dropped.

        Else they would stay with MPI, and the communicator with them. No Python code runs in here.
        """
        cdef list begun = self.works
        cdef Work first
        self.let_go()
        if len(begun) < (2 if self.short() else 3) or not hd_comm_enter(self.comm.c, True):
            return 0  # nothing was asked
        try:
            self.works, first = [], <Work> begun[0]
            if hd_job_state(first.j) != HD_DONE:  # it is being received
                self.late = first
            elif is_to_come(first):
                self.receive(HD_WINDOW_ANSWER, self.answer, -1)
                self.late = <Work> self.works[0]
            elif first.j.code != HD_OK or self.refusal():
                return 0
            if self.call == HD_GET and not self.short() and is_to_come(<Work> begun[1]):
                self.receive(HD_WINDOW_FETCHES, bytearray(self.data.n), -1)
            for work in self.works:
                (<Work> work).j.seen = 1
            self.keep = None
            given_up[self.number] = self
        finally:
            hd_comm_exit(self.comm.c)
        return 0

    cdef bint is_over(self) except -1:
        """Whether nothing comes any more, once it was given up."""
        if self.late is not None:
            if not self.late.done():
                return False
            if self.late.j.code != HD_OK or self.refusal():
                self.let_go()
                return True
        return all([(<Work> work).done() for work in self.works])


cdef void as_bytes(hd_buf* b, char* ptr, int64_t n) noexcept:
    b.ptr, b.n, b.dtype, b.ndim, b.shape, b.strides = ptr, n, HD_UINT8, 1, 0, 0
    b.dims[0] = n


cdef bint is_to_come(Work work) noexcept:
    """Whether MPI has given back the memory of a message that was given up before it came."""
    cdef hd_job* j = work.j
    return hd_job_state(j) == HD_DONE and j.code in (HD_ERR_TIMEOUT, HD_ERR_BACKEND) and not hd_p2p_unfinished(j)


cdef int forget_answered() except -1:
    """With their numbers modulo the tags, later requests must not meet what earlier ones wait for."""
    cdef Request one
    for number in list(given_up):
        one = given_up.get(number)
        if one is not None and one.is_over():
            given_up.pop(number, None)
    return 0
