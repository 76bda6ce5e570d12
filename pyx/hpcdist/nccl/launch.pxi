# How every operation of a group over NCCL is started: checks, streams, NCCL, watchdog.

# An operation that is one NCCL call.
cdef struct one_call:
    int kind
    void* send
    void* recv
    size_t count
    int dtype
    int how  # operation of a reduction, or root of a broadcast

cdef enum:
    ALL_REDUCE_CALL, BROADCAST_CALL, ALL_GATHER_CALL, REDUCE_SCATTER_CALL

cdef tuple CALLS = ("ncclAllReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter")
cdef tuple KINDS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
cdef dict names = {}  # name of an operation -> its bytes, which operations in flight point to; never emptied


cdef int call(Communicator comm, one_call* c, hd_stream stream) noexcept nogil:
    cdef const hd_nccl* nccl = comm.nccl
    cdef int rc = hd_guard_enter(comm.guard)
    if rc == 0:
        if c.kind == ALL_REDUCE_CALL:
            rc = nccl.all_reduce(c.send, c.recv, c.count, c.dtype, c.how, comm.comm, stream)
        elif c.kind == BROADCAST_CALL:
            rc = nccl.broadcast(c.send, c.recv, c.count, c.dtype, c.how, comm.comm, stream)
        elif c.kind == ALL_GATHER_CALL:
            rc = nccl.all_gather(c.send, c.recv, c.count, c.dtype, comm.comm, stream)
        else:
            rc = nccl.reduce_scatter(c.send, c.recv, c.count, c.dtype, c.how, comm.comm, stream)
    hd_guard_leave(comm.guard)
    return rc


@cython.final
cdef class Place:
    """A group's objects for one device."""

    cdef hd_gpu* gpu
    cdef int index
    cdef object number     # the index, for Python
    cdef object stream     # the group's own; None before the first asynchronous operation
    cdef uintptr_t own     # its handle


cdef class Launch:
    """Starts the operations of a group over NCCL.

    Attributes
    ----------
    rank, size : int
        This process's rank in the group, and the group's size.
    name : str
        Of the group.
    timeout : float
        Seconds that an operation has; may also be set to a duration.
    seq : int
        Operations begun.
    """

    cdef public int rank
    cdef public int size
    cdef public str name
    cdef public unsigned long long seq
    cdef public dict _comms      # index of a device -> communicator of all ranks
    cdef public dict _pairs      # rank -> communicator of this rank and that one, for messages
    cdef public bint _freed
    cdef public bint _aborted
    cdef public bint _checks
    cdef public bint _blocking_wait
    cdef public object _recorder  # the recorder of operations, or None
    cdef readonly object _runtime
    cdef readonly object _lock
    cdef double limit
    cdef object acquire
    cdef object release
    cdef object current          # index of a device -> handle of its current stream
    cdef int memory
    cdef str device_type
    cdef hd_cuda cuda
    cdef dict places
    cdef Place last
    cdef hd_watched* first       # in flight, in the order of their starts
    cdef hd_watched* newest

    def __cinit__(self, *args, **kwargs):
        self._comms = {}
        self._pairs = {}
        self.places = {}
        self._lock = threading.RLock()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __dealloc__(self):
        self.forget()

    @property
    def timeout(self):
        return self.limit

    @timeout.setter
    def timeout(self, value):
        self.limit = seconds_of(value)
        if self.limit < 0:
            self.limit = 1e9

    def use(self, runtime):
        """Use streams and events of a runtime of :mod:`hpcdist.backends.cuda`."""
        cdef uintptr_t address
        cdef dict given = runtime.functions
        hd_watch_forks()
        self._runtime = runtime
        self.current = runtime.raw
        self.memory = runtime.memory
        self.device_type = runtime.name
        address = given["create"]
        self.cuda.create = <int (*)(void**, unsigned) noexcept nogil> address
        address = given["record"]
        self.cuda.record = <int (*)(void*, void*) noexcept nogil> address
        address = given["query"]
        self.cuda.query = <int (*)(void*) noexcept nogil> address
        address = given["wait"]
        self.cuda.wait = <int (*)(void*, void*, unsigned) noexcept nogil> address
        address = given.get("captures", 0)
        self.cuda.captures = <int (*)(void*, int*) noexcept nogil> address
        address = given.get("mode", 0)
        self.cuda.mode = <int (*)(int*) noexcept nogil> address
        address = given.get("context", 0)
        self.cuda.context = <int (*)(void**) noexcept nogil> address
        address = given.get("enter", 0)
        self.cuda.enter = <int (*)(void*) noexcept nogil> address

    cdef Place place(self, int index):
        cdef uintptr_t context
        cdef Place found = self.last
        if found is not None and found.index == index:
            return found
        found = self.places.get(index)
        if found is None:
            found = Place.__new__(Place)
            context = self._runtime.context(index)
            found.gpu = hd_gpu_of(&self.cuda, <void*> context, index)
            if found.gpu == NULL:
                raise MemoryError("there is no memory for the events of a device")
            found.index = index
            found.number = index
            self.places[index] = found
        self.last = found
        return found

    cdef uintptr_t stream_of(self, Place place) except? 0:
        """The group's own stream on a device."""
        if place.stream is None:
            place.stream = self._stream(place.number)
            place.own = self._runtime.handle(place.stream)
        return place.own

    # ---- operations in flight ----

    cdef void let_go(self):
        """Drop the operations that have ended, and what they kept."""
        cdef hd_watched* w
        while self.first != NULL and not hd_watch_listed(self.first):
            w = self.first
            self.first = w.after
            if self.first == NULL:
                self.newest = NULL
            drop(w)

    cdef void forget(self):
        cdef hd_watched* w
        while self.first != NULL:
            w = self.first
            self.first = w.after
            drop(w)
        self.newest = NULL

    def drain(self, double seconds):
        """Wait on the host until nothing is in flight, for at most `seconds`.

        Returns
        -------
        str or None
            The first operation that was still in flight then.
        """
        cdef hd_watched* w
        cdef double end = time.monotonic() + seconds
        late = None
        unforked()
        with self._lock:
            w = self.first
            while w != NULL:
                if hold(w, max(end - time.monotonic(), 0.0)) == HD_WATCH_RUNS and late is None:
                    late = name_of(w)
                w = w.after
        return late

    def forget_all(self):
        """Release the tensors of all operations: nothing more happens to them."""
        unforked()
        with self._lock:
            self.forget()

    # ---- starting an operation ----

    cdef int ready(self, str api, object facts) except -1:
        """Check the group before an operation, with the lock."""
        if self._freed or self._aborted:
            how = "freed" if self._freed else "aborted"
            raise DistBackendError(f"the group {self.name!r} over NCCL has been {how}")
        self.let_go()
        if self._checks and facts is not None:
            self._compare(api, facts)
        return 0

    cdef Communicator connected(self, str api, Place place, uintptr_t stream, int peer):
        found = self._comms.get(place.number) if peer < 0 else self._pairs.get(peer)
        if found is None:
            if hd_captures(place.gpu, <void*> stream):
                raise DistBackendError(
                    f"{api} of the group {self.name!r} would make its communicator while a CUDA graph is captured, "
                    "which cannot be: call it once before the capture, or give init_process_group a device_id"
                )
            found = self.connect(place.number) if peer < 0 else self._connect_with(place.number, peer)
        return found

    cdef hd_watched* start(self, str api, Place place, Communicator comm, uintptr_t current, bint async_op,
                           one_call* c, object enqueue, object keep) except NULL:
        """Enqueue an operation, and add it to the watchdog's list and the queue; with the lock.

        The caller gets the operation; if it is captured into a graph, the caller owns it.
        """
        cdef uintptr_t stream = self.stream_of(place) if async_op else current
        cdef hd_watched* w = NULL
        cdef const char* said = b""
        cdef const char* name
        cdef int rc, code = HD_NCCL_SUCCESS
        cdef bint over = False
        cdef double limit = call_limit() or self.limit
        cdef unsigned long long number
        text = names.get(api)
        if text is None:
            text = names[api] = api.encode()
        name = <bytes> text
        comm.alive()
        self.seq += 1
        number = self.seq
        with nogil:
            rc = hd_start(place.gpu, comm.guard, <void*> current, <void*> stream, &w, &said)
            if rc == 0:
                w.api = name
                w.number = number
                if c != NULL:
                    code = call(comm, c, <hd_stream> stream)
                    if code == HD_NCCL_SUCCESS:
                        rc = hd_started(w, <void*> stream, limit, &said)
                        over = True
        if rc == 0 and not over:
            try:
                if c != NULL:
                    comm.after(CALLS[c.kind], code)
                else:
                    enqueue(comm, stream)
            except DistError as error:  # NCCL's own text contains neither the group nor the number
                what = name_of(w)
                hd_watch_put(w)
                raise type(error)(f"{what} could not start: {error}") from None
            except BaseException:
                hd_watch_put(w)
                raise
            with nogil:
                rc = hd_started(w, <void*> stream, limit, &said)
        if rc:
            what = f"{api} #{number} {comm.guard.where.decode('utf-8', 'replace')}"
            hd_watch_put(w)
            raise cuda_error(rc, said, what)
        if w.state != HD_WATCH_CAPTURED:
            Py_INCREF(keep)
            w.keep = <void*> keep
            if self.newest == NULL:
                self.first = w
            else:
                self.newest.after = w
            self.newest = w
        return w

    cdef NcclWork work_of(self, hd_watched* w, Place place, list held, object tensors, bint blocks, int source):
        """The handle of an operation that has been started; with the lock."""
        cdef NcclWork work = NcclWork.__new__(NcclWork)
        if w.state != HD_WATCH_CAPTURED:
            hd_watch_take(w)
        work.w = w
        work.group = self
        work.place = place
        work.held = held
        work.tensors = tensors
        work.blocks = blocks
        work.source = source
        return work

    cdef object one(self, str api, int index, one_call* c, object ins, object outs, object async_op, object facts,
                    object factor):
        """An operation that is one NCCL call; `factor` of a PREMUL_SUM, whose operation belongs to the communicator."""
        cdef bint later = async_op
        cdef Place place = self.place(index)
        cdef uintptr_t current
        cdef Communicator comm
        cdef hd_watched* w
        cdef list held = None
        cdef NcclWork work = None
        entry = None
        unforked()  # another thread of the parent may have held the lock
        self.acquire()
        try:
            self.ready(api, facts)
            current = self.current(place.number)
            comm = self.connected(api, place, current, -1)
            if factor is not None:
                c.how = comm.premul_sum(factor, c.dtype)
            if self._recorder is not None and not hd_captures(place.gpu, <void*> current):
                entry = self._note(KINDS[c.kind], [ins], [outs])
            if later:
                held = [outs] if ins is outs else [outs, ins]
                w = self.start(api, place, comm, current, True, c, None, held)
            else:
                w = self.start(api, place, comm, current, False, c, None, outs if ins is outs else (outs, ins))
            if entry is not None:
                entry.follow(self.work_of(w, place, None, (), False, -1))
            if later or self._blocking_wait:
                work = self.work_of(w, place, held, [outs] if ins is outs else [outs, ins], self._blocking_wait, -1)
            elif w.state == HD_WATCH_CAPTURED:
                hd_watch_put(w)
        except BaseException:
            if entry is not None:
                entry.failed()
            raise
        finally:
            self.release()
        if later:
            return work
        if self._blocking_wait:
            work._wait(-1)
        return None

    def launch(self, str api, parts, list tensors, enqueue, object async_op, int peer=-1, bint blocks=False,
               int source=-1, facts=None, shown=None):
        """Start an operation of any kind.

        Parameters
        ----------
        api : str
            Name of the public function.
        parts : sequence of Part
            Every tensor it touches; all on one device.
        tensors : list
            The same as objects, to be kept.
        enqueue : callable
            Called with the communicator and the stream; calls NCCL.
        async_op : bool
            Whether it runs on the group's own stream, and a handle is returned.
        peer : int
            The other rank of a message outside a batch; -1 for all ranks.
        blocks : bool
            Whether waiting for it stops the caller.
        source : int
            Rank of the sender, for a receive.
        facts : tuple
            What must be the same on all ranks, for the entry check; None if not all ranks call.
        shown : tuple of list
            Inputs and outputs, for the flight recorder; None: all tensors are both.

        Returns
        -------
        NcclWork or None
        """
        cdef bint later = async_op
        cdef int index = parts[0].device if parts else self._runtime.index()
        cdef Place place
        cdef uintptr_t current
        cdef Communicator comm
        cdef hd_watched* w
        cdef NcclWork work = None
        entry = None
        unforked()
        for part in parts:
            if part.device != index:
                raise ValueError(f"{api}: the tensors are on several devices: {index}, {part.device}")
        place = self.place(index)
        blocks = blocks or self._blocking_wait
        held = list(tensors)
        with self._lock:
            try:
                self.ready(api, facts)
                current = self.current(place.number)
                comm = self.connected(api, place, current, peer)
                if self._recorder is not None and not hd_captures(place.gpu, <void*> current):
                    ins, outs = (tensors, tensors) if shown is None else shown
                    entry = self._note(api, ins, outs, peer)
                w = self.start(api, place, comm, current, later, NULL, enqueue, held)
                if entry is not None:
                    entry.follow(self.work_of(w, place, None, (), False, -1))
                work = self.work_of(w, place, held, tensors, blocks, source)
            except BaseException:
                if entry is not None:
                    entry.failed()
                raise
        if later:
            return work
        if blocks:
            work._wait(-1)
        return None


cdef void drop(hd_watched* w):
    """Remove an operation from the queue."""
    cdef void* keep = w.keep
    if hd_watch_forked():
        return  # it is the parent's: its threads may have held locks
    w.keep = NULL
    hd_watch_put(w)
    Py_XDECREF(<PyObject*> keep)
