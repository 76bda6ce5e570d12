"""Sets RANK, LOCAL_RANK, MASTER_ADDR and the like for the libraries that read them."""

from __future__ import annotations

import os
import socket
from array import array

from hpcdist import _engine, launchers, log
from hpcdist.backends.carrier import Carrier
from hpcdist.launchers.variables import MASTER, PLACE, export, exported

_log = log.get_logger("world")

#: The variable of a place that a spare has from the start.
_NODE = "NODE_RANK"
#: Bytes of rank 0's "host:port"; a host's name has at most 253.
_LENGTH = 272


def export_place(comm: Carrier, api: str, spares: int = 0) -> None:
    """Set torchrun's variables from what MPI says.

    All ranks must call it. A world of one that no launcher started is left out: what it starts
    would inherit the variables.

    Parameters
    ----------
    comm : hpcdist._engine.Comm
        Of all processes of the job.
    api : str
        Name of the function that is running, for messages.
    spares : int
        How many of them, the last ones, are spares: those get the variables of a place when they
        take one, by :func:`export_taken_place`.
    """
    if comm.size == 1 and launchers.find() is None:
        return
    nodes, node = 1, 0
    if len(comm.node_ranks) < comm.size:
        firsts = array("q", [0] * comm.size)
        comm.all_gather_into_tensor(firsts, array("q", [min(comm.node_ranks)]), api=api)
        places = sorted(set(firsts))
        nodes, node = len(places), places.index(min(comm.node_ranks))
    address = bytearray(_LENGTH)
    if comm.rank == 0:
        host, port = (os.environ.get(name, "").strip() for name in MASTER)
        if nodes > 1 and host == "127.0.0.1" and MASTER[0] in exported(os.environ):
            host = ""  # launch knew of one node only
        host = host or ("127.0.0.1" if nodes == 1 else socket.gethostname())
        text = f"{host}|{port or free_port()}".encode()
        address[: len(text)] = text
    comm.broadcast(address, 0, api=api)
    host, port = address.rstrip(b"\0").decode().split("|")
    size = comm.size - spares
    here = sum(rank < size for rank in comm.node_ranks)
    place = (comm.rank, size, comm.local_rank, here, node)
    values = dict(zip((*PLACE, *MASTER), (*map(str, place), host, port), strict=True))
    if comm.rank >= size:
        values = {name: values[name] for name in (_NODE, *MASTER)}
    _export(values)


def export_taken_place(comm: _engine.Comm, rank: int, size: int) -> None:
    """Set the variables of the place that this process, a spare until now, has taken; local.

    Parameters
    ----------
    comm : Comm
        Of the default group.
    rank, size : int
        As the program of this process sees them.
    """
    if _NODE in exported(os.environ):
        place = (rank, size, comm.local_rank, len(comm.node_ranks))
        _export(dict(zip(PLACE, map(str, place), strict=False)))


def _export(values: dict[str, str]) -> None:
    for name, former in export(values, os.environ).items():
        _log.warning("%s=%s was set and is wrong here: it is now %s", name, former, values[name])


def free_port() -> int:
    """Return a port of this machine that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
