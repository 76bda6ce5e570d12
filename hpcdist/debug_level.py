"""Debug levels: how much hpcdist checks and logs: OFF, INFO, DETAIL.

The level comes from :func:`set_debug_level`, else from the environment variable ``HPCDIST_DEBUG``,
else from torch's ``TORCH_DISTRIBUTED_DEBUG``. It is looked at when a group or a
DistributedDataParallel is made, so what exists already keeps what it was made with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from hpcdist import config

_TORCH_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(IntEnum):
    """Debug levels: ``OFF``, ``INFO``, ``DETAIL``.

    Parameters
    ----------
    value : int
        0, 1 or 2. The levels compare like these numbers.

    Notes
    -----
    Source: ``torch.distributed.DebugLevel``.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Return the debug level of this process.

    Returns
    -------
    DebugLevel
        As set by :func:`set_debug_level`, else as the environment says now.

    Raises
    ------
    ValueError
        If the environment variable that decides holds something else than a level.

    Notes
    -----
    Local to this process; give all ranks the same. Source: ``torch.distributed.get_debug_level``.
    """
    return _from_env(os.environ) if _level is None else _level


def set_debug_level(level: DebugLevel | str) -> None:
    """Set the debug level of this process, for groups and modules made from now on.

    Parameters
    ----------
    level : DebugLevel or str
        One of hpcdist's or torch's levels, or its name.

    Raises
    ------
    TypeError, ValueError
        If it is none.

    Notes
    -----
    Local to this process; give all ranks the same. Source: ``torch.distributed.set_debug_level``.
    """
    global _level
    # torch's levels are another class with the same names
    name: Any = level if isinstance(level, str) else getattr(level, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"level must be a DebugLevel or its name, not {level!r}")
    if name.upper() not in DebugLevel.__members__:
        raise ValueError(f"level must be OFF, INFO or DETAIL, not {name!r}")
    _level = DebugLevel[name.upper()]


def set_debug_level_from_env() -> None:
    """Set the debug level as the environment says now, and keep it.

    Raises
    ------
    ValueError
        If ``HPCDIST_DEBUG`` or ``TORCH_DISTRIBUTED_DEBUG`` holds something else than a level.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.set_debug_level_from_env``.
    """
    global _level
    _level = _from_env(os.environ)


def check_level(environ: Mapping[str, str] | None = None) -> str:
    """Return the level of the entry check for a new group: as set, else "full" at DETAIL.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    str
        ``"off"``, ``"fast"``, ``"on"`` or ``"full"``.
    """
    env = os.environ if environ is None else environ
    setting = env.get(config.option("check").variable, "").strip()
    if not setting and get_debug_level() >= DebugLevel.DETAIL:
        return "full"
    return config.get("check", env)


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """Return the level of hpcdist's log: as set, else what the debug level brings.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    str
        A level of the log, or "" where the program's own logging decides.
    """
    setting: str = config.get("log", os.environ if environ is None else environ)
    return setting or ("", "info", "debug")[get_debug_level()]


def _from_env(env: Mapping[str, str]) -> DebugLevel:
    option = config.option("debug")
    setting = config.get("debug", env)
    if setting:
        return DebugLevel[setting.upper()]
    theirs = env.get(_TORCH_VARIABLE, "").strip()
    if not theirs:
        return DebugLevel.OFF
    if theirs.lower() not in option.choices:
        raise ValueError(f"{_TORCH_VARIABLE}={theirs!r} is not valid: it must be OFF, INFO, DETAIL")
    return DebugLevel[theirs.upper()]
