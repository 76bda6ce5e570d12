"""Where the dumps for ``torchfrtrace`` go, and how they are written."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_dump"]

#: torch's variables for the path up to the rank.
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


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
