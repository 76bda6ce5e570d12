# What the native flight recorder learns of an operation.

#: An operation that is not listed is named alone.
cdef dict KIND_OF_API = {
    "barrier": HD_BARRIER, "all_reduce_coalesced": HD_ALL_REDUCE, "reduce": HD_REDUCE,
    "reduce_scatter": HD_REDUCE_SCATTER, "all_gather": HD_ALL_GATHER, "gather": HD_GATHER, "scatter": HD_SCATTER,
    "all_to_all": HD_ALL_TO_ALL, "all_to_all_single": HD_ALL_TO_ALL, "isend": HD_SEND, "irecv": HD_RECV,
}

cdef enum:
    MOST_TOGETHER = 64  # messages of one batch that are noted

cdef dict names = {}  # name of an operation -> ApiName, whose bytes operations in flight point to; never emptied


@cython.final
cdef class ApiName:
    cdef bytes text
    cdef unsigned short number  # the flight recorder's; 0: it has none so far


cdef void describe(hd_beside_call* c, int kind, int dtype, int redop, int root, int64_t count, int64_t ins,
                   int64_t outs) noexcept:
    """One call for the flight recorder: an operation on tensors of `count` elements, `ins` and `outs` in all."""
    c.kind = kind
    c.dtype = dtype
    c.redop = redop
    c.peer = root
    c.count = count
    c.in_n = ins
    c.out_n = outs


cdef int describe_any(hd_beside_call* out, str api, regions, int peer, facts, list tensors, Py_ssize_t reads) except -1:
    """Calls for the flight recorder; returns how many: each message of a batch is one. `reads`: see launch."""
    cdef Py_ssize_t i, n, first, several = len(regions)
    cdef int kind = KIND_OF_API.get(api, -1)
    cdef int64_t one, ins = 0, outs = 0
    cdef int redop = -1, root = peer
    if api == "batch_isend_irecv":
        n = min(len(tensors), MOST_TOGETHER)
        for i in range(n):
            sends, _, other, _ = tensors[i]
            one = regions[i].elements
            describe(&out[i], HD_SEND if sends else HD_RECV, regions[i].dtype, -1, other, one, one, one)
        return n
    for i in range(several):
        one = regions[i].elements
        if i < reads or not reads:
            ins += one
        if i >= reads:
            outs += one
    if facts and isinstance(facts[0], ReduceOp):
        redop = facts[0].code
        if kind == HD_REDUCE:
            root = facts[3]
    if several:
        # Of a list, the first tensor: all ranks pass lists of the same sizes, while their single tensors may differ.
        first = reads if several - reads > reads else 0
        describe(out, kind, regions[0].dtype, redop, root, regions[first].elements, ins, outs)
    else:
        describe(out, kind, -1, redop, root, 0, 0, 0)
    return 1


cdef ApiName name_of_api(str api):
    cdef ApiName known = names.get(api)
    if known is None:
        known = ApiName.__new__(ApiName)
        known.text = api.encode()
        names[api] = known
    return known


cdef uint64_t note_calls(hd_beside* to, ApiName name, hd_beside_call* about, int abouts, unsigned number) except? 0:
    """Note calls in the flight recorder; returns the number of the first, 0: there is none."""
    cdef uint64_t first = 0, one
    cdef int i
    if to == NULL:
        return 0
    if name.number == 0:
        name.number = to.name(name.text)
    for i in range(abouts):
        about[i].name = name.number
        about[i].seq = number if about[i].kind < HD_SEND else 0
        one = to.begin(to, &about[i])
        if i == 0:
            first = one
    return first


cdef void end_calls(hd_beside* to, uint64_t record, int abouts) noexcept:
    """Note that calls could not be started."""
    cdef int i
    for i in range(abouts):
        to.end(record + i, HD_ERR_BACKEND)


cdef str explained(hd_watched* w):
    """Lines about what all ranks called in its place, or nothing."""
    cdef char[2048] text
    text[0] = 0
    with nogil:
        hd_watched_explain(w, text, sizeof(text))
    return text.decode("utf-8", "replace")
