# What one call to NCCL enqueues on a stream, for the communicator that it is made on.

cdef class Operations:
    """The operations of a :class:`Communicator`.

    Addresses are integers, counts are elements, and codes are NCCL's. Each returns when NCCL has
    enqueued it.
    """

    cdef ncclComm_t comm
    cdef const hd_nccl* nccl
    cdef hd_guard* guard
    cdef readonly int rank
    cdef readonly int size
    cdef readonly bint blocking
    cdef readonly str state
    cdef public double timeout
    cdef dict premul

    def __init__(self):
        raise TypeError("communicators come from Communicator.init, split and shrink")

    @cython.final
    cdef int alive(self) except -1:
        unforked()
        if self.failed:
            self.state = "aborted"
            raise trouble(self.guard, "")
        if self.state != "ready":
            raise DistBackendError(f"this communicator of NCCL (rank {self.rank} of {self.size}) has been {self.state}")
        return 0

    @cython.final
    cdef str words(self):
        """NCCL's text about its last error."""
        text = ""
        if hd_guard_enter(self.guard) == 0:
            text = last_words(self.comm)
        hd_guard_leave(self.guard)
        return text

    @cython.final
    cdef int settle(self, str what, double end) except -1:
        """Wait until it is no longer in progress; with blocking=1 it never is."""
        cdef int state
        cdef double left
        while not self.blocking:
            left = end - time.monotonic()
            with nogil:
                state = hd_guard_enter(self.guard)
                if state == 0:
                    state = hd_nccl_settle(self.nccl, self.comm, 0.05 if left > 0.05 else left)
                hd_guard_leave(self.guard)
            self.alive()
            if state == HD_NCCL_SUCCESS:
                return 0
            if state != HD_NCCL_IN_PROGRESS:
                raise failure(what, state, self.words())
            PyErr_CheckSignals()
            if left <= 0:
                raise DistTimeoutError(
                    f"{what} (rank {self.rank} of {self.size}) was late: another rank has not arrived, or died"
                )
        return 0

    @cython.final
    cdef int after(self, str what, int rc) except -1:
        if rc == HD_NCCL_SUCCESS:
            return 0
        if rc == HD_NCCL_IN_PROGRESS:
            if hd_nccl_depth == 0:
                self.settle(what, time.monotonic() + self.timeout)
            return 0
        self.alive()
        self.guard.raised = 1
        raise failure(f"{what} (rank {self.rank} of {self.size})", rc, self.words())

    @property
    def failed(self):
        """Whether the watchdog has aborted it."""
        return hd_guard_failed(self.guard) not in (0, HD_WATCH_ABORTED)

    def premul_sum(self, double factor, int dtype):
        """The operation that multiplies by a factor before it sums.

        Parameters
        ----------
        factor : float
            The multiplier, rounded to the element type.
        dtype : int
            ncclDataType_t: one of the floats.

        Returns
        -------
        int
            An ncclRedOp_t of this communicator; the last 64 are kept.
        """
        cdef int made = -1, rc
        cdef char[8] scalar
        cdef bytes data
        self.alive()
        found = self.premul.pop((factor, dtype), None)
        if found is None:
            data = scalar_of(factor, dtype)
            memcpy(scalar, <const char*> data, len(data))
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.premul_sum(&made, scalar, dtype, 1, self.comm)
            hd_guard_leave(self.guard)
            self.after("ncclRedOpCreatePreMulSum", rc)
            found = made
        self.premul[(factor, dtype)] = found
        if len(self.premul) > _PREMUL_KEPT and hd_nccl_depth == 0:
            oldest = next(iter(self.premul))
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.op_destroy(self.premul.pop(oldest), self.comm)
            hd_guard_leave(self.guard)
            self.after("ncclRedOpDestroy", rc)
        return found

    def all_reduce(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int op, uintptr_t stream):
        """Enqueue ncclAllReduce; addresses, elements, ncclDataType_t, ncclRedOp_t, stream."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.all_reduce(<void*> send, <void*> recv, count, dtype, op, self.comm, <hd_stream> stream)
            hd_guard_leave(self.guard)
        self.after("ncclAllReduce", rc)

    def reduce(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int op, int root, uintptr_t stream):
        """Enqueue ncclReduce; `recv` is used on `root` only."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.reduce(<void*> send, <void*> recv, count, dtype, op, root, self.comm, <hd_stream> stream)
            hd_guard_leave(self.guard)
        self.after("ncclReduce", rc)

    def broadcast(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int root, uintptr_t stream):
        """Enqueue ncclBroadcast; `send` is used on `root` only."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.broadcast(<void*> send, <void*> recv, count, dtype, root, self.comm, <hd_stream> stream)
            hd_guard_leave(self.guard)
        self.after("ncclBroadcast", rc)

    def all_gather(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, uintptr_t stream):
        """Enqueue ncclAllGather of `count` elements from each rank."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.all_gather(<void*> send, <void*> recv, count, dtype, self.comm, <hd_stream> stream)
            hd_guard_leave(self.guard)
        self.after("ncclAllGather", rc)

    def reduce_scatter(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int op, uintptr_t stream):
        """Enqueue ncclReduceScatter; each rank receives `count` elements."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.reduce_scatter(<void*> send, <void*> recv, count, dtype, op, self.comm, <hd_stream> stream)
            hd_guard_leave(self.guard)
        self.after("ncclReduceScatter", rc)

    def send(self, uintptr_t data, size_t count, int dtype, int peer, uintptr_t stream):
        """Enqueue ncclSend."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.send(<void*> data, count, dtype, peer, self.comm, <hd_stream> stream)
            hd_guard_leave(self.guard)
        self.after("ncclSend", rc)

    def recv(self, uintptr_t data, size_t count, int dtype, int peer, uintptr_t stream):
        """Enqueue ncclRecv."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.recv(<void*> data, count, dtype, peer, self.comm, <hd_stream> stream)
            hd_guard_leave(self.guard)
        self.after("ncclRecv", rc)

    def all_to_all(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, uintptr_t stream):
        """Enqueue an exchange of `count` elements with each rank: ncclAlltoAll, or sends and receives before 2.28."""
        cdef int rc
        cdef int peer
        cdef size_t step = count * <size_t> ITEMSIZES[dtype]
        self.alive()
        if self.nccl.all_to_all != NULL:
            with nogil:
                rc = hd_guard_enter(self.guard)
                if rc == 0:
                    rc = self.nccl.all_to_all(<void*> send, <void*> recv, count, dtype, self.comm, <hd_stream> stream)
                hd_guard_leave(self.guard)
            self.after("ncclAlltoAll", rc)
            return
        with Group(self):
            for peer in range(self.size):
                self.send(send + peer * step, count, dtype, peer, stream)
                self.recv(recv + peer * step, count, dtype, peer, stream)

    def gather(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int root, uintptr_t stream):
        """Enqueue a gather onto `root`: ncclGather, or sends and receives before 2.28."""
        cdef int rc
        cdef int peer
        cdef size_t step = count * <size_t> ITEMSIZES[dtype]
        self.alive()
        if self.nccl.gather != NULL:
            with nogil:
                rc = hd_guard_enter(self.guard)
                if rc == 0:
                    rc = self.nccl.gather(<void*> send, <void*> recv, count, dtype, root, self.comm, <hd_stream> stream)
                hd_guard_leave(self.guard)
            self.after("ncclGather", rc)
            return
        with Group(self):
            self.send(send, count, dtype, root, stream)
            if self.rank == root:
                for peer in range(self.size):
                    self.recv(recv + peer * step, count, dtype, peer, stream)

    def scatter(self, uintptr_t send, uintptr_t recv, size_t count, int dtype, int root, uintptr_t stream):
        """Enqueue a scatter from `root`: ncclScatter, or sends and receives before 2.28."""
        cdef int rc
        cdef int peer
        cdef size_t step = count * <size_t> ITEMSIZES[dtype]
        self.alive()
        if self.nccl.scatter != NULL:
            with nogil:
                rc = hd_guard_enter(self.guard)
                if rc == 0:
                    rc = self.nccl.scatter(<void*> send, <void*> recv, count, dtype, root, self.comm, <hd_stream> stream)
                hd_guard_leave(self.guard)
            self.after("ncclScatter", rc)
            return
        with Group(self):
            if self.rank == root:
                for peer in range(self.size):
                    self.send(send + peer * step, count, dtype, peer, stream)
            self.recv(recv, count, dtype, root, stream)

    def register(self, uintptr_t data, size_t nbytes):
        """Register memory for faster transfers (2.19).

        Returns
        -------
        int
            Handle for :meth:`deregister`.
        """
        cdef void* handle = NULL
        cdef int rc
        self.alive()
        if self.nccl.comm_register == NULL:
            raise too_old("ncclCommRegister", "2.19")
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.comm_register(self.comm, <void*> data, nbytes, &handle)
            hd_guard_leave(self.guard)
        self.after("ncclCommRegister", rc)
        return <uintptr_t> handle

    def deregister(self, uintptr_t handle):
        """Undo :meth:`register`."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.comm_deregister(self.comm, <void*> handle)
            hd_guard_leave(self.guard)
        self.after("ncclCommDeregister", rc)

    def window_register(self, uintptr_t data, size_t nbytes, bint symmetric=False):
        """Register memory that all ranks have, for operations that use it in place (2.27); all ranks call it.

        Returns
        -------
        int
            Handle for :meth:`window_deregister`.
        """
        cdef void* handle = NULL
        cdef int rc, flags = 1 if symmetric else 0
        self.alive()
        if self.nccl.window_register == NULL:
            raise too_old("ncclCommWindowRegister", "2.27")
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.window_register(self.comm, <void*> data, nbytes, &handle, flags)
            hd_guard_leave(self.guard)
        self.after("ncclCommWindowRegister", rc)
        return <uintptr_t> handle

    def window_deregister(self, uintptr_t handle):
        """Undo :meth:`window_register`."""
        cdef int rc
        self.alive()
        with nogil:
            rc = hd_guard_enter(self.guard)
            if rc == 0:
                rc = self.nccl.window_deregister(self.comm, <void*> handle)
            hd_guard_leave(self.guard)
        self.after("ncclCommWindowDeregister", rc)
