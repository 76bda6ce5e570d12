# Batches: several sends and receives in one native call, and the operations that they consist of.

cdef class Operation:
    """One send or receive of a batch: what :class:`hpcdist.P2POp` is without its documentation.

    The usual arguments are looked at in native code; any others go to the function that checks them.

    Attributes
    ----------
    op, tensor, group, tag
        As given; the group is never None.
    peer, group_peer : int
        The other rank, as a rank of the world and of the group; -1 outside the group.
    """

    cdef readonly object op, peer, group, group_peer
    cdef public object tensor, tag

    def __init__(self, op, tensor, peer=None, group=None, tag=0, group_peer=None):
        cdef int number = 0
        cdef object place = None, owner = None
        if (op is _isend or op is _irecv) and (type(tensor) is tensor_type or not is_no_tensor(tensor)):
            if usual(group, peer, group_peer, &number) is not None:
                place, owner = number, default_group() if group is None else group
        if place is None:
            owner, peer, place = in_python["P2POp"](op, tensor, peer, group, tag, group_peer)
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = owner
        self.tag = tag
        self.group_peer = place


cdef object tensor_type = None  # the last one that is none of these


cdef bint is_no_tensor(object tensor):
    global tensor_type
    if tensor is None or isinstance(tensor, (list, tuple, dict, str, int, float, complex)):
        return True
    tensor_type = type(tensor)
    return False


cdef object plain_operation = None  # hpcdist.P2POp


def reads_natively(cls):
    """Sets the class of which batches read the attributes in native code.

    A class derived from it may have properties in their place.

    Parameters
    ----------
    cls : type
        Derived from Operation.

    Returns
    -------
    type
        The same class.
    """
    global plain_operation
    plain_operation = cls
    return cls


cdef Comm usual_batch(object operations):
    """The communicator that a batch goes through; None: it is not a usual one."""
    cdef object group = None
    cdef Operation each
    if type(operations) is not list or not operations:
        return None
    for found in <list> operations:
        if type(found) is not plain_operation:
            return None
        each = <Operation> found
        if group is None:
            group = each.group
            if type(group) is not process_group:
                return None
        elif each.group is not group:
            return None
    carrier = group.carrier
    return <Comm> carrier if type(carrier) is Comm else None


def _batch_isend_irecv(p2p_op_list):
    cdef Comm comm = usual_batch(p2p_op_list)
    if comm is None:
        return in_python["batch_isend_irecv"](p2p_op_list)
    return post_all(comm, list(p2p_op_list), False)


cdef struct Message:
    hd_buf b
    int peer, tag, kind


cdef list post_all(Comm comm, list operations, bint look_only):
    """A batch, of Operations or of tuples: nothing is posted unless all of it is valid."""
    cdef Py_ssize_t i, n = len(operations)
    cdef Message* m
    cdef Message* all = <Message*> malloc((n if n else 1) * sizeof(Message))
    cdef list keeps = [], tensors = [], works = []
    cdef Operation one
    if all == NULL:
        raise MemoryError(f"no memory for a batch of {n} messages")
    try:
        check_alive(comm)
        for i in range(n):
            m = &all[i]
            each = operations[i]
            if type(each) is plain_operation:
                one = <Operation> each
                sends, tensor, m.peer, tag = one.op is _isend, one.tensor, one.group_peer, one.tag
            else:
                sends, tensor, m.peer, tag = each
            m.kind = HD_SEND if sends else HD_RECV
            tensors.append(tensor)
            m.tag = tag_of(comm, tag)
            keeps.append(fill(tensor, &m.b, m.kind == HD_RECV, "tensor"))
            if m.b.strides != 0:
                raise disordered(m.kind == HD_SEND)
            route(comm, m.peer, m.kind, True)
        disjoint(all, n)
        if not look_only:
            works = post_checked(comm, all, keeps, tensors)
    finally:
        free(all)
    return works


cdef list post_checked(Comm comm, Message* all, list keeps, list tensors):
    """Receives first. If something raises in between, a signal's handler for example, none of them stays."""
    cdef Py_ssize_t i, n = len(keeps)
    cdef Message* m
    cdef list works = [None] * n
    cdef hd_job* posted = NULL
    cdef int kind
    enter(comm.c, True)
    try:
        for kind in (HD_RECV, HD_SEND):
            for i in range(n):
                m = &all[i]
                if m.kind == kind:
                    works[i] = post_now(comm, keeps[i], tensors[i], &m.b, m.peer, m.tag, kind,
                                        ISEND if kind == HD_SEND else IRECV, False, 0, &posted)
    except BaseException:
        hd_p2p_watch(posted)
        posted = NULL
        withdraw(works)
        raise
    finally:
        hd_p2p_watch(posted)
        hd_comm_exit(comm.c)
    return works


def withdraw(works):
    """Cancels the receives of a batch that cannot be completed; what was sent stays sent.

    Parameters
    ----------
    works : list
        Handles, and None for messages that have not begun. Those of other backends than MPI go on.
    """
    for each in works:
        if isinstance(each, Work):
            (<Work> each).take_back([])


cdef int disjoint(Message* all, Py_ssize_t n) except -1:
    """Refuses a batch that receives into memory that another of its messages uses."""
    cdef hd_seg* list = segments(n)
    cdef hd_seg* at = list
    cdef hd_own own  # none: a message that is sent may lie in no other
    cdef Py_ssize_t i
    cdef int kind, received = 0, one = 0, other = 0, found
    own.first, own.step, own.exact = -1, 0, 0
    try:
        for kind in (HD_RECV, HD_SEND):
            for i in range(n):
                if all[i].kind == kind:
                    at.ptr = all[i].b.ptr
                    at.n = all[i].b.n * hd_itemsize(all[i].b.dtype)
                    at.form = <uint64_t> i
                    at += 1
            if kind == HD_RECV:
                received = <int> (at - list)
        found = hd_overlap(list, received, 1, &one, &other)
        if not found and received:
            found = hd_input_in_output(list + received, <int> n - received, list, received, 1, own, &one, &other)
            one += received
        if found < 0:
            raise MemoryError(f"no memory to look at the {n} tensors of a batch")
        if found:
            raise overlapping(all[list[one].form].peer, one >= received, all[list[other].form].peer)
    finally:
        free(list)
    return 0


def overlapping(int peer, bint sends, int source):
    """The error of a batch that receives into memory that another of its messages uses.

    Parameters
    ----------
    peer : int
        The other rank of that message; -1: any.
    sends : bool
        Whether it is sent.
    source : int
        Where the tensor comes from that is received; -1: any rank.
    """
    origin = f"rank {source}" if source >= 0 else "any rank"
    if sends:
        return ValueError(
            f"the tensor to rank {peer} lies in the tensor from {origin} of the same batch, which may be written to "
            "before it has been read; pass a separate tensor, e.g. tensor.clone()"
        )
    return ValueError(
        f"the tensors from {f'rank {peer}' if peer >= 0 else 'any rank'} and from {origin} of one batch overlap in "
        "memory, and both are written to; pass separate tensors"
    )
