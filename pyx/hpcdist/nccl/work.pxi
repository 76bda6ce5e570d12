# Handles of operations on a GPU's streams.

cdef str ADVICE = (
    "The communicator has been aborted. Usual reasons: a rank has not called it, calls another operation, or has died; "
    "every rank's own message tells what it was in."
)


cdef object cuda_error(int code, const char* call, str what):
    """The exception of a CUDA error while an operation was started or waited for."""
    if code == HD_START_MEMORY:
        return MemoryError(f"{what}: there is no memory, or no thread for the watchdog of NCCL")
    if code == HD_START_OTHER_CAPTURES:
        return DistBackendError(
            f"{what} could not start: another thread captures asynchronous operations of this group into a CUDA graph; "
            "wait until its capture has ended, or use another group"
        )
    return DistBackendError(
        f"{what} could not start or be waited for: {call.decode()} failed with CUDA's error {code}; an earlier kernel "
        "may have failed (CUDA_LAUNCH_BLOCKING=1 shows which), or a capture into a CUDA graph is broken"
    )


cdef class StreamWork:
    """The common base of the handles of operations on a GPU's tensors.

    ``wait(timeout)`` means the same for all of them. None or, as in torch, a negative time sets no
    limit of its own, and then the host need not wait. Any other time makes the host wait for at
    most that long.
    """

    cpdef object _wait(self, double seconds):
        """Wait; seconds below 0: no limit by the caller."""
        raise NotImplementedError

    def wait(self, timeout=None):
        """Make the caller's current stream wait for the operation; with a timeout, wait here.

        Parameters
        ----------
        timeout : float or datetime.timedelta, optional
            Seconds; None and negative ones: no limit. The group's timeout ends the operation itself.

        Returns
        -------
        bool
            True.

        Raises
        ------
        DistTimeoutError
            If the operation is not done in this time, or was aborted after the group's timeout.
        DistMismatchError, RankFailedError, DistBackendError
            The error of the operation.
        """
        self._wait(seconds_of(timeout))
        return True

    def synchronize(self):
        """Make the caller's current stream wait for the operation, as :meth:`wait` without a timeout."""
        self._wait(-1)

    def block_current_stream(self):
        """As :meth:`synchronize`."""
        self.synchronize()

    def is_completed(self):
        """Say whether the operation has ended, well or not."""
        raise NotImplementedError

    def exception(self):
        """The error, if there is one."""
        raise NotImplementedError

    def source_rank(self):
        """Group rank of the sender, for a receive; -1 for other operations."""
        return -1

    def is_success(self):
        """Say whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def _source_rank(self):
        """torch's other name for ``source_rank``."""
        return self.source_rank()


@cython.final
cdef class NcclWork(StreamWork):
    """An operation of NCCL; made by operations with ``async_op=True``.

    Source: ``torch.distributed.Work``.
    """

    cdef hd_watched* w
    cdef StreamQueue queue
    cdef Place place
    cdef uintptr_t begun_on  # the caller's stream then
    cdef list held      # the tensors, until it has been waited for; so does the watched operation
    cdef object tensors
    cdef bint blocks    # whether wait() stops the caller, as for a barrier
    cdef int source
    cdef list copies

    def __init__(self):
        raise TypeError("a NcclWork is made by an operation with async_op=True")

    def __dealloc__(self):
        if not hd_watch_forked():
            hd_watch_put(self.w)

    @property
    def what(self):
        """The operation's name, for messages."""
        return name_of(self.w)

    def brings(self, list copies):
        """Make ``wait()`` block the caller, and then copy tensors into host arrays.

        Parameters
        ----------
        copies : list of (tensor, numpy.ndarray)
            Sources and destinations. The arrays are the result.
        """
        self.blocks = True
        self.copies = copies
        self.tensors = [array for _, array in copies]

    cpdef object _wait(self, double seconds):
        unforked()
        if self.w.state == HD_WATCH_CAPTURED:
            if seconds >= 0 or self.copies is not None:
                raise self.captured("the host cannot wait for it")
        elif seconds >= 0 or self.blocks:
            # without a limit by the caller, the watchdog's limit applies
            if hold(self.w, 1e9 if seconds < 0 else seconds) == HD_WATCH_RUNS:
                raise DistTimeoutError(f"{self.what} is not done after {seconds:g} s of wait()")
        self.order()
        self.let_go()
        copies, self.copies = self.copies, None
        for tensor, array in copies or ():
            self.queue.runtime.download(tensor, array)
        self.held = None

    cdef void let_go(self):
        """Keep the tensors no longer than the caller does, if the stream that it has them from waits for the operation.

        The watchdog would keep them until it looks again, and by then a program may have freed many.
        """
        cdef void* keep = self.w.keep
        cdef bint waits = self.queue.orderly and self.queue.current(self.place.number) == self.begun_on
        if keep != NULL and (waits or self.w.state == HD_WATCH_DONE):
            self.w.keep = NULL
            Py_DECREF(<object> keep)

    cdef object captured(self, str why):
        return DistBackendError(
            f"{self.what} was captured into a CUDA graph: {why}. It runs when the graph is replayed; synchronize with "
            "the stream of the replay"
        )

    cdef int order(self) except -1:
        """Make the current stream wait for it, inside the capture or outside of it, as it was started."""
        cdef hd_watched* w = self.w
        cdef uintptr_t stream
        cdef bint captures
        cdef int rc
        error = self.error()
        if error is not None:
            if self.queue.recording is not None:
                self.queue.recording.failed()
            raise error
        if w.state == HD_WATCH_DONE:
            return 0
        stream = self.queue.current(self.place.number)
        captures = hd_captures(self.place.gpu, <void*> stream)
        if w.state == HD_WATCH_CAPTURED:
            if not captures:
                raise self.captured("it has to be waited for inside of the capture")
        elif captures:
            if hd_watch_wait(w, 0) == HD_WATCH_DONE:
                return 0
            raise DistBackendError(
                f"{self.what} was started before the capture of a CUDA graph, and is waited for inside of it: wait for "
                "it before the capture begins"
            )
        with nogil:
            rc = hd_order(w, <void*> stream)
        if rc:
            raise cuda_error(rc, b"cuStreamWaitEvent", self.what)
        return 0

    cdef object error(self):
        unforked()
        if self.w.state == HD_WATCH_DONE or not hd_guard_failed(self.w.guard):
            return None
        return trouble(self.w.guard, self.what)

    def synchronize(self):
        """Make the caller's current stream wait for the operation; the host does not wait, even for a barrier."""
        self.order()

    cdef int look(self) except -1:
        unforked()
        if self.w.state == HD_WATCH_CAPTURED:
            raise self.captured("it cannot be asked whether it is done")
        return hd_watch_wait(self.w, 0)

    def is_completed(self):
        """Say whether the operation has ended, well or not."""
        return self.look() != HD_WATCH_RUNS

    def is_success(self):
        """Say whether it has ended without an error."""
        return self.look() == HD_WATCH_DONE

    def exception(self):
        """The error, if there is one."""
        return self.error()

    def result(self):
        """The tensors of the operation."""
        return [each for each in self.tensors if each is not None]

    def source_rank(self):
        """Group rank of the sender, for a receive; -1 for other operations."""
        unforked()
        return self.source

    def get_future(self):
        """A ``torch.futures.Future`` of the result, ordered after the operation's stream.

        As in torch, it has a value at once, for the stream to wait for. If the operation has
        failed, it has the error instead, which its ``wait()`` and ``value()`` raise.
        """
        error = self.error()
        if error is not None:
            import torch
            failed = torch.futures.Future()
            failed.set_exception(error)
            return failed
        return self.queue.runtime.future(self.place.index, self.place.stream, self.result())

    def __repr__(self):
        if hd_watch_forked():
            return f"<NcclWork {self.what}, of the process that this one was forked from>"
        return f"<NcclWork {self.what}>"


cdef str name_of(hd_watched* w):
    cdef char text[192]
    hd_watched_name(w, text, sizeof(text))
    return text.decode("utf-8", "replace")


cdef void drop(hd_watched* w):
    """Remove an operation from the queue."""
    cdef void* keep = w.keep
    if hd_watch_forked():
        return  # it is the parent's: its threads may have held locks
    w.keep = NULL
    hd_watch_put(w)
    Py_XDECREF(<PyObject*> keep)


cdef int hold(hd_watched* w, double seconds) except -1:
    """Wait on the host for at most `seconds`, and check for signals. Returns the state."""
    cdef int state
    cdef double left, end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        left = 0.05 if left > 0.05 else left if left > 0 else 0
        with nogil:
            state = hd_watch_wait(w, left)
        if state != HD_WATCH_RUNS or time.monotonic() >= end:
            return state
        PyErr_CheckSignals()


def forked():
    """Whether this process was forked after a group over NCCL was made: then the group cannot be used here."""
    return bool(hd_watch_forked())


def stop_watching():
    """At the end of the process: the watchdog checks nothing any more."""
    hd_watch_stop()


cdef object trouble(hd_guard* guard, str what):
    """The exception of a communicator that the watchdog has aborted."""
    cdef int code = hd_guard_failed(guard)
    guard.raised = 1
    said = guard.text.decode("utf-8", "replace")
    name = what or guard.what.decode("utf-8", "replace")
    advice = ADVICE if what else ""
    if code == HD_WATCH_LATE:
        other = "" if not what or said.startswith(what) else f"{what} is lost, because "
        return DistTimeoutError(f"{other}{said}. {advice}".rstrip())
    if code == HD_WATCH_ABORTED:
        return DistBackendError(f"{what} has no result: {said}" if what else said)
    if code == HD_WATCH_CUDA:
        return DistBackendError(f"{name}: {said}. {advice}".rstrip())
    return failure(name, code, said)
