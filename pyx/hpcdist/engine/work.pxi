# Work: an operation in flight. The C job has two owners, the engine and the Work; the last one
# frees it.

cdef hd_job* orphans = NULL  # jobs whose last owner was a thread without the GIL; a lock-free stack


cdef extern from * nogil:
    """
    static void push_orphan(hd_job **head, hd_job *j)
    {
        j->next = __atomic_load_n(head, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(head, &j->next, j, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            ;
    }
    static hd_job *pop_orphans(hd_job **head) { return __atomic_exchange_n(head, NULL, __ATOMIC_ACQ_REL); }
    static void ref(hd_job *j) { __atomic_add_fetch(&j->refs, 1, __ATOMIC_RELAXED); }
    static int unref(hd_job *j) { return __atomic_sub_fetch(&j->refs, 1, __ATOMIC_ACQ_REL); }
    """
    void push_orphan(hd_job**, hd_job*)
    hd_job* pop_orphans(hd_job**)
    void ref(hd_job*)
    int unref(hd_job*)


cdef enum:
    SPARE_JOBS = 128  # as many as a window of messages has, twice

cdef hd_job* spare_jobs[SPARE_JOBS]  # of operations that have ended, for the next ones; with the GIL
cdef int spares = 0


cdef hd_job* new_job() except NULL:
    global spares
    cdef hd_job* j
    if orphans != NULL:
        bury(NULL)
    if spares:
        spares -= 1
        return spare_jobs[spares]
    j = <hd_job*> malloc(sizeof(hd_job))
    if j == NULL:
        raise MemoryError("no memory for an operation")
    j.room = NULL
    return j


cdef void free_job(hd_job* j) noexcept:
    global spares
    if hd_p2p_unfinished(j):  # MPI may still write there
        j.room = NULL
    if spares < SPARE_JOBS:
        spare_jobs[spares] = j
        spares += 1
        return
    free(j.room)
    free(j)


cdef void dispose(hd_job* j) noexcept:
    """Frees a job and releases its tensors; with the GIL."""
    cdef PyObject* keep = <PyObject*> j.keep
    cdef PyObject* group = <PyObject*> j.group
    # after a death that the job survives all operations in flight fail, and one error says so
    cdef bint told = j.code == HD_ERR_FAILED and j.comm != NULL and j.comm.session != NULL and hd_ft_on(j.comm.session)
    if j.code not in (HD_OK, HD_ERR_INTERRUPT, HD_ERR_CLOSED) and not j.seen and j.text != NULL and not told:
        PySys_WriteStderr(
            b"[hpcdist rank %d of %d] an operation failed and its Work was never waited for: %.600s\n",
            j.comm.rank, j.comm.size, j.text,
        )
    hd_job_clear(j)
    free_job(j)
    Py_DECREF(<object> keep)
    Py_DECREF(<object> group)


cdef int bury(void* arg) noexcept with gil:
    cdef hd_job* j = pop_orphans(&orphans)
    cdef hd_job* after
    while j != NULL:
        after = j.next
        dispose(j)
        j = after
    return 0


cdef void release_hook(hd_job* j) noexcept nogil:
    push_orphan(&orphans, j)
    Py_AddPendingCall(bury, NULL)  # when the queue is full, the next submission buries


hd_py.site = site_hook
hd_py.slow = slow_hook
hd_py.alone = alone_hook
hd_py.several = several_hook
hd_py.release = release_hook
hd_py.notify = hd_notify_push

cdef dict watched = {}  # address of a job -> its Work, until the future is completed
#: The threads that complete futures: one, and one more per callback that runs. True: it has begun.
cdef dict notifiers = {}
cdef int completing = 0  # how many of them run callbacks right now


def _complete_futures():
    global completing
    cdef hd_job* j
    cdef Work work
    thread = threading.current_thread()
    if thread not in notifiers and len(notifiers) > completing:
        return  # a handler's exception interrupted its start, and another one took its place
    notifiers[thread] = True
    while True:
        with nogil:
            j = hd_notify_next()
        if j == NULL:
            return
        completing += 1
        work = watched.pop(<size_t> j, None)
        if work is not None:
            work.complete_future()
        work = None
        completing -= 1
        if len(notifiers) - completing > 1:
            # another thread waits in place of this one: callbacks stay in order
            notifiers.pop(thread, None)
            return


cdef int provide_notifier() except -1:
    """Ensures that a thread can complete a future: a callback may wait for a future that it has made itself."""
    if notifiers and threading.current_thread() not in notifiers or len(notifiers) > completing:
        return 0
    thread = threading.Thread(target=_complete_futures, name="hpcdist-futures", daemon=True)
    notifiers[thread] = None  # before it runs a callback, which may need another one
    try:
        thread.start()
    except BaseException:
        if notifiers.get(thread) is None:  # it does not run, or not yet; after a handler's exception it may well
            notifiers.pop(thread, None)
        raise
    return 0


@cython.freelist(64)
cdef class Work:
    """An asynchronous operation.

    Returned by operations called with ``async_op=True`` and by :func:`isend` and :func:`irecv`. It
    owns the tensors until the operation is complete, even if the Work itself is dropped. Users do
    not create it.
    """

    cdef hd_job* j
    cdef Comm comm
    cdef object outputs  # a list, or a message's tensor
    cdef object future
    cdef object __weakref__

    def __init__(self):
        raise TypeError("a Work is made by an operation with async_op=True")

    def __dealloc__(self):
        if self.j == NULL:
            return
        if self.j.at != NULL and not hd_forked and hd_p2p_unwatch(self.j):
            unref(self.j)
        if unref(self.j) == 0:
            dispose(self.j)

    cdef object failure(self):
        if self.j == NULL or self.j.code == HD_OK:
            return None
        self.j.seen = 1
        if self.j.kind < HD_SEND and not self.j.comm.freed:
            hd_lane_seen(self.j.comm)
        return error_of_job(self.j)

    cdef bint succeeded(self) noexcept:
        return self.j == NULL or (hd_job_state(self.j) == HD_DONE and self.j.code == HD_OK)

    cdef bint done(self):
        if self.j == NULL:
            return True
        if self.j.kind >= HD_SEND and not hd_forked and hd_comm_enter(self.j.comm, 0):
            hd_p2p_test(self.j)
            hd_comm_exit(self.j.comm)
        return hd_job_state(self.j) == HD_DONE

    def wait(self, timeout=None):
        """Waits until the operation is complete on this rank.

        Parameters
        ----------
        timeout : float or datetime.timedelta, optional
            Seconds to wait at most. Without it, or with a negative one, which torch passes for none, the group's
            timeout ends the operation itself.

        Returns
        -------
        bool
            True.

        Raises
        ------
        DistTimeoutError
            ``timeout`` passed (the operation goes on and can be waited for again), or the group's timeout did.
        DistMismatchError, RankFailedError, DistBackendError
            The operation failed.
        KeyboardInterrupt
            Ctrl-C, or any exception of another signal handler; the operation goes on.

        Notes
        -----
        Any rank may call it, in any order.
        """
        cdef double limit
        if timeout is None and not hd_forked and self.succeeded():
            return True
        limit = seconds_of(timeout)
        check_alive(None)
        if self.j == NULL:
            return True
        if not profiled() or self.done():
            return self.wait_now(limit)
        begun = begin_range(f"hpcdist::wait ({self.j.api.decode()}, {self.j.comm.name.decode()})")
        try:
            return self.wait_now(limit)
        finally:
            end_range(begun)

    cdef bint ended_within(self, double seconds) except -1:
        try:
            return self.wait_now(seconds)
        except DistTimeoutError:
            if hd_job_state(self.j) != HD_DONE:
                return False
            if self.j.code != HD_OK:
                raise self.failure()
            return True

    cdef bint wait_now(self, double limit) except -1:
        cdef double step, waited = 0
        cdef int rc = 0
        cdef hd_job* j = self.j
        if hd_job_state(j) == HD_DONE:  # even if the group has been destroyed since
            rc = j.code
        elif j.kind >= HD_SEND:
            enter(j.comm, False)
            if hd_p2p_soon(j):
                rc = j.code
                hd_comm_exit(j.comm)
            else:
                with nogil:
                    rc = hd_p2p_wait(j, limit, 1)
                    hd_comm_exit(j.comm)
            if rc == HD_ERR_INTERRUPT and PyErr_Occurred() != NULL:
                propagate()
        else:
            if waiting != NULL and not self.done():
                refuse_in_handler(self.comm, b"wait")
            while True:
                step = 0.05 if limit < 0 or limit - waited > 0.05 else limit - waited
                enter(j.comm, False)
                with nogil:
                    rc = hd_job_wait(j, step if step > 0 else 0)
                    hd_comm_exit(j.comm)
                PyErr_CheckSignals()
                if rc:
                    rc = j.code
                    break
                waited += step
                if 0 <= limit <= waited:
                    rc = -1
                    break
        if rc == -1 and hd_job_state(j) == HD_DONE:  # it ended when time was up
            rc = j.code
        if rc == -1:
            raise DistTimeoutError(
                f"wait({limit:g} s) ended before {j.api.decode()} of group '{j.comm.name.decode()}' did (this is rank "
                f"{j.comm.rank} of {j.comm.size}); it goes on and can be waited for again"
            )
        if rc:
            raise self.failure()
        return True

    def is_completed(self):
        """Whether the operation has ended, well or not, without waiting.

        Returns
        -------
        bool
        """
        check_alive(None)
        return self.done()

    def is_success(self):
        """Whether the operation has ended without an error.

        Returns
        -------
        bool
        """
        check_alive(None)
        return self.done() and self.failure() is None

    def exception(self):
        """The error the operation ended with.

        Returns
        -------
        Exception or None
            None while it runs and when it succeeded.
        """
        check_alive(None)
        return self.failure() if self.done() else None

    def result(self):
        """The tensors the operation writes.

        Returns
        -------
        list
            The output tensors that were passed in; valid after :meth:`wait`.
        """
        return list(self.outputs) if type(self.outputs) is list else [self.outputs]

    def source_rank(self):
        """The sender of the message that a receive has received.

        Returns
        -------
        int
            Rank in the group; this rank for a send; -1 for a collective.
        """
        check_alive(None)
        return self.j.message.source if self.j != NULL and self.done() else -1

    _source_rank = source_rank   # torch's other name for it

    def cancel(self):
        """Cancels a receive that nothing has arrived for, so that it cannot swallow a later message.

        Returns
        -------
        bool
            True if it was cancelled: the tensor is unchanged, and :meth:`wait` raises. False if it
            is complete.

        Raises
        ------
        ValueError
            For anything but a receive: other operations cannot be cancelled.
        """
        cdef int taken = -1
        check_alive(None)
        if self.j == NULL or self.j.kind != HD_RECV:
            raise ValueError("only a receive can be cancelled")
        if hd_job_state(self.j) == HD_DONE:
            taken = 0
        while taken < 0:  # while its message is on its way
            enter(self.j.comm, False)
            with nogil:
                taken = hd_p2p_take_back(self.j, 0.05)
                hd_comm_exit(self.j.comm)
            PyErr_CheckSignals()
        self.j.seen = 1
        return bool(taken)

    def take_back(self, list kept):
        """Cancels a receive; appends it to a list if its message has come or is on its way.

        For code that a signal handler's exception has interrupted: no other handler runs meanwhile.

        Parameters
        ----------
        kept : list of Work
        """
        cdef int taken = 0
        if self.j == NULL or self.j.kind != HD_RECV or hd_forked:
            return
        if hd_job_state(self.j) != HD_DONE and hd_comm_enter(self.j.comm, False):
            with nogil:
                taken = hd_p2p_take_back(self.j, 0.05)
                hd_comm_exit(self.j.comm)
        self.j.seen = 1
        if taken < 0 or not taken and self.j.code == HD_OK:
            kept.append(self)

    def let_go(self):
        """Cancels a receive, or gives up a send, whose tensor MPI may read for ever. For code like take_back's."""
        if self.j == NULL or self.j.kind < HD_SEND or hd_forked:
            return
        if self.j.kind == HD_RECV:
            self.take_back([])
        elif hd_job_state(self.j) != HD_DONE and hd_comm_enter(self.j.comm, False):
            with nogil:
                hd_p2p_give_up(self.j)
                hd_comm_exit(self.j.comm)
        self.j.seen = 1

    def synchronize(self):
        """Waits, like :meth:`wait` without a timeout (on the host, that makes results visible)."""
        self.wait()

    def block_current_stream(self):
        """Makes the current stream wait; on the host that is :meth:`wait`."""
        self.wait()

    cdef void complete_future(self):
        try:
            if self.future is None or self.future.done():
                return
            error = self.failure()
            if error is None:
                self.future.set_result(self.result())
            else:
                self.future.set_exception(error)
        except Exception:
            # A user's callback may raise; torch keeps the exception in the future it made for the
            # callback.
            sys.excepthook(*sys.exc_info())

    def get_future(self):
        """A future that is completed with the operation.

        Returns
        -------
        torch.futures.Future
            Its value is the list of output tensors; ``.then`` callbacks run on a thread of hpcdist,
            or at once if the operation is already complete.
        """
        import torch

        check_alive(None)
        if self.future is not None:
            return self.future
        future = torch.futures.Future()
        if not self.done():
            provide_notifier()
        # Both may have raised, or let another thread in. From here on no Python code runs until it
        # is certain that somebody completes the future.
        if self.future is not None:
            return self.future
        if not self.done():
            watched[<size_t> self.j] = self
            self.future = future
            if hd_job_watch(self.j):
                return future
            with nogil:
                hd_job_settle(self.j)
            watched.pop(<size_t> self.j, None)
        self.future = future
        try:
            self.complete_future()
        except BaseException:  # of a signal handler
            if self.future is future and not future.done():
                self.future = None
            raise
        return future

    def get_future_result(self):
        """A future of how the operation ends.

        Returns
        -------
        torch.futures.Future
            Its value is a ``WorkResult`` of torch: SUCCESS, TIMEOUT or COMM_ERROR.
        """
        from torch._C._distributed_c10d import WorkResult

        def judge(future):
            try:
                future.value()
            except DistTimeoutError:
                return WorkResult.TIMEOUT
            except Exception:
                return WorkResult.COMM_ERROR
            return WorkResult.SUCCESS

        return self.get_future().then(judge)

    @property
    def timeout(self):
        """The time after which the operation fails if it has not ended, as it was when it began."""
        return timedelta(seconds=self.j.timeout if self.j != NULL else self.comm.c.timeout)

    def __repr__(self):
        if self.j == NULL:
            return "<hpcdist.Work, complete>"
        if hd_forked:
            return f"<hpcdist.Work {self.j.api.decode()}, of the process that this one was forked from>"
        state = "running" if not self.done() else "complete" if self.failure() is None else "failed"
        return f"<hpcdist.Work {self.j.api.decode()} of group '{self.j.comm.name.decode()}', {state}>"


cdef Work finished_work(Comm comm, list outputs):
    cdef Work work = Work.__new__(Work)
    work.comm = comm
    work.outputs = outputs
    return work
