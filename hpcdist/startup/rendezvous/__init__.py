"""How processes meet: one handler per URL scheme, found by :func:`rendezvous`.

A handler is a generator function. It yields ``(store, rank, world_size)``: the key-value store the
processes share (None when there is none), this process's rank and the number of processes, where -1
means "the MPI library knows". Each scheme has a file here. ``meeting`` is the roll call of
:func:`hpcdist.init_process_group`, over any store.
"""

from __future__ import annotations

from . import env, file, mpi, tcp
from .registry import register_rendezvous_handler, rendezvous

__all__ = ["register_rendezvous_handler", "rendezvous"]

register_rendezvous_handler("mpi", mpi.handler)
register_rendezvous_handler("env", env.handler)
register_rendezvous_handler("tcp", tcp.handler)
register_rendezvous_handler("file", file.handler)
