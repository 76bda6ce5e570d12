"""MPI without a launcher: each process is its own process manager, over a key-value store.

MPICH and its derivatives ask a process manager for their place in the job and for their peers'
addresses, by PMI-1: lines of text on a connection whose descriptor stands in ``PMI_FD``. mpirun is
at the other end usually. Where there is no mpirun (torchrun, multiprocessing, a notebook), this
package answers: what a rank puts goes into the store by which the processes have met, and a
barrier is a counter there. No port is opened.

``protocol`` knows the lines, ``server`` the connection and the thread.
"""

from .protocol import Manager, mapping
from .server import Server, node_of_this_process

__all__ = ["Manager", "Server", "mapping", "node_of_this_process"]
