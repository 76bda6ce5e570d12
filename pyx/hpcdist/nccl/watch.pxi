# Watch: an operation in flight, and what its failure is called.

@cython.final
cdef class Watch:
    """An operation in flight, which the watchdog looks after without the GIL.

    Parameters
    ----------
    comm : Communicator
        Aborted when the operation fails or is late.
    event : int
        Address of an event that is reached when the operation is done. It must live until :attr:`released`.
    query : int
        Address of ``int query(event)``: 0 when reached, 600 before, else an error.
    seconds : float
        The time it has.
    what : str
        The operation in words.
    advice : str
        What is added to the message of a failure.
    """

    RUNS = HD_WATCH_RUNS
    DONE = HD_WATCH_DONE
    FAILED = HD_WATCH_FAILED

    cdef hd_watched* watched
    cdef Communicator comm
    cdef readonly str what
    cdef str advice

    def __init__(self, Communicator comm not None, uintptr_t event, uintptr_t query, double seconds, str what,
                 str advice=""):
        cdef bytes text = what.encode()
        cdef const char* name = text
        self.comm = comm
        self.what = what
        self.advice = advice
        self.watched = hd_watch(comm.guard, <void*> event, <hd_query> query, seconds, name)
        if self.watched == NULL:
            raise MemoryError("there is no memory or no thread for the watchdog of NCCL")

    def __dealloc__(self):
        hd_watch_put(self.watched)

    def wait(self, double seconds):
        """Wait on the host; signals are looked at.

        Parameters
        ----------
        seconds : float
            At most; 0 looks.

        Returns
        -------
        int
            RUNS, DONE or FAILED.
        """
        cdef int state
        cdef double left, end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            left = 0.05 if left > 0.05 else left if left > 0 else 0
            with nogil:
                state = hd_watch_wait(self.watched, left)
            if state != HD_WATCH_RUNS or time.monotonic() >= end:
                return state
            PyErr_CheckSignals()

    @property
    def released(self):
        """Whether the operation is over and nobody looks at its event any more."""
        return bool(hd_watch_released(self.watched))

    def error(self):
        """What went wrong, if anything has.

        Returns
        -------
        Exception or None
        """
        if self.watched.state == HD_WATCH_DONE or not hd_guard_failed(self.comm.guard):
            return None
        return trouble(self.comm.guard, self.what, self.advice)


def stop_watching():
    """At the end of the process: the watchdog looks at nothing any more."""
    hd_watch_stop()


cdef object trouble(hd_guard* guard, str what, str advice=""):
    """The exception of a communicator that the watchdog has aborted."""
    cdef int code = hd_guard_failed(guard)
    guard.told = 1
    said = guard.text.decode("utf-8", "replace")
    name = what or guard.what.decode("utf-8", "replace")
    if code == HD_WATCH_LATE:
        other = "" if not what or said.startswith(what) else f"{what} is lost, because "
        return DistTimeoutError(f"{other}{said}. {advice}".rstrip())
    if code == HD_WATCH_CUDA:
        return DistBackendError(f"{name}: {said}. {advice}".rstrip())
    return failure(name, code, said)
