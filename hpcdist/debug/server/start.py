"""Start and stop the server, in the ranks of the job."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import re
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from hpcdist import _engine, config, log
from hpcdist.collectives.objects import all_gather_object
from hpcdist.errors import DistError
from hpcdist.groups.state import get_world_size, is_initialized
from hpcdist.launchers.pmi.server import node_of_this_process
from hpcdist.recordings import read

_log = log.get_logger("debug")

#: Seconds that the server's process has to start, on cores that are busy.
_PATIENCE = 90.0
#: Letters that a token may have: all fit into an address.
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{8,256}")

_process: subprocess.Popen[bytes] | None = None


def start_debug_server(
    port: int = 25999, token: str | None = None, *, host: str = "127.0.0.1", worker_port: int = 0
) -> str:
    """Serve a page that shows live what all ranks do, and metrics for Prometheus.

    All ranks must call it, after ``init_process_group``: hpcdist's, or torch's with the backend
    ``hpcdist``. The server is a process of its own on rank 0's node and ends with rank 0; one on
    each other node reports to it. They read the flight recorders; the ranks do nothing for them.

    Parameters
    ----------
    port : int
        Port of the page; 0 takes any.
    token : str, optional
        What every request must have: 8 to 256 letters, digits or ``._~-``. By default that of
        ``HPCDIST_DEBUG_TOKEN``, or else a new one. Rank 0's counts.
    host : str
        Address that the page is served at; ``"0.0.0.0"`` means all of the node's. By default this
        node alone can reach it, for instance through ``ssh -L``. The page is not encrypted.
    worker_port : int
        Port at which rank 0's node takes the signed reports of other nodes, if there are any, on
        all its addresses; 0 takes any.

    Returns
    -------
    str
        The address of the page, with its token; the same on all ranks. Rank 0 logs it.

    Raises
    ------
    ImportError
        If a rank lacks the libraries of the extra ``debug``.
    ValueError
        If the token, an address or a port is not a valid one.
    DistError
        If the server cannot listen, one was started already, there is no group, or the flight
        recorder is off or in private memory. All ranks get the error, and no server is left.

    Notes
    -----
    Nothing that a request has is executed. Source: ``torch.distributed.debug.start_debug_server``.
    """
    gather, size = _gather()
    facts, why = _facts(token, size)
    why = why if why[1] else _misfit(host, port=port, worker_port=worker_port)
    ranks = gather({**facts, "why": why})
    _raise(ranks)
    first = ranks[0]
    leaders = [
        rank for rank, one in enumerate(ranks)
        if one["node"] not in [other["node"] for other in ranks[:rank]]
    ]  # fmt: skip
    files = [one["file"] for one in ranks if one["node"] == facts["node"]]
    began: dict[str, Any] = {}
    if facts["rank"] == 0:
        key = secrets.token_hex(32)
        orders = {
            "files": files, "token": facts["token"], "host": host, "port": port, "key": key,
            "worker_port": worker_port, "others": len(leaders) > 1, "dumps": config.get("dump"),
        }  # fmt: skip
        began = {"key": key, "addresses": _addresses(), **_begin(orders)}
    first_node = gather(began)[0]
    _raise([first_node])
    if facts["rank"] in leaders[1:]:
        place = {"addresses": first_node["addresses"], "port": first_node["worker_port"]}
        told = _begin({"files": files, "key": first_node["key"], "first_node": place})
        if told.get("why"):
            _log.warning("this node cannot report to the debug server: %s", told["why"])
            stop_debug_server()
    gather({})  # the nodes report now
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{first_node['port']}/?token={first['token']}"
    if facts["rank"] == 0:
        _log.warning("debug server on %s: %s", socket.gethostname(), address)
    return address


def stop_debug_server() -> None:
    """End this rank's part of the debug server. Local to this process; without one it does nothing.

    On rank 0 it ends the page, on the first rank of another node this node's reports. Source:
    ``torch.distributed.debug.stop_debug_server``.
    """
    global _process
    process, _process = _process, None
    if process is None:
        return
    assert process.stdin and process.stdout
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _gather() -> tuple[Callable[[Any], list[Any]], int]:
    """Return what gathers an object from all ranks, and how many there are."""
    torch = sys.modules.get("torch.distributed")
    gather_object: Callable[[list[Any], Any], None]
    if is_initialized():
        gather_object, size = all_gather_object, get_world_size()
    elif torch is not None and torch.is_initialized():
        gather_object, size = torch.all_gather_object, torch.get_world_size()
    else:
        raise DistError("there is no process group: call init_process_group first, on all ranks")

    def gather(mine: Any) -> list[Any]:
        objects: list[Any] = [None] * size
        gather_object(objects, mine)
        return objects

    return gather, size


def _facts(token: str | None, size: int) -> tuple[dict[str, Any], tuple[str, str]]:
    """What this rank knows, and why it cannot take part: a kind of error and a text."""
    facts: dict[str, Any] = {"node": node_of_this_process(), "file": "", "rank": -1, "token": ""}
    missing = [n for n in ("aiohttp", "prometheus_client") if importlib.util.find_spec(n) is None]
    if missing:
        text = f"the debug server needs {' and '.join(missing)}: pip install 'hpcdist[debug]'"
        return facts, ("import", text)
    facts["token"] = token or config.get("debug_token") or secrets.token_urlsafe(18)
    if not isinstance(facts["token"], str) or not _TOKEN.fullmatch(facts["token"]):
        text = "token must have 8 to 256 letters, digits or ._~-"
        return {**facts, "token": ""}, ("value", text)
    if _process is not None:
        return facts, ("", "the debug server runs already: call stop_debug_server first")
    path = _engine.recorder_path()
    if not path:
        text = "the debug server reads the flight recorders, and this rank has none that it can "
        text += "read: HPCDIST_RECORDER=0, no operation over MPI yet, or no room in /dev/shm"
        return facts, ("", text)
    own = read(path, 1)
    if own.size != size:
        text = f"the flight recorder is of a job of {own.size} ranks, the default group has {size}"
        return facts, ("", text)
    return {**facts, "file": path, "rank": own.rank}, ("", "")


def _misfit(host: Any, **ports: Any) -> tuple[str, str]:
    """Why the page cannot be served there; two empty texts if it can."""
    if not isinstance(host, str) or not host.strip():
        return "value", f"host must be an address, such as 127.0.0.1, not {host!r}"
    for name, port in ports.items():
        if type(port) is not int or not 0 <= port <= 65535:
            return "value", f"{name} must be a whole number from 0 to 65535, not {port!r}"
    return "", ""


def _raise(ranks: list[dict[str, Any]]) -> None:
    """Raise what one of them reports."""
    for rank, one in enumerate(ranks):
        kind, text = one.get("why") or ("", "")
        if text:
            text = f"rank {rank}: {text}"
            raise {"import": ImportError, "value": ValueError}.get(kind, DistError)(text)


def _begin(orders: dict[str, Any]) -> dict[str, Any]:
    """Start the process; what it says, or why it has not started."""
    global _process
    command = [sys.executable, "-m", "hpcdist.debug.server"]
    try:
        _process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the ranks
        )  # fmt: skip
    except OSError as error:
        return {"why": ("", f"the debug server cannot be started: {error}")}
    assert _process.stdin and _process.stdout
    with contextlib.suppress(OSError):
        _process.stdin.write(json.dumps(orders).encode() + b"\n")
        _process.stdin.flush()
    told, rest = _first_answer(_process.stdout.fileno())
    if "port" not in told:
        why = told.get("error") or rest.strip() or "no answer"
        stop_debug_server()
        return {"why": ("", f"the debug server has not started: {why}")}
    atexit.register(stop_debug_server)
    return told


def _first_answer(number: int) -> tuple[dict[str, Any], str]:
    """The first line of JSON, and what was printed before it."""
    text, until = b"", time.monotonic() + _PATIENCE
    ready = select.poll()  # select() takes no descriptor above 1023
    ready.register(number, select.POLLIN)
    while time.monotonic() < until:
        if not ready.poll(200):
            continue
        piece = os.read(number, 65536)
        text += piece
        for line in text.split(b"\n")[:-1]:
            if line.startswith(b"{"):
                told: dict[str, Any] = json.loads(line)
                return told, ""
        if not piece:
            break
    return {}, text.decode(errors="replace")[-2000:]


def _addresses() -> list[str]:
    """This node's name and addresses, as other nodes may know it."""
    name = socket.gethostname()
    found = [name, socket.getfqdn()]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    return list(dict.fromkeys(found))
