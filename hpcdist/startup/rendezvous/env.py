"""``env://``: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and many scripts set them.

If torchrun's agent serves a store of torch's at that address, it sets
``TORCHELASTIC_USE_AGENT_STORE=True``. That store is used as it is, so that no further port is
opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hpcdist import launchers
from hpcdist.errors import DistNetworkError
from hpcdist.launchers.variables import exported
from hpcdist.store._common import DEFAULT_TIMEOUT

from . import tcp, torchrun


def handler(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield the store at MASTER_ADDR and MASTER_PORT.

    Under an MPI launcher the variables may be missing, because torch's MPI backend needs none, or
    hpcdist may have set them: then rank and size are the launcher's, and there is no store.
    """
    query = dict(parse_qsl(urlsplit(url).query))
    by_us = "MASTER_ADDR" in exported(os.environ)
    if launchers.starts_mpi() and (by_us or not _set("MASTER_ADDR")):
        launch = launchers.detect()
        rank = _place(query, "rank", "RANK", -1 if launch is None else launch.rank)
        size = _place(query, "world_size", "WORLD_SIZE", -1 if launch is None else launch.size)
        yield None, rank, size
        return
    rank = _place(query, "rank", "RANK")
    size = _place(query, "world_size", "WORLD_SIZE")
    host = _needed("MASTER_ADDR")
    port = _number("MASTER_PORT", _needed("MASTER_PORT"))
    if not 0 <= port < 1 << 16:
        raise ValueError(
            f"env:// rendezvous: port must have value from 0 to 65535, but MASTER_PORT={port}"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield _agent_store(host, port, rank, size, timeout), rank, size
        return
    if port == 0 and size > 1:
        raise ValueError("env:// rendezvous: with MASTER_PORT=0 the ranks could not find rank 0")
    yield tcp.connect(host, port, rank, size, timeout), rank, size


def _agent_store(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store that torchrun's agent serves; only torch speaks its protocol."""
    from torch.distributed import PrefixStore, TCPStore

    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    try:
        store = TCPStore(host, port, size, False, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise DistNetworkError(
            f"env:// rendezvous: the store of torchrun's agent at {host}:{port} (MASTER_ADDR, "
            f"MASTER_PORT) cannot be reached: {error}"
        ) from error
    starts = PrefixStore(f"hpcdist/{job}/starts", store)
    name = torchrun.name_of_start(starts, rank, size, timeout.total_seconds())
    return PrefixStore(f"hpcdist/{job}/{name}", store)


def _set(variable: str) -> str:
    return launchers.own_variables(os.environ).get(variable, "").strip()


def _needed(variable: str) -> str:
    text = _set(variable)
    if not text:
        raise ValueError(
            f"env:// rendezvous: environment variable {variable} expected, but not set. Under "
            "mpirun or srun omit init_method: rank, size and addresses come from MPI."
        )
    return text


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"env:// rendezvous: {name}={text!r} is not a whole number") from None


def _place(query: dict[str, str], name: str, variable: str, otherwise: int | None = None) -> int:
    """Return rank or size: from the URL, else from the variable, else from the launcher."""
    if name in query:
        return _number(name, query[name])
    if otherwise is not None and not _set(variable):
        return otherwise
    return _number(variable, _needed(variable))
