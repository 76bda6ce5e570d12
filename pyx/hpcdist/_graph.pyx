"""Traversal of the graph that autograd has recorded, hooks on its leaves, and the memory of their gradients.

The nodes are torch's own. Python returns the same object for a node as long as a reference to it
exists, so a set of these objects shows which nodes have been visited.
"""

from cpython.dict cimport PyDict_Size
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uintptr_t
from libc.stdlib cimport qsort

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object thing)


cdef struct Span:
    uintptr_t begin
    uintptr_t end
    Py_ssize_t place


def leaves(list todo not None, type accumulate not None):
    """Finds the leaves whose gradients a backward from some nodes would accumulate.

    Parameters
    ----------
    todo : list of torch.autograd.graph.Node
        The nodes to begin with; empty afterwards.
    accumulate : type
        Class of the nodes that add to a leaf's ``.grad``.

    Returns
    -------
    dict
        ``id`` of the leaf to its accumulating node, which must be kept as long as the ids are used.

    Notes
    -----
    About 0.15 us per edge, most of it torch's ``next_functions``; the same loop in Python takes
    0.25.
    """
    cdef dict found = {}
    cdef set seen = set(todo)
    cdef object node
    cdef tuple edge
    while todo:
        for edge in todo.pop().next_functions:
            node = edge[0]
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node) is accumulate:
                found[id(node.variable)] = node
            else:
                todo.append(node)
    return found


cdef class GradientHook:
    """A parameter's hook, which passes its number on: a fifth of the time of ``functools.partial``, per parameter.

    Parameters
    ----------
    call : callable
        ``call(index, parameter)``; one object for all parameters.
    index : int
        The parameter's number.
    """

    cdef object _call
    cdef Py_ssize_t _index

    def __cinit__(self, object call not None, Py_ssize_t index):
        self._call = call
        self._index = index

    def __call__(self, object parameter):
        return self._call(self._index, parameter)


def run_last(list hooks not None, list numbers not None):
    """Lets hooks on gradients run behind the program's own, which may change the gradients.

    Parameters
    ----------
    hooks : list of dict
        The post-accumulate hooks of each parameter.
    numbers : list of int
        The key in each of them of the hook that becomes the last.

    Returns
    -------
    bool
        Whether the program has hooks on any of them.

    Notes
    -----
    A few ns per parameter that has no other hook.
    """
    cdef Py_ssize_t i
    cdef object each
    cdef bint others = False
    for i, each in enumerate(hooks):
        if PyDict_Size(each) > 1:
            others = True
            each[numbers[i]] = each.pop(numbers[i])  # autograd does not follow a move_to_end
    return others


def references_to_gradient(object parameter not None):
    """Counts the references to a parameter's gradient as :func:`move_gradient` does."""
    gradient = parameter.grad
    return Py_REFCNT(gradient)


def move_gradient(object parameter not None, object data not None, Py_ssize_t known):
    """Gives a parameter's gradient other memory, unless something in Python refers to it.

    No other thread, and no handler of a signal, runs in between.

    Parameters
    ----------
    parameter : torch.Tensor
        Its gradient stays the same object.
    data : torch.Tensor
        Whose memory the gradient gets.
    known : int
        What :func:`references_to_gradient` counts if nothing else refers to it.

    Returns
    -------
    bool
        Whether it was done.
    """
    gradient = parameter.grad
    if gradient is None or Py_REFCNT(gradient) != known:
        return False
    gradient.data = data
    return True


cdef int by_address(const void* a, const void* b) noexcept nogil:
    cdef uintptr_t one = (<const Span*> a).begin, other = (<const Span*> b).begin
    return (one > other) - (one < other)


cdef object extent(object tensor):
    """Bytes from the first element to behind the last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())]
    return tensor.itemsize * (1 + sum(steps))


def overlapping(list tensors not None):
    """Finds tensors that lie in the memory of others.

    Parameters
    ----------
    tensors : list of torch.Tensor or None
        Dense ones.

    Returns
    -------
    list of int
        Places of tensors without which none of the rest overlaps another one. Disjoint parts of one memory do not
        overlap, unless they take turns, as columns do.

    Notes
    -----
    About 0.4 us per tensor with cold caches; an object for the storage of each would take 0.6 us.
    """
    cdef Py_ssize_t i, n = 0
    cdef uintptr_t end = 0
    cdef list found = []
    cdef object tensor
    cdef Span* spans = <Span*> PyMem_Malloc(len(tensors) * sizeof(Span))
    if spans == NULL:
        raise MemoryError
    try:
        for i, tensor in enumerate(tensors):
            if tensor is None:
                continue
            spans[n].begin = tensor.data_ptr()
            if spans[n].begin == 0:  # no elements
                continue
            spans[n].end = spans[n].begin + <uintptr_t> extent(tensor)
            spans[n].place = i
            n += 1
        qsort(spans, n, sizeof(Span), by_address)
        for i in range(n):
            if spans[i].begin < end:
                found.append(spans[i].place)
            else:
                end = spans[i].end
    finally:
        PyMem_Free(spans)
    return found
