# The queue of operations on a GPU's streams: every operation over NCCL starts here.

# An operation that is one NCCL call.
cdef struct one_call:
    int kind
    void* send
    void* recv
    size_t count
    int dtype
    int how  # operation of a reduction, or root of a broadcast
    hd_beside_call about

cdef enum:
    ALL_REDUCE_CALL, BROADCAST_CALL, ALL_GATHER_CALL, REDUCE_SCATTER_CALL

cdef tuple CALLS = ("ncclAllReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter")
cdef tuple KINDS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


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


cdef class StreamQueue:
    """Starts a group's operations on streams, and keeps those in flight.

    Parameters
    ----------
    name : str
        Name of the group, for messages.
    rank, size : int
        This process's rank in the group, and the number of ranks.
    timeout : float or datetime.timedelta
        Time limit of an operation.
    runtime : object
        Streams and events, as in :mod:`hpcdist.backends.cuda`.
    communicators : object
        ``whole``, a dict from the index of a device to the communicator of all ranks, and
        ``pairs``, a dict from that index and a rank to the communicator of that rank and this one. Where an entry
        is missing, ``connect(index)`` or ``connect_pair(index, peer)`` makes it.
    urgent : bool
        Run asynchronous operations on a stream of high priority.
    blocking_wait : bool
        Block the host in every wait.
    compare : callable, optional
        Called with an operation's name and arguments before it starts; raises if another rank
        calls something else. None: nothing is compared.
    device : int, optional
        Index of the device of what has no tensor on one; None: the current one.
    recording : object, optional
        ``note(api, inputs, outputs, peer, seconds)`` returns a record of an operation, with
        ``follow(work)`` and ``failed()``; ``failed()`` of the recording itself is called when a
        handle raises. None: nothing is recorded.

    Attributes
    ----------
    timeout : float
        Time limit in seconds; may also be set to a duration.
    seq : int
        Number of operations begun.
    lock : threading.RLock
        Held while an operation starts.
    """

    cdef readonly str name
    cdef readonly int rank
    cdef readonly int size
    cdef readonly unsigned long long seq
    cdef unsigned collectives    # of these, which have numbers of their own
    cdef readonly object runtime
    cdef readonly object lock
    cdef object communicators
    cdef dict whole              # of the communicators
    cdef dict pairs
    cdef bint urgent
    cdef bint blocking_wait
    cdef object compare
    cdef object recording
    cdef readonly object device
    cdef str ended               # "freed" or "aborted" if no operation may begin any more
    cdef double limit
    cdef object acquire
    cdef object release
    cdef object current          # index of a device -> handle of its current stream
    cdef bint orderly            # freed memory is not used again before what is in its stream is done
    cdef int memory
    cdef str device_type
    cdef hd_cuda cuda
    cdef dict places
    cdef Place last
    cdef hd_watched* first       # in flight, in the order of their starts
    cdef hd_watched* newest

    def __init__(self, str name, int rank, int size, timeout, runtime, communicators, *, bint urgent=True,
                 bint blocking_wait=False, compare=None, recording=None, device=None):
        self.name = name
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.communicators = communicators
        self.whole = communicators.whole
        self.pairs = communicators.pairs
        self.urgent = urgent
        self.blocking_wait = blocking_wait
        self.compare = compare
        self.recording = recording
        self.device = device
        self.places = {}
        self.lock = threading.RLock()
        self.acquire = self.lock.acquire
        self.release = self.lock.release
        self.use(runtime)

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

    cdef int use(self, object runtime) except -1:
        """Take the addresses of the runtime's functions."""
        cdef uintptr_t address
        cdef dict given = runtime.functions
        hd_watch_forks()
        self.runtime = runtime
        self.current = runtime.raw
        self.orderly = runtime.orderly
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
        return 0

    cdef Place place(self, int index):
        cdef uintptr_t context
        cdef Place found = self.last
        if found is not None and found.index == index:
            return found
        found = self.places.get(index)
        if found is None:
            found = Place.__new__(Place)
            context = self.runtime.context(index)
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
            place.stream = self.runtime.stream(place.index, self.urgent)
            place.own = self.runtime.handle(place.stream)
        return place.own

    def index(self):
        """Index of the device of what has no tensor on one."""
        return self.runtime.index() if self.device is None else self.device

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
        with self.lock:
            w = self.first
            while w != NULL:
                if hold(w, max(end - time.monotonic(), 0.0)) == HD_WATCH_RUNS and late is None:
                    late = name_of(w)
                w = w.after
        return late

    def close(self, str how):
        """Refuse all further operations.

        Parameters
        ----------
        how : {"freed", "aborted"}
            What happened to the group, for the message; the former outlasts the latter.
        """
        if self.ended != "freed":
            self.ended = how

    def forget_all(self):
        """Release the tensors of all operations: nothing more happens to them."""
        unforked()
        with self.lock:
            self.forget()

    # ---- starting an operation ----

    cdef int ready(self, str api, object facts) except -1:
        """Check the group before an operation, with the lock."""
        if self.ended is not None:
            raise DistBackendError(f"the group {self.name!r} over NCCL has been {self.ended}")
        self.let_go()
        if self.compare is not None and facts is not None:
            self.compare(api, facts)
        return 0

    cdef Communicator connected(self, str api, Place place, uintptr_t stream, int peer):
        found = self.whole.get(place.number) if peer < 0 else self.pairs.get((place.number, peer))
        if found is None:
            if hd_captures(place.gpu, <void*> stream):
                raise DistBackendError(
                    f"{api} of the group {self.name!r} would make its communicator while a CUDA graph is captured, "
                    "which cannot be: call it once before the capture, or give init_process_group a device_id"
                )
            if peer < 0:
                found = self.communicators.connect(place.number)
            else:
                found = self.communicators.connect_pair(place.number, peer)
        return found

    cdef unsigned next_number(self, const hd_beside_call* about):
        """Collectives have numbers of their own, which are the same on all ranks."""
        self.seq += 1
        if about.kind >= HD_SEND:
            return self.seq
        self.collectives += 1
        return self.collectives

    cdef hd_watched* start(self, str api, Place place, Communicator comm, uintptr_t current, bint async_op,
                           one_call* c, object enqueue, object keep, hd_beside_call* about, int abouts) except NULL:
        """Enqueue an operation, and add it to the watchdog's list and the queue; with the lock.

        `about` describes it, or the messages that it is, for the flight recorder. The caller gets the operation; if it
        is captured into a graph, the caller owns it.
        """
        cdef uintptr_t stream = self.stream_of(place) if async_op else current
        cdef hd_watched* w = NULL
        cdef const char* said = b""
        cdef const char* name
        cdef int rc, code = HD_NCCL_SUCCESS
        cdef bint over = False
        cdef double limit = call_limit() or self.limit
        cdef unsigned long long number
        cdef uint64_t record
        cdef ApiName known = name_of_api(api)
        name = known.text
        comm.alive()
        number = self.next_number(about)
        record = note_calls(comm.guard.beside, known, about, abouts, number)
        with nogil:
            rc = hd_start(place.gpu, comm.guard, <void*> current, <void*> stream, &w, &said)
            if rc == 0:
                w.api = name
                w.number = number
                w.record = record
                w.records = abouts
                if comm.blocking:  # else comm.after() has the limit
                    hd_starting(w, limit)
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
                error = type(error)(f"{what} could not start: {error}{explained(w)}")
                hd_watch_drop(w)
                raise error from None
            except BaseException:
                hd_watch_drop(w)
                raise
            with nogil:
                rc = hd_started(w, <void*> stream, limit, &said)
        if rc:
            what = f"{api} #{number} {comm.guard.where.decode('utf-8', 'replace')}"
            if w == NULL and record:
                end_calls(comm.guard.beside, record, abouts)
            hd_watch_drop(w)
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

    cdef NcclWork work_of(self, hd_watched* w, Place place, uintptr_t current, list held, object tensors, bint blocks,
                          int source):
        """The handle of an operation that was started from the current stream; with the lock."""
        cdef NcclWork work = NcclWork.__new__(NcclWork)
        if w.state != HD_WATCH_CAPTURED:
            hd_watch_take(w)
        work.w = w
        work.queue = self
        work.place = place
        work.begun_on = current
        work.held = held
        work.tensors = tensors
        work.blocks = blocks
        work.source = source
        return work

    cdef object one(self, str api, int index, one_call* c, object ins, object outs, object async_op, object facts,
                    object factor):
        """An operation that is one NCCL call; `factor` of a PREMUL_SUM, whose operation belongs to the communicator."""
        cdef bint asynchronous = async_op if async_op is True or async_op is False else checked_async(async_op)
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
            if self.recording is not None and not hd_captures(place.gpu, <void*> current):
                entry = self.recording.note(KINDS[c.kind], [ins], [outs], -1, self.limit)
            if asynchronous:
                held = [outs] if ins is outs else [outs, ins]
                w = self.start(api, place, comm, current, True, c, None, held, &c.about, 1)
            else:
                keep = None if self.orderly else outs if ins is outs else (outs, ins)
                w = self.start(api, place, comm, current, False, c, None, keep, &c.about, 1)
            if entry is not None:
                entry.follow(self.work_of(w, place, current, None, (), False, -1))
            if asynchronous or self.blocking_wait:
                shown = [outs] if ins is outs else [outs, ins]
                work = self.work_of(w, place, current, held, shown, self.blocking_wait, -1)
            elif w.state == HD_WATCH_CAPTURED:
                hd_watch_put(w)
        except BaseException:
            if entry is not None:
                entry.failed()
            raise
        finally:
            self.release()
        if asynchronous:
            return work
        if self.blocking_wait:
            work._wait(-1)
        return None

    def launch(self, str api, regions, list tensors, enqueue, object async_op, int peer=-1, bint blocks=False,
               int source=-1, facts=None, shown=None, Py_ssize_t reads=0):
        """Start an operation of any kind.

        Parameters
        ----------
        api : str
            Name of the public function.
        regions : sequence
            The memory of every tensor it touches, with its ``device``; all on one device.
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
        reads : int
            How many of the regions, the first ones, are inputs; the others are outputs. 0: all are both.

        Returns
        -------
        NcclWork or None
        """
        cdef bint asynchronous = async_op if async_op is True or async_op is False else checked_async(async_op)
        cdef int index = regions[0].device if regions else self.index()
        cdef Place place
        cdef uintptr_t current
        cdef Communicator comm
        cdef hd_watched* w
        cdef NcclWork work = None
        cdef hd_beside_call[MOST_TOGETHER] about
        cdef int abouts
        entry = None
        unforked()
        for region in regions:
            if region.device != index:
                raise ValueError(f"{api}: the tensors are on several devices: {index}, {region.device}")
        place = self.place(index)
        blocks = blocks or self.blocking_wait
        held = list(tensors)
        keep = None if self.orderly and not asynchronous else held  # as in one()
        batch = shown[0] if api == "batch_isend_irecv" and shown is not None else tensors
        abouts = describe_any(about, api, regions, peer, facts, batch, reads)
        with self.lock:
            try:
                self.ready(api, facts)
                current = self.current(place.number)
                comm = self.connected(api, place, current, peer)
                if self.recording is not None and not hd_captures(place.gpu, <void*> current):
                    ins, outs = (tensors, tensors) if shown is None else shown
                    entry = self.recording.note(api, ins, outs, peer, self.limit)
                w = self.start(api, place, comm, current, asynchronous, NULL, enqueue, keep, about, abouts)
                if entry is not None:
                    entry.follow(self.work_of(w, place, current, None, (), False, -1))
                work = self.work_of(w, place, current, held, tensors, blocks, source)
            except BaseException:
                if entry is not None:
                    entry.failed()
                raise
        if asynchronous:
            return work
        if blocks:
            work._wait(-1)
        return None
