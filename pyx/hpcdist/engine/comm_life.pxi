# How a group's communicator is made, drained and freed.

cdef double CLOSING = 1.0  # seconds that the other ranks have to arrive and free a group
cdef int64_t UNMATCHED = 3_000_000_000  # ns that a receive waits for its message, if nothing else is in flight


cdef Comm open_root(MPI_Comm from_, str name, double timeout, int check, object within):
    cdef char text[512]
    text[0] = 0
    cdef hd_session* session = NULL
    cdef hd_comm* made = NULL
    cdef Comm comm
    cdef int code
    cdef double limit = timeout if within is None else within
    cdef hd_quota quota
    quota.cores, quota.group = hardware.cpu_quota() or (0.0, 0)
    encoded = name.encode()
    cdef const char* cname = encoded
    check_alive(None)
    init_mpi()
    with nogil:
        code = hd_session_open(from_, limit, quota, &session, text, sizeof(text))
        if code == HD_OK:
            code = hd_comm_open(from_, session, cname, timeout, check, &made, text, sizeof(text))
            hd_session_unref(session)  # the communicator owns it now
        hd_session_opened()
        hd_exit_unmet(code == HD_ERR_TIMEOUT)
    if code:
        propagate()
        raise error_of(code, text)
    comm = Comm.__new__(Comm)
    comm.c = made
    open_comms[<size_t> made] = comm
    propagate()  # Ctrl-C after the other ranks were let go on
    return comm


cdef Comm some_of(Comm parent, object ranks, str name, double timeout, int tag, list met, object check):
    """Makes a communicator of some ranks of the parent: see Comm.create_group."""
    cdef int n = len(ranks), i
    cdef int* members = <int*> malloc((n + 1) * sizeof(int))
    if members == NULL:
        raise MemoryError
    try:
        check_alive(parent)
        for i in range(n):
            members[i] = ranks[i]
            root_in_range(parent, members[i], "rank")
        if parent.c.rank not in ranks or len(set(ranks)) != n:
            raise ValueError(f"ranks {tuple(ranks)} must be distinct and include this rank, {parent.c.rank}")
        enter(parent.c, True)
        try:
            return made_of(parent.c, members, n, name, timeout, tag, met, parent.c.check if check is None else check)
        finally:
            hd_comm_exit(parent.c)
    finally:
        free(members)


cdef Comm made_of(
    hd_comm* parent, const int* members, int n, str name, double timeout, int tag, list met, int check
):
    """The same, between enter() and hd_comm_exit()."""
    cdef char text[512]
    text[0] = 0
    cdef hd_comm* made = NULL
    cdef Comm comm
    cdef int code, have_met = 0
    encoded = name.encode()
    cdef const char* cname = encoded
    with nogil:
        code = hd_comm_create_group(
            parent, members, n, tag, cname, timeout, check, &have_met, &made, text, sizeof(text)
        )
    if have_met and met is not None:
        met.append(name)
    if code:
        propagate()
        error = error_of(code, text)
        if hd_session_broken(parent.session):
            if code != HD_ERR_FAILED or hd_ft_lost(parent.session, NULL, 0):
                hd_ft_why(parent.session, text, sizeof(text))
                error = RankFailedError(f"{text.decode()}: {error}")
            name_lost(error, parent)
        raise error
    comm = Comm.__new__(Comm)
    comm.c = made
    comm.c.timeout = timeout
    open_comms[<size_t> made] = comm
    propagate()  # Ctrl-C after the other ranks were let go on
    return comm


cdef int together(Comm comm, double seconds) except -1:
    """HD_TOGETHER: all ranks free the group now, and no message is left that no rank received; HD_LATER: not all."""
    cdef hd_job j
    cdef hd_buf b
    cdef int left
    if comm.c.page != NULL:
        if not hd_comm_enter(comm.c, 0):
            return HD_LATER  # the program ends, and frees it
        with nogil:
            left = hd_page_leave(comm.c, hd_comm_unread(comm.c), seconds)
            hd_comm_exit(comm.c)
        if left < 0:
            propagate()
        return left
    import numpy
    unread = numpy.array([hd_comm_unread(comm.c)], numpy.int64)
    keep = fill(unread, &b, True, "unread")
    begin(&j, comm, HD_ALL_REDUCE, DESTROY)
    j.closing = 1
    j.timeout = seconds
    subject(&j, &b, True)
    reduces(&j, ReduceOp.SUM)
    writes(&j, &b)
    try:
        run(comm, &j, False, keep, None)
    except DistError:
        return HD_LATER
    return HD_TOGETHER if unread[0] == 0 else HD_KEEP


cdef bint drained(Comm comm, double seconds) except -1:
    """Waits until nothing is in flight, and checks for signals meanwhile."""
    cdef int64_t until = hd_now() + <int64_t> (min(seconds, 1e9) * 1e9), idle = 0
    cdef double left, step
    cdef bint empty
    cdef int down = 0
    libmpi.MPI_Finalized(&down)
    while not down and not hd_in_child():
        left = <double> (until - hd_now()) * 1e-9
        step = 0 if left < 0 else 0.05 if left > 0.05 else left
        with nogil:
            empty = hd_lane_drain(comm.c, step)
            if empty and not idle:
                idle = hd_now()
            empty = empty and hd_p2p_drain(comm.c, step)
            if not empty and idle and hd_now() - idle > UNMATCHED:
                hd_p2p_recall(comm.c)
        PyErr_CheckSignals()
        if empty or left <= 0:
            break
    with nogil:
        empty = hd_comm_drain(comm.c, 0)
    return empty


def leave(Comm comm):
    """Leaves a group that the program has dropped, without a message and without waiting.

    MPI gets the communicator back when all members have left, as after :meth:`Comm.free`.

    Parameters
    ----------
    comm : Comm

    Returns
    -------
    bool
        False: an operation is in flight, and nothing was done.
    """
    cdef bint empty
    cdef int down = 0
    if not is_alive(comm):
        return True
    libmpi.MPI_Finalized(&down)
    with nogil:
        empty = hd_lane_drain(comm.c, 0) and hd_p2p_drain(comm.c, 0)
    if not empty or hd_session_broken(comm.c.session):
        return False
    hd_comm_close(comm.c, HD_COMM_CLOSING)
    open_comms.pop(<size_t> comm.c, None)
    with nogil:
        if comm.c.page != NULL and not down:
            hd_page_mark(comm.c, hd_comm_unread(comm.c), HD_DROPPED)
        hd_comm_free(comm.c, 1, HD_KEEP if down else HD_LATER if comm.c.size > 1 else HD_TOGETHER)
    bury(NULL)
    return True


cdef int free_comm(Comm comm, double drain, bint agree) except -1:
    """Waits for what is in flight and frees the communicator: see Comm.free."""
    cdef int code, down = 0, agreed = HD_KEEP
    cdef bint empty = False
    if not is_alive(comm):
        return 0
    libmpi.MPI_Finalized(&down)  # by the program, with all ranks: they agree about nothing any more
    refuse_in_handler(comm, DESTROY.name)
    hd_comm_close(comm.c, HD_COMM_CLOSING)
    raised = None
    try:
        empty = drained(comm, drain)
        if empty and agree and not down and not hd_session_broken(comm.c.session):
            agreed = HD_TOGETHER
            if comm.c.size > 1:
                agreed = HD_LATER  # also if a signal handler raises now
                agreed = together(comm, min(drain, CLOSING))
    except BaseException as error:  # from a signal handler; the group would be left half freed
        raised = error
    open_comms.pop(<size_t> comm.c, None)
    with nogil:
        if not empty or (agreed == HD_LATER and comm.c.page == NULL):
            hd_grave_tell(comm.c)  # the others no longer wait for this rank
        code = hd_comm_free(comm.c, empty, agreed)
    bury(NULL)
    if code:
        lost_comms.append(comm)
    if raised is not None:
        raise raised
    if code and down:
        warnings.warn(
            f"MPI was finalized before group '{comm.name}' was destroyed, and before its operations had ended: they "
            "keep their tensors", RuntimeWarning, stacklevel=2,
        )
    elif code:
        raise DistTimeoutError(
            f"group '{comm.name}' had operations that did not end within {drain:.3g} s ({comm.c.lane.pending} "
            "collectives queued): its communicator is kept"
        )
    return 0


def ranks_of_machine(Comm comm):
    """Number of the job's ranks on this machine, of all nodes that HPCDIST_NODES makes of it."""
    check_alive(comm)
    return hd_session_machine(comm.c.session)
