# Communicator: one ncclComm_t, from its making to its end; operations.pxi has what it does.

@cython.final
cdef class Communicator(Operations):
    """An NCCL communicator; made by :meth:`init`, :meth:`split` and :meth:`shrink`.

    One thread at a time may use it, except for :meth:`abort`, :meth:`destroy` and
    :meth:`async_error`. It is not freed with the object: NCCL would wait for the other ranks. Call
    :meth:`destroy` or :meth:`abort`. Both give calls of other threads time to return from NCCL
    first, and later calls raise.

    Attributes
    ----------
    rank, size : int
        This process's rank, and the number of ranks.
    blocking : bool
        False if it was made with blocking=0: calls return before they are done, and are waited for
        here.
    state : str
        ``"ready"``, ``"finalized"``, ``"destroyed"`` or ``"aborted"``.
    timeout : float
        Seconds that an operation on a communicator with blocking=0 may take to be enqueued.
    """

    def __dealloc__(self):
        hd_guard_put(self.guard)

    @staticmethod
    def init(unique, int size, int rank, bint blocking=True, double timeout=DEFAULT_TIMEOUT):
        """Make a communicator; all its ranks call it.

        Parameters
        ----------
        unique : bytes or list of bytes
            From :func:`unique_id` of one of them. Several, from ranks spread evenly, let a large
            number of ranks meet at several places (``ncclCommInitRankScalable``, 2.23).
        size, rank : int
            The number of ranks, and this one.
        blocking : bool
            With True NCCL itself waits for the others, without a limit. With False the time is kept
            here.
        timeout : float
            Seconds for the others to arrive, with ``blocking=False``.

        Returns
        -------
        Communicator

        Raises
        ------
        ValueError
            If the identity is invalid.
        DistBackendError, RankFailedError
            What NCCL reports.
        DistTimeoutError
            If the others do not arrive in time; what was begun has been aborted.
        """
        cdef const hd_nccl* nccl = functions()
        cdef hd_nccl_id first
        cdef hd_nccl_id* known
        cdef hd_nccl_config config
        cdef ncclComm_t comm = NULL
        cdef int rc, n
        several = list(unique) if isinstance(unique, (list, tuple)) else [unique]
        n = len(several)
        for each in several:
            if len(each) != sizeof(first):
                raise ValueError(f"an ncclUniqueId has {sizeof(first)} bytes, not {len(each)}")
        if not n:
            raise ValueError("there is no ncclUniqueId")
        if n > 1 and nccl.init_rank_scalable == NULL:
            raise too_old("ncclCommInitRankScalable", "2.23")
        cdef bytes data = b"".join(several)
        known = <hd_nccl_id*> <char*> data
        memcpy(&first, known, sizeof(first))
        configure(&config, blocking)
        with nogil:
            if n > 1:
                rc = nccl.init_rank_scalable(&comm, size, rank, n, known, &config)
            else:
                rc = nccl.init_rank_config(&comm, size, first, rank, &config)
        what = f"{'ncclCommInitRankScalable' if n > 1 else 'ncclCommInitRankConfig'} (rank {rank} of {size})"
        return adopt(comm, rc, what, size, rank, blocking, timeout)

    def named(self, str where):
        """Set its owner, for messages: "of the group 'world' on rank 0"."""
        cdef bytes text = where.encode()
        hd_guard_name(self.guard, text)

    def noted(self, beside):
        """Note its operations in the flight recorder; before its first one.

        Parameters
        ----------
        beside : hpcdist._engine.Beside or None
            The group's place there; None: they are not noted.
        """
        if beside is not None:
            hd_guard_beside(self.guard, <hd_beside*> <uintptr_t> beside.address)

    def split(self, int color, int key, double timeout=DEFAULT_TIMEOUT):
        """Divide the communicator; all its ranks call it.

        Parameters
        ----------
        color : int
            Ranks of one color share a new communicator; -1: this rank gets none.
        key : int
            Order of the ranks in it.
        timeout : float
            Seconds, with ``blocking=False``.

        Returns
        -------
        Communicator or None
        """
        cdef hd_nccl_config config
        cdef ncclComm_t made = NULL
        cdef int rc
        self.alive()
        configure(&config, self.blocking)
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.split(self.comm, color, key, &made, &config)
            hd_guard_leave(self.guard)
        end = time.monotonic() + timeout
        self.after_making("ncclCommSplit", rc, end)
        if color < 0:
            return None
        return adopt(made, rc, "ncclCommSplit", 0, 0, self.blocking, timeout)

    def shrink(self, exclude, bint abort=False, double timeout=DEFAULT_TIMEOUT):
        """A communicator of the remaining ranks; only they call it.

        Parameters
        ----------
        exclude : iterable of int
            Ranks to exclude.
        abort : bool
            Stop the operations in flight first, because an excluded rank has failed.
        timeout : float
            Seconds, with ``blocking=False``.

        Returns
        -------
        Communicator

        Raises
        ------
        DistBackendError
            Also if this NCCL is older than 2.27.
        ValueError
            If there are too many, or one is this rank or not in the communicator.
        """
        cdef hd_nccl_config config
        cdef ncclComm_t made = NULL
        cdef int[1024] gone
        cdef int rc, flags = 1 if abort else 0
        cdef int n = 0
        self.alive()
        if self.nccl.shrink == NULL:
            raise too_old("ncclCommShrink", "2.27")
        for each in sorted(set(exclude)):
            if n == 1024 or not 0 <= each < self.size or each == self.rank:
                raise ValueError(f"cannot leave out rank {each}: this is rank {self.rank} of {self.size}, and at most "
                                 "1024 ranks can go at a time")
            gone[n] = each
            n += 1
        configure(&config, self.blocking)
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.shrink(self.comm, gone, n, &made, &config, flags)
            hd_guard_leave(self.guard)
        self.after_making("ncclCommShrink", rc, time.monotonic() + timeout)
        return adopt(made, rc, "ncclCommShrink", 0, 0, self.blocking, timeout)

    cdef int after_making(self, str what, int rc, double end) except -1:
        if rc != HD_NCCL_SUCCESS and rc != HD_NCCL_IN_PROGRESS:
            raise failure(f"{what} (rank {self.rank} of {self.size})", rc, self.words())
        self.settle(what, end)
        return 0

    def async_error(self):
        """The error since the last call, without waiting. Any thread may ask.

        Returns
        -------
        Exception or None
            None also while a communicator with blocking=0 is in progress.
        """
        cdef int state = HD_NCCL_SUCCESS, rc
        unforked()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.async_error(self.comm, &state)
            hd_guard_leave(self.guard)
        if self.failed:
            return trouble(self.guard, "")
        if hd_guard_taken(self.guard):
            return None
        if rc == HD_NCCL_SUCCESS:
            rc = state
        if rc == HD_NCCL_SUCCESS or rc == HD_NCCL_IN_PROGRESS:
            return None
        return failure(f"an operation in flight (rank {self.rank} of {self.size})", rc, self.words())

    def abort(self):
        """Stop the operations in flight and free the communicator, without the other ranks. Any thread may call it.

        The operations in flight have no result: their handles raise.
        """
        unforked()
        if not hd_guard_take(self.guard):  # another thread or the watchdog does so
            with nogil:
                hd_guard_await_freed(self.guard)
            if hd_guard_failed(self.guard):
                self.state = "aborted"
            return
        self.state = "aborted"
        self.end()

    cdef int end(self) except -1:
        """Abort the communicator that this thread has taken."""
        cdef int rc
        self.guard.raised = 1
        with nogil:
            hd_guard_lose(self.guard, HD_WATCH_ABORTED, b"", b"this process has aborted its communicator")
            hd_guard_empty(self.guard)  # a call that does not return waits for another rank: abort() wakes it
            rc = self.nccl.abort(self.comm)
            hd_guard_set_freed(self.guard)
        if rc != HD_NCCL_SUCCESS and rc != HD_NCCL_IN_PROGRESS:
            raise failure(f"ncclCommAbort (rank {self.rank} of {self.size})", rc)
        return 0

    def finalize(self, double timeout=DEFAULT_TIMEOUT):
        """Wait for all operations on all ranks; all ranks call it. No operation can be started afterwards.

        Parameters
        ----------
        timeout : float
            Seconds, with ``blocking=False``.
        """
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.finalize(self.comm)
            hd_guard_leave(self.guard)
        if rc != HD_NCCL_SUCCESS and rc != HD_NCCL_IN_PROGRESS:
            raise failure(f"ncclCommFinalize (rank {self.rank} of {self.size})", rc, self.words())
        self.settle("ncclCommFinalize", time.monotonic() + timeout)
        self.state = "finalized"

    def destroy(self):
        """Free the communicator on this rank. Safe to call again.

        Raises
        ------
        DistTimeoutError
            If another thread's call does not return from NCCL; the communicator has been aborted
            then.
        """
        cdef int rc, left
        cdef bint ready = self.state == "ready"
        unforked()
        if not hd_guard_take(self.guard):
            if hd_guard_failed(self.guard):
                self.state = "aborted"
            return  # another thread or the watchdog has done so
        self.state = "destroyed"
        with nogil:
            left = hd_guard_empty(self.guard)
        if left:
            self.state = "aborted"
            self.end()
            raise DistTimeoutError(
                f"this communicator of NCCL (rank {self.rank} of {self.size}) was destroyed while another thread was "
                "inside a call of it that did not return: it has been aborted. Wait for what other threads do first"
            )
        if ready:
            for made in self.premul.values():
                self.nccl.op_destroy(made, self.comm)
        with nogil:
            rc = self.nccl.destroy(self.comm)
            hd_guard_set_freed(self.guard)
        if rc != HD_NCCL_SUCCESS and rc != HD_NCCL_IN_PROGRESS:
            raise failure(f"ncclCommDestroy (rank {self.rank} of {self.size})", rc)

    @property
    def unheard(self):
        """Whether the watchdog has aborted it, and no call has raised that error so far."""
        return self.failed and not self.guard.raised

    @property
    def handle(self):
        """The ncclComm_t as an integer; 0 when there is none any more."""
        return 0 if hd_guard_taken(self.guard) or hd_guard_failed(self.guard) else <uintptr_t> self.comm

    @property
    def device(self):
        """Index of the CUDA device it was made on."""
        cdef int found = -1, rc
        self.alive()
        rc = hd_guard_enter(self.guard)
        if rc == 0:
            rc = self.nccl.device(self.comm, &found)
        hd_guard_leave(self.guard)
        self.after("ncclCommCuDevice", rc)
        return found

    def revoke(self):
        """Stop the operations in flight on this rank, and accept no more (2.28); :meth:`shrink` is still possible."""
        cdef int rc
        self.alive()
        if self.nccl.revoke == NULL:
            raise too_old("ncclCommRevoke", "2.28")
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.revoke(self.comm, 0)
            hd_guard_leave(self.guard)
        self.after("ncclCommRevoke", rc)

    def __repr__(self):
        return f"<NCCL communicator, rank {self.rank} of {self.size}, {self.state}>"
