# Every operation as a range in torch.profiler, while a profiler runs. While none runs it costs one look-up in a
# dictionary: torch keeps a flag for exactly this question.

cdef extern from "Python.h":
    # borrowed; NULL if it is not there, and with a text as the key it sets no error
    PyObject* PyDict_GetItemWithError(object, object)
    PyObject* Py_True

cdef dict loaded_modules = sys.modules
cdef dict torch_profiler = None   # the names in torch.autograd.profiler, once it has been imported
cdef object record_function = None
cdef object events = None         # hpcdist.profiler_events, once an operation was profiled


cdef bint profiled() except -1:
    """Whether a profiler of torch is on, in any thread."""
    if torch_profiler is None and not find_profiler():
        return False
    return PyDict_GetItemWithError(torch_profiler, "_is_profiler_enabled") == Py_True


cdef bint find_profiler() except -1:
    """Without torch there is no profiler, so torch is not imported for this."""
    global torch_profiler, record_function
    cdef PyObject* found = PyDict_GetItemWithError(loaded_modules, "torch.autograd.profiler")
    if found == NULL:
        return False
    # if another thread is still importing the module, the class is not there yet
    record_function = getattr(<object> found, "record_function", None)
    if record_function is None:
        return False
    torch_profiler = vars(<object> found)
    return True


cdef int64_t bytes_moved(hd_job* j):
    """The size as benchmarks define it: the larger of this rank's input and output."""
    cdef int64_t given = 0, got = 0
    cdef int i
    if j.kind == HD_BARRIER:
        return 0
    if j.kind >= HD_SEND:
        return j.count * <int64_t> hd_itemsize(j.dtype)
    for i in range(j.nin):
        given += j.in_[i].n
    for i in range(j.nout):
        got += j.out[i].n
    return max(given, got) * <int64_t> hd_itemsize(j.dtype)


cdef object range_names = threading.local()   # .given: the name of this thread's ranges, or None


def name_ranges(name):
    """Gives this thread's next operations one name in torch.profiler; None gives them their own.

    Returns the name given before.
    """
    before = getattr(range_names, "given", None)
    range_names.given = name
    return before


cdef str range_name(hd_job* j, str more):
    given = getattr(range_names, "given", None)
    if given is not None:
        return given
    # The numbers are in the name, because torch shows the arguments of a range nowhere.
    return f"hpcdist::{j.api.decode()} ({bytes_moved(j)} B, {j.comm.name.decode()}{more})"


# An asynchronous operation gets two ranges: where it is begun, and where it is waited for. Another
# thread would have to end a single range from here to its end, perhaps after the profiler has
# stopped, and torch 2.13 then writes into memory that the next profiler has freed.
cdef object begin_range(str name):
    begun = record_function(name)
    begun.__enter__()
    return begun


cdef int end_range(object begun) except -1:
    begun.__exit__(None, None, None)
    return 0


cdef tuple begin_shown(hd_job* j, object inputs, str more):
    """Begins an operation's range, and in it the event that torch's own backends show, ``mpi:all_reduce``.

    inputs is a tensor, a list of them, or a tuple that begins with one of these.
    """
    global events
    if events is None:
        from hpcdist import profiler_events
        events = profiler_events
    while type(inputs) is tuple:
        inputs = inputs[0]
    title = "recvAnySource" if j.kind == HD_RECV and j.message.peer < 0 else hd_kind_name(j.kind).decode()
    begun = begin_range(range_name(j, more))
    try:
        return begun, events.begin_own(title, inputs)
    except BaseException:
        end_range(begun)
        raise


cdef int end_shown(tuple shown) except -1:
    try:
        events.end(shown[1])
    finally:
        end_range(shown[0])
    return 0


class op_range:
    """A range around an operation that consists of several; costs nothing while no profiler runs.

    Parameters
    ----------
    api : str
        Public name of the operation.
    group : str
        Name of its group.
    """

    __slots__ = ("_api", "_begun", "_group")

    def __init__(self, str api, str group):
        self._api = api
        self._group = group
        self._begun = None

    def __enter__(self):
        if profiled():
            given = getattr(range_names, "given", None)
            self._begun = begin_range(given or f"hpcdist::{self._api} ({self._group})")
        return self

    def __exit__(self, *exc):
        if self._begun is not None:
            end_range(self._begun)
