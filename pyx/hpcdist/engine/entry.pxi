# The public functions of single messages. The usual call stays in native code; any other goes to the Python
# function that has the documentation.

cdef extern from *:
    """
    #include <structmember.h>

    /* Where an attribute of __slots__ lies in the objects of its class, in bytes; 0: it is none. */
    static Py_ssize_t hd_attribute_at(PyObject *attribute)
    {
        return Py_IS_TYPE(attribute, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)attribute)->d_member->offset : 0;
    }
    static PyObject *hd_attribute(PyObject *of, Py_ssize_t at) { return *(PyObject **)((char *)of + at); }
    """
    Py_ssize_t hd_attribute_at(object attribute) noexcept
    PyObject* hd_attribute(object of, Py_ssize_t at) noexcept

cdef object groups = None         # hpcdist.groups.world.world
cdef Py_ssize_t comm_at = 0, pg_at = 0  # its slots of these names: two look-ups for each message less
cdef object process_group = None  # the class
cdef dict in_python = {}          # name of a function -> what any other call goes to


cdef object default_comm():
    cdef PyObject* found = hd_attribute(groups, comm_at) if comm_at else NULL
    return <object> found if found != NULL else groups.comm


cdef object default_group():
    cdef PyObject* found = hd_attribute(groups, pg_at) if pg_at else NULL
    return <object> found if found != NULL else groups.pg


cdef Comm usual(object group, object peer, object group_peer, int* place):
    """The communicator that a call goes through, and the peer's rank in it; None: it is not a usual call."""
    cdef int overflow = 0
    cdef long long number
    if group_peer is not None or type(peer) is not int:
        return None
    if group is None:  # the ranks of the world are its own
        carrier, rank = default_comm(), peer
    elif type(group) is process_group:
        carrier, rank = group.carrier, group.members.index.get(peer)
    else:
        return None
    if type(carrier) is not Comm or rank is None or not is_usable(<Comm> carrier):
        return None
    number = PyLong_AsLongLongAndOverflow(rank, &overflow)
    if overflow or number < 0 or number >= (<Comm> carrier).c.size:
        return None
    place[0] = <int> number
    return <Comm> carrier


def _isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    cdef int place = 0
    cdef Comm comm = usual(group, dst, group_dst, &place)
    if comm is None:
        return in_python["isend"](tensor, dst, group, tag, group_dst)
    return post(comm, tensor, place, tag_of(comm, tag), HD_SEND, ISEND, False, 0)


def _irecv(tensor, src=None, group=None, tag=0, group_src=None):
    cdef int place = 0
    cdef Comm comm = usual(group, src, group_src, &place)
    if comm is None:
        return in_python["irecv"](tensor, src, group, tag, group_src)
    return post(comm, tensor, place, tag_of(comm, tag), HD_RECV, IRECV, False, 0)


def _send(tensor, dst=None, group=None, tag=0, group_dst=None):
    cdef int place = 0
    cdef Comm comm = usual(group, dst, group_dst, &place)
    if comm is None or place == comm.c.rank:
        return in_python["send"](tensor, dst, group, tag, group_dst)
    transfer(comm, tensor, place, tag_of(comm, tag), HD_SEND, SEND)


def _recv(tensor, src=None, group=None, tag=0, group_src=None):
    cdef int place = 0
    cdef Comm comm = usual(group, src, group_src, &place)
    if comm is None or place == comm.c.rank:
        return in_python["recv"](tensor, src, group, tag, group_src)
    transfer(comm, tensor, place, tag_of(comm, tag), HD_RECV, RECV)
    return src


def entry(function, world, group_type):
    """The native function that takes the place of isend, irecv, send, recv or batch_isend_irecv.

    Parameters
    ----------
    function : callable
        That function; it gets the calls that are not usual: of a group of several backends or with
        hooks, with `group_dst` or `group_src`, from any rank, with wrong arguments.
    world : object
        Its attribute `comm` is what carries the default group's operations.
    group_type : type
        The class of groups.

    Returns
    -------
    callable
    """
    global groups, process_group, comm_at, pg_at
    groups, process_group = world, group_type
    comm_at, pg_at = hd_attribute_at(type(world).comm), hd_attribute_at(type(world).pg)
    in_python[function.__name__] = function
    native = {"isend": _isend, "irecv": _irecv, "send": _send, "recv": _recv,
              "batch_isend_irecv": _batch_isend_irecv}[function.__name__]
    return functools.wraps(function)(native)


def checks_operations(function):
    """Sets what makes the checks of a P2POp whose arguments are not the usual ones.

    Parameters
    ----------
    function : callable
        Takes all arguments; returns the group, the peer as a rank of the world, and as one of the group.

    Returns
    -------
    callable
        The same function.
    """
    in_python["P2POp"] = function
    return function
