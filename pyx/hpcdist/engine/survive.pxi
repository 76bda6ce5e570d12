# After the death of a rank: what the others can do where MPI goes on without it. See engine/base/hd_ft.h.

def want_fault_tolerance(bint yes):
    """Let worlds that are made from now on go on without a rank that dies, if MPI can.

    Parameters
    ----------
    yes : bool
        The same on all ranks.
    """
    hd_ft_want(yes)


def missing_fault_tolerance():
    """Say why MPI does not go on without a rank that dies; MPI must be up.

    Returns
    -------
    str
        Empty if it does.
    """
    cdef const char* why = hd_ft_missing()
    return "" if why == NULL else why.decode()


def tolerates_failures(Comm comm):
    """Whether the group's job goes on without a rank that dies.

    Parameters
    ----------
    comm : Comm
        Any group.
    """
    return bool(is_alive(comm) and hd_ft_on(comm.c.session))


def lost_ranks(Comm comm):
    """The ranks of the group's world that died.

    Parameters
    ----------
    comm : Comm
        Any group of it.

    Returns
    -------
    tuple of int
        Empty where the job does not go on without them.
    """
    cdef int n, i
    cdef int* ranks
    check_alive(comm)
    n = hd_ft_lost(comm.c.session, NULL, 0)
    ranks = <int*> calloc(n + 1, sizeof(int))
    if ranks == NULL:
        raise MemoryError
    try:
        n = min(n, hd_ft_lost(comm.c.session, ranks, n))
        return tuple([ranks[i] for i in range(n)])
    finally:
        free(ranks)


def is_broken(Comm comm):
    """Whether a rank of the group's world has died, so that all operations fail.

    Parameters
    ----------
    comm : Comm
        Any group of it.
    """
    check_alive(comm)
    return bool(hd_session_broken(comm.c.session))


def agree(Comm comm, int flag, double timeout):
    """Make the bitwise and of a flag of all ranks that live; also after a death.

    All ranks of the group that live must call it.

    Parameters
    ----------
    comm : Comm
        The group.
    flag : int
        Any bits. After an error by the timeout or a signal, the next call goes on with the flag of this one.
    timeout : float
        Seconds for the others to call it.

    Returns
    -------
    int
        The same on all ranks.

    Raises
    ------
    DistTimeoutError
        Not all called in time.
    DistBackendError
        The job does not go on without a rank that dies.
    """
    cdef char text[512]
    text[0] = 0
    cdef int code
    enter(comm.c, True)
    try:
        with nogil:
            code = hd_comm_agree(comm.c, &flag, timeout, text, sizeof(text))
    finally:
        hd_comm_exit(comm.c)
    if code:
        propagate()
        raise error_of(code, text)
    propagate()
    return flag


def record_return(double seconds):
    """Note in the flight recorder that the last recovery has taken longer: by the return to a commit.

    Parameters
    ----------
    seconds : float
        Since :func:`recover` returned.
    """
    hd_rec_returned(<int64_t> (seconds * 1e9))


def recover(Comm comm, str name, double timeout, list found, bint rebuild=False):
    """Make a new world of the ranks that live; every group of the old one is of no use then.

    All ranks of the world that live must call it, spares too: they wait in it, asleep, until the others do.

    Parameters
    ----------
    comm : Comm
        Any group of the old world.
    name : str
        Name of the new group in messages.
    timeout : float
        Seconds for the others to call it; a spare waits without limit.
    found : list
        Gets five items: the new communicator, of the ranks that go on, or on a spare of the spares; a tuple of their
        places in the old world, in order: a rank keeps its own, and a former spare has a dead rank's; a tuple of
        the ranks that died, those of the old world's spares behind the others; a tuple of the former spares among the
        new ranks; and the `rebuild` that all ranks gave, or None if theirs differed. It gets none on a spare if the
        other ranks have ended. It gets them also if a signal handler raises once the communicator is made, because the
        other ranks have it then.
    rebuild : bool, optional
        Whether the ranks make the other groups again then. That of a spare does not count. A call that goes on with
        one which timed out has that one's.

    Raises
    ------
    DistTimeoutError
        Not all called in time. It may be called again.
    DistBackendError
        The job does not go on without a rank that dies.
    DistError
        The other ranks have destroyed the default group.
    RankFailedError
        On spares: all other ranks are dead.
    """
    cdef char text[512]
    text[0] = 0
    cdef hd_comm* made = NULL
    cdef int code, i, size, active, wish = HD_REBUILDS if rebuild else HD_LOSES
    cdef bint waited
    cdef int64_t began = hd_now()
    cdef int* former = NULL
    cdef int* place
    cdef hd_quota quota
    cdef Comm new
    encoded = name.encode()
    cdef const char* cname = encoded
    quota.cores, quota.group = hardware.cpu_quota() or (0.0, 0)
    check_alive(comm)
    refuse_in_handler(comm, b"reconfigure")
    enter(comm.c, True)
    try:
        size = hd_session_size(comm.c.session)
        active = hd_session_active(comm.c.session)
        waited = hd_spares_is(comm.c.session)
        former = <int*> calloc(2 * size, sizeof(int))
        if former == NULL:
            raise MemoryError
        place = former + size
        with nogil:
            code = hd_comm_recover(comm.c, cname, timeout, quota, &wish, &made, former, place, text, sizeof(text))
        if code == HD_ERR_CLOSED and waited:
            return
        if code:
            propagate()
            raise error_of(code, text)
        new = Comm.__new__(Comm)
        new.c = made
        open_comms[<size_t> made] = new
        hd_session_poisoned(comm.c.session)  # MPI_Finalize may wait for what was in flight then
        died = set(range(size)).difference([former[i] for i in range(hd_session_size(made.session))])
        hd_rec_recovered(<int> len(died), 0 if waited else hd_now() - began)
        left = range(hd_session_active(made.session))
        joined = tuple([i for i in left if former[i] >= active])
        agreed = wish == HD_REBUILDS if wish in (HD_REBUILDS, HD_LOSES) else None
        found += [new, tuple([place[i] for i in left]), tuple(sorted(died)), joined, agreed]
        propagate()
    finally:
        hd_comm_exit(comm.c)
        free(former)
