# MPI in this process: start, queries, and exit.

cdef extern from * nogil:
    """
    /* The blocking calls of Open MPI and Intel MPI spin unless these say to yield. Where a rank's main thread and its
     * lane have to share a core, they must. The user's own setting wins, and the environment is left as it
     * was. */
    static const char *const hd_yield[][2] = {
        {"OMPI_MCA_mpi_yield_when_idle", "1"},
        {"I_MPI_THREAD_YIELD", "2"}, /* sched_yield, */
        {"I_MPI_SPIN_COUNT", "1"},   /* and after each look: else a duplicate took 10 to 60 ms, not 1 */
    };
    enum { HD_YIELDS = sizeof hd_yield / sizeof hd_yield[0] };
    static int hd_set_yield[HD_YIELDS];
    static void begin_yielding(int yield)
    {
        for (int i = 0; i < HD_YIELDS; i++) {
            hd_set_yield[i] = yield && !getenv(hd_yield[i][0]);
            if (hd_set_yield[i])
                setenv(hd_yield[i][0], hd_yield[i][1], 0);
        }
    }
    static void end_yielding(void)
    {
        for (int i = 0; i < HD_YIELDS; i++)
            if (hd_set_yield[i])
                unsetenv(hd_yield[i][0]);
    }
    """
    void begin_yielding(int)
    void end_yielding()

cdef dict open_comms = {}   # address -> Comm, until freed
cdef list lost_comms = []   # freed with operations in flight: kept for ever
cdef bint owned = False     # we started MPI, so we finalize it
cdef bint hooked = False
cdef object failed = None   # the unhandled exception that ends this process
cdef object previous_excepthook = None
cdef object previous_exit = None
cdef object exit_status = None
cdef object leave_at_once = None


cdef bint no_core_to_spare() except -1:
    """Whether some core must carry two busy threads of this node's ranks."""
    own = len(os.sched_getaffinity(0))
    quota = hardware.cpu_quota()
    granted = min(own, quota[0]) if quota else own
    if granted < 2:
        return True
    launch = launchers.detect()
    if launch is None:
        return False
    # Some launchers do not say how many ranks the node has: then assume as many as there may be.
    ranks = launch.local_size or launch.size or 1
    # Unbound, all ranks of the node share the same cores, as those of a control group share what it
    # grants; bound to two or more, each has its own.
    return (own == os.cpu_count() or granted < own) and granted < 2 * ranks


def init_mpi():
    """Starts MPI with ``MPI_THREAD_MULTIPLE``, unless it is up already, and prepares for the process's end.

    Raises
    ------
    DistBackendError
        MPI was finalized already, or failed to start.

    Notes
    -----
    The package that started MPI finalizes it: hpcdist if this call did, otherwise e.g. mpi4py.
    """
    global owned, hooked, previous_excepthook, previous_exit, leave_at_once
    cdef int up = 0, down = 0, provided = 0, rc
    cdef bint crowded
    check_alive(None)
    libmpi.MPI_Finalized(&down)
    if down:
        raise DistBackendError("MPI has been finalized in this process and cannot start again")
    libmpi.MPI_Initialized(&up)
    if not up:
        crowded = no_core_to_spare()
        with _loader.starting():
            with nogil:
                begin_yielding(crowded)
                hd_pmi_relay_begin()
                rc = libmpi.MPI_Init_thread(NULL, NULL, libmpi.MPI_THREAD_MULTIPLE, &provided)
                hd_pmi_relay_end()
                end_yielding()
        if rc != libmpi.MPI_SUCCESS:
            raise DistBackendError(f"MPI_Init_thread failed (error {rc})")
        owned = True
    rc = hd_mpi_ops_init()
    if rc:
        raise DistBackendError(f"MPI_Op_create failed (error {rc})")
    if not hooked:
        hooked = True
        if thread_level() != "multiple":
            warnings.warn(
                f"MPI was started with MPI_THREAD_{thread_level().upper()}, not MULTIPLE: asynchronous operations run "
                f"on the calling thread, so nothing overlaps. With mpi4py leave mpi4py.rc.thread_level at 'multiple'",
                RuntimeWarning, stacklevel=2,
            )
        hd_guard_fork()
        hd_arm_exit(owned)
        open_recorder()
        atexit.register(_leave)
        previous_excepthook = sys.excepthook
        sys.excepthook = _fail
        leave_at_once = os._exit
        os._exit = _exit_at_once
        if not owned:
            previous_exit = sys.exit
            sys.exit = _exit


def leave_mpi():
    """Waits for what is in flight, and then no thread of hpcdist calls MPI any more: before MPI_Finalize.

    A second call does nothing. So does one before MPI is up, or in a child of fork.
    """
    if hooked and mpi_state() == "up" and not hd_forked and not hd_in_child():
        with nogil:
            hd_exit_before_finalize()


def look_for_nans(bint wanted):
    """From now on this rank looks for NaNs in what it gives to the others, or does not.

    Parameters
    ----------
    wanted : bool
        The setting ``HPCDIST_NAN_CHECK``.
    """
    hd_nan_wish(wanted)


def pmi_answer(int fd):
    """From now on a native thread answers MPI's requests to its process manager, for a job without one.

    MPI sends requests while it ends, after Python has gone. The job also counts as one without a
    launcher: the watchdogs of the other ranks notice a rank that aborts.

    Parameters
    ----------
    fd : int
        The manager's end of the connection; it stays open for the life of the process.

    Raises
    ------
    DistBackendError
        It was called before, or the thread could not be started.
    """
    if hd_pmi_answer(fd):
        raise DistBackendError("the thread that answers MPI's process-manager requests cannot be started")


def mark_end(str folder, int rank, int here):
    """Says where the job keeps commits: the last rank of the node that exits with status 0 removes them.

    Parameters
    ----------
    folder : str
        The folder; empty: the one said before.
    rank, here : int
        This rank, and the number of ranks on its node.
    """
    path = os.fsencode(folder)
    hd_exit_mark(<const char*> path, rank, here)


def _fail(kind, value, traceback):
    """sys.excepthook: an unhandled exception on one rank ends the job, after the traceback."""
    global failed
    cdef Comm comm
    previous_excepthook(kind, value, traceback)
    others = [c for c in open_comms.values() if c.size > 1]
    if hd_forked or not others or threading.current_thread() is not threading.main_thread():
        return
    failed = kind.__name__
    comm = others[0]
    print(
        f"[hpcdist rank {comm.rank} of {comm.size}] unhandled {failed}: this ends the job on all ranks",
        file=sys.stderr, flush=True,
    )
    # In one line, and long enough for the rank that an error of hpcdist names.
    said = " ".join(f"unhandled {failed}: {value}".split()).encode("utf-8", "replace")[:420]
    said = said.decode("utf-8", "ignore").encode()
    if hd_comm_enter(comm.c, 0):
        hd_session_set_failing(comm.c.session, <const char*> said)
        hd_comm_exit(comm.c)
    hd_failing(3.0)


def _exit(status=None, /):
    """sys.exit if another package finalizes MPI: that happens before libc's exit knows the status."""
    global exit_status
    exit_status = status
    previous_exit(status)


def _exit_at_once(status):
    """os._exit: without a word to MPI it would leave the other ranks waiting, and MPICH's mpirun
    takes a rank that vanishes with status 0 for success."""
    others = [c for c in open_comms.values() if c.size > 1]
    if others and not hd_forked and not hd_in_child():
        why = (
            f"[hpcdist rank {others[0].rank} of {others[0].size}] os._exit({status}) without leaving the process "
            f"group: aborting the job (call destroy_process_group first)"
        ).encode()
        hd_abort(status if 0 < status < 256 else 1, <const char*> why)
    if not hd_forked and not hd_in_child():
        hd_rec_leave()
        if status == 0:
            hd_rec_remove()
    leave_at_once(status)


def _leave():
    """atexit: lets operations in flight end, tells the others, joins the threads. MPI is finalized
    later: by libc's exit, which knows the exit status, or by mpi4py if that started MPI."""
    cdef Comm comm
    cdef int ended = 1, p2p = 1
    cdef double patience = 3.0
    if hd_forked or hd_in_child():
        return
    hd_stacks_close()
    comms = list(open_comms.values())
    if failed is None:
        for c in comms:
            comm = c
            with nogil:
                ended = hd_lane_drain(comm.c, patience)
            if not ended:
                why = (
                    f"[hpcdist rank {comm.rank} of {comm.size}] the program ends with operations of group "
                    f"'{comm.name}' in flight that the other ranks have not joined: aborting the job"
                ).encode()
                hd_abort(1, <const char*> why)
        with nogil:
            p2p = hd_p2p_drain(NULL, 0.5)
        if not p2p:
            print("[hpcdist] the program ends with messages or new groups that no rank joined", file=sys.stderr)
    if not owned and comms and (failed is not None or (exit_status is not None and exit_status != 0)):
        # The package that owns MPI would now finalize it, and wait for ranks that wait for this
        # one.
        why = f"[hpcdist rank {comms[0].rank} of {comms[0].size}] exits with an error: aborting the job".encode()
        hd_abort(exit_status if isinstance(exit_status, int) else 1, <const char*> why)
    finish_callbacks(patience)
    if failed is None and not exit_status:
        for c in comms[:1]:  # of the session, which all have; at once where there are no spares, or they know
            farewell(c, patience)
    for c in comms:
        hd_session_set_leaving((<Comm> c).c.session)
    p2p = 1
    for c in comms:  # threads that still wait for a message leave MPI
        comm = c
        with nogil:
            hd_comm_close(comm.c, HD_COMM_CLOSED)
            if not hd_p2p_close(comm.c):
                p2p = 0
                hd_session_poisoned(comm.c.session)
    with nogil:
        hd_windows_shutdown()
        hd_p2p_shutdown()
    if failed is None and p2p:
        for c in reversed(comms):
            comm = c
            open_comms.pop(<size_t> comm.c, None)
            with nogil:
                hd_comm_free(comm.c, 1, HD_KEEP)
        hd_mpi_ops_free()


cdef int finish_callbacks(double patience) except -1:
    """Waits for callbacks of futures: Python would end a thread that still runs one, and torch then the process."""
    hd_notify_stop()
    until = time.monotonic() + patience
    for thread in list(notifiers):
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                why = b"[hpcdist] the program ends while a callback of a future runs: aborting the job"
                hd_abort(1, <const char*> why)
    return 0


def mpi_state():
    """The state of MPI in this process.

    Returns
    -------
    str
        ``none`` (not started), ``up`` or ``finalized``.
    """
    cdef int up = 0, down = 0
    libmpi.MPI_Initialized(&up)
    libmpi.MPI_Finalized(&down)
    return "finalized" if down else "up" if up else "none"


def start_blocks():
    """Whether a start is in calls of MPI that cannot time out."""
    return bool(hd_session_opening())


def owns_mpi():
    """Whether hpcdist started MPI, and so finalizes it."""
    return owned


def thread_level():
    """The thread level that MPI was started with.

    Returns
    -------
    str
        ``single``, ``funneled``, ``serialized`` or ``multiple``; ``none`` before MPI is up.
    """
    cdef int level = 0
    if mpi_state() != "up":
        return "none"
    libmpi.MPI_Query_thread(&level)
    return {
        libmpi.MPI_THREAD_SINGLE: "single", libmpi.MPI_THREAD_FUNNELED: "funneled",
        libmpi.MPI_THREAD_SERIALIZED: "serialized", libmpi.MPI_THREAD_MULTIPLE: "multiple",
    }[level]


def library_version():
    """The MPI library's own name and version; works before MPI is started."""
    cdef char* text = <char*> calloc(libmpi.MPI_MAX_LIBRARY_VERSION_STRING + 1, 1)
    cdef int n = 0
    try:
        libmpi.MPI_Get_library_version(text, &n)
        return text[:n].decode("utf-8", "replace").rstrip("\0\n ")
    finally:
        free(text)


def world_rank_size():
    """This process's rank in MPI's world, and the world's size.

    Returns
    -------
    tuple of int
        Rank and size.

    Raises
    ------
    DistBackendError
        MPI is not up.
    """
    cdef int rank, size
    if mpi_state() != "up":
        raise DistBackendError(f"MPI is not up (it is {mpi_state()})")
    libmpi.MPI_Comm_rank(libmpi.MPI_COMM_WORLD, &rank)
    libmpi.MPI_Comm_size(libmpi.MPI_COMM_WORLD, &size)
    return rank, size


def abort(int code=1, str why=""):
    """Ends the whole job at once.

    Parameters
    ----------
    code : int, optional
        Exit status, 1 to 255.
    why : str, optional
        Printed on standard error first.
    """
    encoded = why.encode()
    hd_abort(code, <const char*> encoded)


def abort_tell(int fd):
    """Writes the reason for ending the job to a file descriptor as well.

    Parameters
    ----------
    fd : int
        It must stay open; -1 for none.
    """
    hd_abort_tell(fd)


def memory_kinds():
    """The kinds of memory that MPI's world accepts, by the info key ``mpi_memory_alloc_kinds`` of MPI 4.1.

    Returns
    -------
    str
        For example ``"mpi,system,cuda:device"``; empty if the library does not say, and unless MPI
        is up.
    """
    cdef libmpi.MPI_Info info
    cdef char text[256]
    cdef int there = 0
    if mpi_state() != "up" or libmpi.MPI_Comm_get_info(libmpi.MPI_COMM_WORLD, &info):
        return ""
    libmpi.MPI_Info_get(info, b"mpi_memory_alloc_kinds", 255, text, &there)
    libmpi.MPI_Info_free(&info)
    return text.decode("utf-8", "replace") if there else ""
