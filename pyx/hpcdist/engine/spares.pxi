# Spares, which take a dead rank's number: see engine/base/hd_spares.h.

def want_spares(int n):
    """Say how many spares worlds that are made from now on have; the ranks compare it.

    Parameters
    ----------
    n : int
        The same on all ranks.
    """
    hd_spares_want(n)


def set_aside(Comm comm, int n, str name):
    """Let the last ranks of a world be spares. All its ranks must call it, before they make other groups.

    Parameters
    ----------
    comm : Comm
        Of all ranks; the caller frees it.
    n : int
        How many: fewer than the ranks.
    name : str
        Name of the new group in messages.

    Returns
    -------
    Comm
        Of all other ranks; on a spare, of the spares.
    """
    cdef char text[512]
    text[0] = 0
    cdef hd_comm* made = NULL
    cdef int code
    cdef Comm new
    encoded = name.encode()
    cdef const char* cname = encoded
    check_alive(comm)
    enter(comm.c, True)
    try:
        with nogil:
            code = hd_comm_set_aside(comm.c, n, cname, &made, text, sizeof(text))
    finally:
        hd_comm_exit(comm.c)
    if code:
        propagate()
        raise error_of(code, text)
    new = Comm.__new__(Comm)
    new.c = made
    open_comms[<size_t> made] = new
    propagate()
    return new


def world_place(Comm comm):
    """The place of this process in its world, in which the spares follow the other ranks.

    Parameters
    ----------
    comm : Comm
        Any group of it.

    Returns
    -------
    tuple of int
        Rank, number of ranks without spares, number of spares.
    """
    cdef const hd_session* s
    check_alive(comm)
    s = comm.c.session
    active = hd_session_active(s)
    return hd_session_rank(s), active, hd_session_size(s) - active


def mind_spares(Comm comm):
    """Let the death of a spare fail operations, too, as a rank's does; until this call none has.

    Parameters
    ----------
    comm : Comm
        Of a world whose ranks can recover: they have committed.
    """
    if not hd_comm_enter(comm.c, 0):
        return
    try:
        with nogil:
            hd_ft_committed(comm.c.session)
    finally:
        hd_comm_exit(comm.c)


def farewell(Comm comm, double seconds):
    """Let the spares end, because this rank does. All other ranks must call it, or end.

    Parameters
    ----------
    comm : Comm
        The default group.
    seconds : float
        Time to wait for the other ranks. Later the spares end when the last of them has called.
    """
    if not hd_comm_enter(comm.c, 0):
        return
    try:
        with nogil:
            hd_spares_farewell(comm.c.session, seconds)
    finally:
        hd_comm_exit(comm.c)


def part_alone():
    """Let this process end without waiting long in MPI for the others, which may go on computing."""
    hd_exit_unmet(1)
