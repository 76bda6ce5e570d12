# Memory of a window that other ranks reach by messages: see hd_window.c.

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
