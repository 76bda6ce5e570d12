"""Traversal of the graph that autograd has recorded, and hooks on its leaves.

The nodes are torch's own. Python returns the same object for a node as long as a reference to it
exists, so a set of these objects shows which nodes have been visited.
"""

from cpython.dict cimport PyDict_Size


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

    Notes
    -----
    A few ns per parameter that has no other hook.
    """
    cdef Py_ssize_t i
    cdef object each
    for i, each in enumerate(hooks):
        if PyDict_Size(each) > 1:
            each[numbers[i]] = each.pop(numbers[i])  # autograd does not follow a move_to_end
