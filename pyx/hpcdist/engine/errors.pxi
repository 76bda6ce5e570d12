# From the engine's codes to exceptions, and from the Python stack to "train.py:42 in step".

cdef dict EXCEPTIONS = {
    HD_ERR_BACKEND: DistBackendError,
    HD_ERR_MISMATCH: DistMismatchError,
    HD_ERR_TIMEOUT: DistTimeoutError,
    HD_ERR_FAILED: RankFailedError,
    HD_ERR_MEMORY: MemoryError,
    HD_ERR_NAN: DistNaNError,
}


cdef str DESTROYED = "this process group has been destroyed"


cdef object error_of(int code, const char* text):
    message = text.decode("utf-8", "replace") if text != NULL else "the engine failed and could not say why"
    return EXCEPTIONS.get(code, DistError)(message)


cdef int name_lost(object error, hd_comm* c) except -1:
    """Notes which ranks of the job died, in a RankFailedError of a job that goes on without them."""
    cdef int lost[64]
    cdef int n
    if isinstance(error, RankFailedError) and c != NULL and c.session != NULL and hd_ft_on(c.session):
        n = hd_ft_lost(c.session, lost, 64)
        error.ranks = tuple([lost[i] for i in range(min(n, 64))])
    return 0


cdef object error_of_job(hd_job* j):
    """The exception of a job, with the ranks that could not make the call, if that is the reason."""
    error = error_of(j.code, j.text)
    name_lost(error, j.comm)
    if j.refused != NULL and isinstance(error, DistError):
        ranks = tuple([j.refused.ranks[i] for i in range(min(j.refused.n, HD_REFUSED_RANKS))])
        error.refusal = Refusal(ranks, j.refused.text.decode("utf-8", "replace"), j.refused.n)
    return error


cdef bint is_alive(Comm comm) noexcept:
    """Whether the group exists and this process, which is no child of its own, may use it."""
    return not hd_forked and comm.c != NULL and not comm.c.freed and not comm.c.closing


cdef bint is_usable(Comm comm) noexcept:
    """Whether MPI has not been finalized either."""
    return is_alive(comm) and not hd_finalized


cdef object gone_error(hd_comm* c):
    """The exception of a call that came too late for its group."""
    if c != NULL and c.replaced:
        return RankFailedError(f"the default group was reconfigured when this call of group '{c.name.decode()}' began")
    if c != NULL and hd_finalized and not c.freed and not c.closing:
        return DistError(f"the program has finalized MPI: group '{c.name.decode()}' can only be destroyed")
    return DistError(DESTROYED)


cdef int check_alive(Comm comm) except -1:
    """Raise unless is_usable(); without a group, in a child of fork."""
    if hd_forked:
        raise forked_error("MPI")
    if comm is not None and not is_usable(comm):
        raise gone_error(comm.c)
    return 0


def check_usable(Comm comm):
    """Raises DistError if the group was destroyed, or this process is a child of fork."""
    check_alive(comm)


cdef int enter(hd_comm* c, bint begins) except -1:
    """Call before any use of the group's session or MPI outside its lane, and hd_comm_exit() after it."""
    if not hd_comm_enter(c, begins):
        raise gone_error(c)
    return 0


# ---- the calling line ----

cdef str PACKAGE = __file__.rpartition("/")[0] + "/"
#: Where the function is that stands before a deprecated one, as torch's all_gather_into_tensor.
cdef tuple DEPRECATED = ("/typing_extensions.py", "/warnings.py", "/_py_warnings.py")


cdef object calling_frame():
    """The innermost frame of the program's own, or None."""
    cdef object frame = sys._getframe()
    while frame is not None and is_between(frame.f_code):
        frame = frame.f_back
    return frame


cdef bint is_between(object code) except -1:
    """Whether the code stands between the program's line and the engine."""
    filename = code.co_filename
    # torch's own: inside backward(), and over the bridge.
    if filename.startswith((PACKAGE, "<frozen")) or "/site-packages/torch/" in filename:
        return True
    return code.co_name == "wrapper" and filename.endswith(DEPRECATED)


cdef object line_of(object frame):
    """"train.py:42 in step"."""
    parts = frame.f_code.co_filename.rsplit("/", 2)
    short = parts[0] if len(parts) < 3 else f"{parts[1]}/{parts[2]}"
    return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"


cdef enum:
    LINES = 64

# Texts of calling lines that were noted of late; a number never means another line.
cdef struct Line:
    uint32_t number
    char text[HD_SITE]

cdef Line noted[LINES]


cdef inline void note_line(hd_job* j) noexcept:
    cdef Line* line
    if j == NULL or j.site[0] != 0:
        return
    line = &noted[j.site_id % LINES]
    if j.site_id and line.number == j.site_id:
        strcpy(j.site, line.text)
    elif PyErr_Occurred() == NULL:
        note_new_line(j)


cdef void note_new_line(hd_job* j) noexcept:
    cdef bytes line
    try:
        if j.site_id:
            line = text_of_site(j.site_id)
        else:
            frame = calling_frame()
            line = b"" if frame is None else printable(line_of(frame))
        strncpy(j.site, <const char*> line, HD_SITE - 1)
        j.site[HD_SITE - 1] = 0
        if j.site_id and j.site[0] != 0:
            noted[j.site_id % LINES].number = j.site_id
            strcpy(noted[j.site_id % LINES].text, j.site)
    except BaseException as error:
        raise_later(error)  # a message without its line is better than none


cdef int propagate() except -1:
    """Lets an exception propagate that a signal handler raised while the engine waited."""
    return -1 if PyErr_Occurred() != NULL else 0
