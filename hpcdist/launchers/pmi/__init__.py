"""MPI without a launcher: each process is its own process manager, over a key-value store.

MPICH and its derivatives ask a process manager for their place in the job and for their peers'
addresses, by PMI-1: lines of text on a connection whose descriptor is in ``PMI_FD``. Usually mpirun
is at the other end. Without mpirun (torchrun, multiprocessing, a notebook), this package answers:
it puts a rank's values into the store over which the processes met, and a barrier is a counter
there. No port is opened.

``protocol`` parses and answers the lines, ``server`` has the connection and the thread.
"""

from .protocol import Manager, mapping
from .server import Server, node_of_this_process

__all__ = ["Manager", "Server", "mapping", "node_of_this_process"]
