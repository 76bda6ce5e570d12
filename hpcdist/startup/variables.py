"""Sets RANK, LOCAL_RANK, MASTER_ADDR and the like for the libraries that read them."""

from __future__ import annotations

import os
import socket
from array import array

from hpcdist import launchers, log
from hpcdist.backends.carrier import Carrier
from hpcdist.launchers.variables import MASTER, PLACE, export, exported

_log = log.get_logger("world")

#: Bytes of rank 0's "host:port"; a host's name has at most 253.
_LENGTH = 272


def export_place(comm: Carrier, api: str) -> None:
    """Set torchrun's variables from what MPI says.

    All ranks must call it. A world of one that no launcher started is left out: what it starts
    would inherit the variables.

    Parameters
    ----------
    comm : hpcdist._engine.Comm
        Of all processes of the job.
    api : str
        Name of the function that is running, for messages.
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
    place = (comm.rank, comm.size, comm.local_rank, len(comm.node_ranks), node)
    values = dict(zip((*PLACE, *MASTER), (*map(str, place), host, port), strict=True))
    for name, former in export(values, os.environ).items():
        _log.warning("%s=%s was set and is wrong here: it is now %s", name, former, values[name])


def free_port() -> int:
    """Return a port of this machine that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
