# The flight recorder and the hang report, as Python sees them.

cdef int write_stacks(int fd) noexcept with gil:
    """All threads' Python stacks, for hd_stacks.c."""
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
    except Exception:
        return 1
    return 0


cdef int open_recorder() except -1:
    """Prepares both; their settings are in the environment."""
    cdef int python = 0, native = 0
    folder = os.fsencode(config.get("dump"))
    if len(folder) > 4000:
        raise ValueError(f"HPCDIST_DUMP names a folder by {len(folder)} bytes; 4000 is the most")
    hd_rec_wish(config.get("recorder"), folder)
    hd_hang_wish(config.get("hang_report"))
    hd_late_wish(config.get("straggler"), config.get("straggler_window"))
    if not config.get("hang_report"):
        return 0
    hd_hang_on_signal(_signal.SIGUSR2)
    # Those in the middle: debuggers and libraries take them from the ends.
    if _signal.getsignal(_signal.SIGRTMIN + 12) == _signal.SIG_DFL:
        python = _signal.SIGRTMIN + 12
    if _signal.getsignal(_signal.SIGRTMIN + 13) == _signal.SIG_DFL:
        native = _signal.SIGRTMIN + 13
    try:
        fd = os.memfd_create("hpcdist-stacks", os.MFD_CLOEXEC)
        if python:
            faulthandler.register(python, fd, all_threads=True, chain=False)
    except (OSError, AttributeError):  # a sandbox may forbid either
        return 0
    hd_stacks_open(fd, python, native, write_stacks)
    return 0


def recorder_path():
    """The file of this process's flight recorder.

    Returns
    -------
    str
        Empty if the recorder is off, has not been made yet, or lies in memory of this process alone.
    """
    return os.fsdecode(hd_rec_path()) if hd_rec.ring != NULL else ""


def dump_recorder(path=None):
    """Writes a copy of this process's flight recorder.

    Parameters
    ----------
    path : path-like, optional
        The file; by default one in the folder ``HPCDIST_DUMP``.

    Returns
    -------
    bool
        False if the recorder is off or, without `path`, there is no such folder.

    Raises
    ------
    OSError
        It cannot be written.
    """
    cdef int rc
    if path is None:
        rc = hd_rec_dump()
    else:
        encoded = os.fsencode(path)
        rc = hd_rec_dump_to(encoded)
    if rc > 0:
        raise OSError(rc, os.strerror(rc), path)
    return rc == 0


def report_hang(str why="the program asks for it"):
    """Writes a hang report of this node's ranks to standard error, at most one per node in 20 s.

    Parameters
    ----------
    why : str, optional
        What it begins with.
    """
    cdef Comm comm
    cdef const char* text
    if hd_forked:
        raise forked_error("MPI")
    encoded = why.encode()
    text = encoded
    for c in open_comms.values():
        comm = c
        if hd_comm_enter(comm.c, 0):
            with nogil:
                hd_hang_report(comm.c.session, text, 0)
                hd_comm_exit(comm.c)
            return


cdef class Beside:
    """A group's operations that another library than MPI moves, for the flight recorder and error texts.

    Parameters
    ----------
    comm : Comm
        The same ranks in the same order.
    name : str
        Name in the recorder.
    ranks : sequence of int
        Their ranks in the world.
    """

    cdef hd_beside* at
    cdef Comm comm  # keeps the communicator's memory

    def __init__(self, Comm comm not None, str name, ranks):
        cdef bytes text = name.encode()
        cdef int* known
        cdef int i, size = len(ranks)
        check_alive(comm)
        if self.at != NULL or size != comm.c.size:
            raise ValueError(f"{size} ranks for a group of {comm.c.size}")
        known = <int*> malloc(size * sizeof(int))
        if known == NULL:
            raise MemoryError("there is no memory for a group's name")
        try:
            for i in range(size):
                known[i] = ranks[i]
            self.at = hd_beside_new(comm.c, text, known, site_here)
        finally:
            free(known)
        if self.at == NULL:
            raise MemoryError("there is no memory for a group's name")
        self.comm = comm

    def __dealloc__(self):
        if self.at != NULL and not hd_forked:
            self.part()
            self.at.put(self.at)

    cpdef part(self):
        """Use the group over MPI no more: it is about to be freed."""
        if self.at != NULL and not hd_forked:
            with nogil:
                hd_beside_part(self.at)

    @property
    def address(self):
        """int: the ``hd_beside`` for the other library's module."""
        return <size_t> self.at
