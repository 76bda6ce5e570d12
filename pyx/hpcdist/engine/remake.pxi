# Groups that are made again after a recovery: see engine/recovery/hd_remake.h.

def exchange(Comm comm, bytes mine):
    """Give all ranks the bytes of all ranks; all of them must call it.

    It belongs to a thread of its own: what a signal handler raises would come out on this rank alone.

    Parameters
    ----------
    comm : Comm
        The default group.
    mine : bytes
        Of this rank.

    Returns
    -------
    list of bytes or None
        By rank; None on all of them if one has died.

    Raises
    ------
    DistBackendError
        On all ranks: MPI has failed, or memory was missing, on one of them.
    """
    cdef int* sizes = NULL
    cdef char* every = NULL
    cdef int code, i, n = len(mine)
    cdef const char* data = mine
    cdef char* at
    check_alive(comm)
    sizes = <int*> calloc(comm.c.size, sizeof(int))  # the others hear of it if there is none
    enter(comm.c, True)
    try:
        with nogil:
            code = hd_comm_exchange(comm.c, data, n, &every, sizes)
        if code == HD_ERR_FAILED:
            return None
        if code:
            raise error_of(code, b"the ranks that are left could not tell each other which groups they have")
        found = []
        at = every
        for i in range(comm.c.size):
            found.append(at[:sizes[i]])
            at += sizes[i]
        return found
    finally:
        hd_comm_exit(comm.c)
        free(sizes)
        free(every)


def remake(Comm comm, ranks, str name, double timeout, int check, list found):
    """Make groups that have no member in common, in one call that all ranks of a default group make.

    Parameters
    ----------
    comm : Comm
        The default group.
    ranks : sequence of int
        The members of this rank's group, in its order; empty if it is in none of them.
    name : str
        The same on all members.
    timeout : float
        The group's.
    check : int
        The group's level of the entry check, the same on all members.
    found : list
        Gets the group's communicator, on a member.

    Returns
    -------
    bool
        False on all ranks if one has died: no group was made.

    Raises
    ------
    DistBackendError
        On all ranks, if one of the groups could not be made.
    """
    cdef char text[512]
    text[0] = 0
    cdef hd_comm* made = NULL
    cdef int code, i, n = len(ranks)
    cdef Comm new
    cdef int* members = NULL
    encoded = name.encode()
    cdef const char* cname = encoded
    check_alive(comm)
    members = <int*> calloc(n + 1, sizeof(int))  # the others hear of it if there is none
    enter(comm.c, True)
    try:
        if members != NULL:
            for i in range(n):
                members[i] = ranks[i]
        with nogil:
            code = hd_comm_remake(comm.c, members, n, cname, timeout, check, &made, text, sizeof(text))
        if code == HD_ERR_FAILED:
            return False
        if code:
            raise error_of(code, text)
        if made != NULL:
            new = Comm.__new__(Comm)
            new.c = made
            open_comms[<size_t> made] = new
            found.append(new)
        return True
    finally:
        hd_comm_exit(comm.c)
        free(members)
