"""The dumps for ``torchfrtrace``: their form, where they go, and how they are written."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: torch's variables for the path up to the rank.
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: The version of the form, which torchfrtrace looks at.
VERSION = "2.10"
_DTYPES = {"float32": "Float", "float64": "Double", "int64": "Long", "int32": "Int"}


def dtype_name(name: str) -> str:
    """Return a dtype's name as torch's own recorders write it: ``Float`` for ``float32``."""
    return _DTYPES.get(name, name.capitalize())


def dump_of(groups: Mapping[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what torchfrtrace reads.

    Parameters
    ----------
    groups : mapping
        The name of each group to its name, description and ranks.
    entries : list of dict
        The operations of one rank.

    Returns
    -------
    dict
        Those, and the last collective of each group that was begun, started and completed.
    """
    status = {}
    for index, name in enumerate(groups):
        own = [e for e in entries if e["process_group"][0] == name and not e["is_p2p"]]
        status[str(index)] = {
            f"last_{word}_collective": max(
                (e["collective_seq_id"] for e in own if e["state"] in states), default=-1
            )
            for word, states in (
                ("enqueued", ("scheduled", "started", "completed")),
                ("started", ("started", "completed")),
                ("completed", ("completed",)),
            )
        }
    return {
        "version": VERSION,
        "backend": "hpcdist",
        "pg_config": groups,
        "pg_status": status,
        "entries": entries,
    }


def write_dump(dump: Mapping[str, Any], prefix: str | None, rank: int) -> str:
    """Write what torchfrtrace reads.

    Parameters
    ----------
    dump : mapping
        One rank's.
    prefix : str or None
        The file's path up to the rank; None takes torch's variable, or torch's default.
    rank : int
        The rank.

    Returns
    -------
    str
        The file.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    path = (prefix if prefix is not None else _prefix()) + str(rank)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    part = f"{path}.{os.getpid()}.part"
    with open(part, "wb") as file:
        pickle.dump(dump, file)
    os.replace(part, path)
    return path


def _prefix(environ: Mapping[str, str] | None = None) -> str:
    """Return the default path of dumps."""
    env = os.environ if environ is None else environ
    named = next((env[name] for name in _FILES if env.get(name)), None)
    cache = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return named or os.path.join(cache, "torch", "comm_lib_trace_rank_")
