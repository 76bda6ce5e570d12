# Signals while the engine waits. Python runs its handlers on the main thread alone, between two of
# its instructions, and wherever the interpreter is asked to check: every 50 ms, by slow_hook.

cdef struct Waiting:
    hd_comm* c      # an operation that runs on this thread has taken its lane
    Waiting* outer

cdef Waiting* waiting = NULL  # of the main thread, while a handler may run
cdef list unraised = []       # exceptions of handlers that ran where nothing can be raised
cdef object main_thread = threading.main_thread().ident


cdef int raise_next(void* arg) except -1:
    if unraised:
        raise unraised.pop(0)
    return 0


cdef void raise_later(object error) noexcept:
    """Raises an exception at the main thread's next instruction: making a text may have run a handler."""
    if threading.get_ident() == main_thread:
        unraised.append(error)
        add_raising_call(raise_next, NULL)


cdef void look(hd_job* j, bint handlers) noexcept:
    """Notes the calling line; with handlers, checks for signals first. An exception may be set then."""
    global waiting
    cdef Waiting here
    if threading.get_ident() != main_thread:
        note_line(j)
        return
    here.c = j.comm if j != NULL and j.inline_ and j.kind < HD_SEND else NULL
    here.outer = waiting
    waiting = &here
    if PyErr_Occurred() == NULL and (not handlers or look_at_signals() == 0):
        note_line(j)
        if handlers and unraised:
            error = unraised.pop(0)
            PyErr_SetObject(type(error), error)
    waiting = here.outer


cdef void site_hook(hd_job* j) noexcept with gil:
    look(j, False)


cdef int slow_hook(hd_job* j) noexcept with gil:
    look(j, True)
    return PyErr_Occurred() != NULL


cdef int refuse_in_handler(Comm comm, const char* api) except -1:
    """Refuses an operation on a lane that cannot go on before this call returns."""
    cdef Waiting* w = waiting
    if w == NULL or threading.get_ident() != main_thread:
        return 0
    while w != NULL:
        if w.c == comm.c:
            raise DistError(
                f"a signal handler called {api.decode()} of group '{comm.c.name.decode()}' while this thread waits in "
                f"another operation of that group (rank {comm.c.rank} of {comm.c.size}): it could only begin after the "
                "handler has returned. Set a flag in the handler and look at it after the operation, or use a group "
                "of its own in the handler"
            )
        w = w.outer
    return 0


cdef bint handlers_set() except -1:
    """Whether any signal has a handler in Python, which might call an operation; the interpreter's own does not."""
    for number in range(1, _signal.NSIG):
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _signal.default_int_handler:
            return True
    return False


cdef int alone_hook() noexcept with gil:
    """Whether this thread is the only code of the process that can call an operation."""
    try:
        return not handlers_set() and not other_threads()
    except Exception:
        return 0


cdef int several_hook() noexcept with gil:
    """Whether other threads of the process could call an operation."""
    try:
        return other_threads()
    except Exception:
        return 1


cdef bint other_threads() except -1:
    """It runs no Python code: a handler could raise there."""
    cdef Py_ssize_t quiet = 0
    frames = sys._current_frames()
    for thread in (*threading._active.values(), *threading._limbo.values()):
        quiet += bool(
            getattr(thread, "calls_no_operation", False)
            or type(thread).__module__ == "tqdm._monitor"  # it redraws progress bars
        )
    # threads of the futures call users' callbacks, but only if there are any
    if not watched and not completing:
        for notifier in list(notifiers):
            quiet += notifier.ident in frames
    return len(frames) != 1 + quiet
