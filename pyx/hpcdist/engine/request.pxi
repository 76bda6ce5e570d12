# What this rank asks of another one's window: see hd_window.h.

#: What a request asks for.
PUT, GET, ACCUMULATION = HD_PUT, HD_GET, HD_ACCUMULATE

cdef uint64_t requests = 0  # that this process has made
#: Number of a request -> it: those whose calls have returned, until nothing comes any more and whoever asked knows how
#: it ended.
cdef dict under_way = {}


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
        If an accumulation has no operation, or the tensor's type does not have it.
    """

    cdef Comm comm
    cdef Api api
    cdef int rank, call, tag
    cdef uint64_t number
    cdef int64_t window
    cdef hd_buf data  # as bytes
    cdef object keep
    cdef bytes asked
    cdef bytearray answer
    cdef list works  # for the answer; for data that come neither with it nor with the request; of the request
    cdef Py_ssize_t at  # of works: the first one whose end nobody has seen
    cdef bint over  # it has ended, or was given up
    cdef object error  # why it did not end well
    cdef bint seen, held, told  # the error is raised, if there is one; somebody has the Work; the error was written
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
        self.window = window
        memset(&q, 0, sizeof(q))
        if call == HD_ACCUMULATE:
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
        """Asks, and waits until the rank has answered: then the data are where they belong. To be called once.

        Parameters
        ----------
        seconds : float
            For the answer; 0 means the group's timeout.

        Raises
        ------
        DistBackendError
            The rank has refused it.
        DistTimeoutError, RankFailedError, DistMismatchError, KeyboardInterrupt
            There is no answer. What was asked for goes on, but into no memory of the tensor's, unless a note says so.
        """
        cdef object shown = self.show()
        cdef list begun = self.works
        self.seen = True
        try:
            try:
                self.begin(seconds)
                self.wait_for(-1)
                if self.error is not None:
                    raise self.error
            except BaseException as error:
                if not self.over:
                    self.give_up()
                self.warn(begun, error)
                raise
        finally:
            if shown is not None:
                end_range(shown)

    def start(self, double seconds, object tensor):
        """Asks. To be called once.

        Parameters
        ----------
        seconds : float
            For the answer; 0 means the group's timeout.
        tensor : tensor
            What the Work gives as result.

        Returns
        -------
        Work
            It ends when the rank has answered, as ask() does.
        """
        cdef object shown = self.show()
        cdef RequestWork work = RequestWork.__new__(RequestWork)
        try:
            try:
                self.begin(seconds)
            except BaseException:
                self.give_up()
                raise
            # No Python code runs between the last message and this.
            under_way[self.number] = self
            work.take(self, tensor)
            return work
        finally:
            if shown is not None:
                end_range(shown)

    cdef object show(self):
        if not profiled():
            return None
        return begin_range(f"hpcdist::{self.api.text.decode()} ({self.data.n} B, "
                           f"{self.comm.c.name.decode()}, with {self.rank})")

    cdef int begin(self, double seconds) except -1:
        """No Python code runs in here: all messages are begun, unless there is no memory for one."""
        cdef bint fetches = self.call == HD_GET
        look_after_some()
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

    # ---- its end ----

    cdef bint done(self) except -1:
        """Whether it has ended, well or not."""
        cdef Py_ssize_t at
        cdef Work one
        while not self.over:
            at = self.at
            one = <Work> self.works[at]
            if not one.done():
                return False
            self.note_end(at, one)
        return True

    cdef int wait_for(self, double limit) except -1:
        """Waits until it has ended, well or not; raises if the limit is over before, or a handler raises."""
        cdef Py_ssize_t at
        cdef int64_t until = 0 if limit < 0 else hd_now() + <int64_t> (min(limit, 1e9) * 1e9)
        cdef Work one
        while not self.over:
            at = self.at
            one = <Work> self.works[at]
            try:
                one.wait_now(limit if limit < 0 else max(0, <double> (until - hd_now()) * 1e-9))
            except DistError:
                if hd_job_state(one.j) != HD_DONE:
                    raise
            self.note_end(at, one)
        return 0

    cdef int note_end(self, Py_ssize_t at, Work one) except -1:
        """A message has ended. Several threads may see it."""
        cdef object error = one.failure()
        if error is None and at == 0:
            error = self.refusal()  # another thread may run meanwhile
        if self.over or self.at != at:
            return 0
        if error is not None:
            self.error = error
            self.give_up()
            return 0
        if at == 0 and self.call == HD_GET and self.short():
            memcpy(self.data.ptr, <char*> self.answer + sizeof(hd_answer), <size_t> self.data.n)
        self.at = at + 1
        if self.at == len(self.works):
            self.over = True
            if under_way:
                under_way.pop(self.number, None)
        return 0

    cdef object refusal(self):
        """The error, if the rank has not served it."""
        cdef hd_answer a
        cdef str why
        memcpy(&a, <char*> self.answer, sizeof(a))
        if a.number != self.number:
            why = "it answered another request"
        elif a.outcome == HD_SERVED:
            return None
        elif a.outcome == HD_NOT_THERE:
            why = "it has withdrawn the memory"
        elif a.outcome == HD_OUT_OF_RANGE:
            why = "the request does not fit its memory"
        elif a.outcome == HD_NO_ROOM:
            why = "it has no memory for the data"
        else:
            why = "it has not received the data"
        return DistBackendError(
            f"{self.api.text.decode()}: rank {self.rank} of group '{self.comm.c.name.decode()}' has refused it: {why} "
            f"(this is rank {self.comm.c.rank})"
        )

    # ---- without an answer ----

    cdef int give_up(self) except -1:
        """The answer may still come, and with it the data of a long get: they are received, and dropped.

        Else they would stay with MPI, and the communicator with them. No Python code runs in here.
        """
        cdef list begun = self.works
        cdef Work first
        self.over = True
        for work in begun:
            (<Work> work).let_go()
        if len(begun) < (2 if self.short() else 3) or not hd_comm_enter(self.comm.c, True):
            return 0  # nothing was asked
        try:
            self.works, first = [], <Work> begun[0]
            if hd_job_state(first.j) != HD_DONE:  # it is being received
                self.late = first
            elif is_to_come(first):
                self.receive(HD_WINDOW_ANSWER, self.answer, -1)
                self.late = <Work> self.works[0]
            elif not self.was_served(first):
                return 0
            if self.call == HD_GET and not self.short() and is_to_come(<Work> begun[1]):
                self.receive(HD_WINDOW_FETCHES, bytearray(self.data.n), -1)
            for work in self.works:
                (<Work> work).j.seen = 1
            self.keep = None
            under_way[self.number] = self
        finally:
            hd_comm_exit(self.comm.c)
        return 0

    cdef int warn(self, list begun, object error) except -1:
        """Says that MPI still writes what has begun to come."""
        if self.call == HD_GET and not self.short() and len(begun) > 1 and hd_p2p_unfinished((<Work> begun[1]).j):
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note("[hpcdist] what the get asked for has begun to come, and MPI may write to the tensor at "
                               "any later time: do not use it")
        return 0

    cdef bint was_served(self, Work answered) noexcept:
        cdef hd_answer a
        memcpy(&a, <char*> self.answer, sizeof(a))
        return answered.j.code == HD_OK and a.number == self.number and a.outcome == HD_SERVED

    cdef bint is_settled(self) except -1:
        """Whether nothing comes any more, and whoever asked knows how it ended."""
        if not self.done():
            return False
        if self.error is not None and not self.seen:
            if self.held or self.told:
                return False
            self.told = True
            PySys_WriteStderr(b"[hpcdist rank %d of %d] an operation failed and its Work was never waited for: %.600s\n",
                              self.comm.c.rank, self.comm.c.size, <bytes> str(self.error).encode())
            return False
        if self.late is not None:
            if not self.late.done():
                return False
            if not self.was_served(self.late):
                for work in self.works:
                    (<Work> work).let_go()
                return True
        return all([(<Work> work).done() for work in self.works])


cdef void as_bytes(hd_buf* b, char* ptr, int64_t n) noexcept:
    b.ptr, b.n, b.dtype, b.ndim, b.shape, b.strides = ptr, n, HD_UINT8, 1, 0, 0
    b.dims[0] = n


cdef bint is_to_come(Work work) noexcept:
    """Whether MPI has given back the memory of a message that was given up before it came."""
    cdef hd_job* j = work.j
    return hd_job_state(j) == HD_DONE and j.code in (HD_ERR_TIMEOUT, HD_ERR_BACKEND) and not hd_p2p_unfinished(j)


cdef int look_after_some() except -1:
    """Lets go of requests of which nothing comes any more; of some, so that many cost no more than a few.

    With their numbers modulo the tags, later ones must not meet what earlier ones wait for.
    """
    cdef Request one
    if not under_way:
        return 0
    for number in list(islice(under_way, 4)):
        one = under_way.get(number)
        if one is None or not one.is_settled():
            one = under_way.pop(number, None)
            if one is not None:
                under_way[number] = one  # behind the others; no thread runs in between
        else:
            under_way.pop(number, None)
    return 0


cdef class RequestWork(Work):
    """The Work of a request: see Request.start."""

    cdef Request request
    cdef list messages  # their jobs live as long as this

    def __dealloc__(self):
        if self.request is not None:
            self.request.held = False

    cdef int take(self, Request request, object tensor) except -1:
        self.request, self.messages = request, request.works
        request.held = True
        self.comm, self.outputs = request.comm, [tensor]
        self.follow()
        return 0

    cdef void follow(self) noexcept:
        """The Work's job is the message that is to end next."""
        cdef hd_job* before = self.j
        self.j = (<Work> self.messages[min(self.request.at, len(self.messages) - 1)]).j
        ref(self.j)
        if before != NULL:
            unref(before)

    cdef object failure(self):
        self.request.seen = True
        return self.request.error

    cdef bint succeeded(self) noexcept:
        return self.request.over and self.request.error is None

    cdef bint done(self):
        return self.request.done()

    cdef bint wait_now(self, double limit) except -1:
        self.request.wait_for(limit)
        if self.request.error is not None:
            raise self.failure()
        return True

    cdef void complete_future(self):
        try:
            while not self.request.done():
                self.follow()
                watched[<size_t> self.j] = self
                if hd_job_watch(self.j):
                    return
                with nogil:
                    hd_job_settle(self.j)
                watched.pop(<size_t> self.j, None)
        except Exception as error:  # no memory, for example
            if self.future is not None and not self.future.done():
                self.future.set_exception(error)
            return
        Work.complete_future(self)

    def cancel(self):
        """Raises ValueError: only a receive can be cancelled."""
        check_alive(None)
        raise ValueError("only a receive can be cancelled")


def settle(Comm comm, int rank, double limit):
    """Waits for what this process has begun to put into a rank's windows, or to combine with what is there.

    Parameters
    ----------
    limit : float
        Seconds for all of it; less than 0 is none but their own.

    Raises
    ------
    DistTimeoutError
        If the limit is over before. They go on.
    DistError
        What one of these has ended with, unless its Work has raised that. The others go on.
    """
    cdef Request one
    cdef int64_t until = hd_now() + <int64_t> (min(limit, 1e9) * 1e9)
    for each in list(under_way.values()):
        one = each
        if one.comm is comm and one.rank == rank and one.call != HD_GET and not one.seen:
            try:
                one.wait_for(limit if limit < 0 else max(0, <double> (until - hd_now()) * 1e-9))
            except DistTimeoutError:
                raise DistTimeoutError(
                    f"timeout after {limit:g} s in signal of group '{comm.c.name.decode()}' (this is rank {comm.c.rank} "
                    f"of {comm.c.size}): rank {rank} has not answered {one.api.text.decode()}, which was begun before "
                    "with async_op=True and goes on; there is no signal"
                ) from None
            if one.error is not None:
                one.seen = True
                raise one.error


def settle_window(Comm comm, int64_t window):
    """Waits for what this process has begun with a window; how it ended is for those who have the Works."""
    cdef Request one
    for each in list(under_way.values()):
        one = each
        if one.comm is comm and one.window == window:
            one.wait_for(-1)
