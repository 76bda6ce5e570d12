"""The logger of hpcdist: standard :mod:`logging`, each message with its rank in front.

A program that configures logging itself sees the records under the name ``hpcdist``. One that does
not sees warnings on stderr, and more after ``HPCDIST_LOG=info``. This module is a leaf.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

_ROOT = "hpcdist"
_prefix = ""
_configured = logging.NOTSET  # the level that configure has set last


class _RankAdapter(logging.LoggerAdapter):
    """Puts the rank in front of a message, so that it survives any formatter."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return _prefix + str(msg), kwargs


class _StderrHandler(logging.StreamHandler):
    """Looks sys.stderr up at each record: pytest and notebooks exchange it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr


def get_logger(name: str = "") -> logging.LoggerAdapter:
    """Return a logger whose messages begin with the rank.

    Parameters
    ----------
    name : str
        Part after ``hpcdist.``; empty for the package's own logger.

    Returns
    -------
    logging.LoggerAdapter
        Use it like any logger.
    """
    return _RankAdapter(logging.getLogger(f"{_ROOT}.{name}" if name else _ROOT), {})


def set_rank(rank: int | None, size: int | None = None) -> None:
    """Set the rank that the log shows.

    Parameters
    ----------
    rank : int or None
        Rank in the world; None removes the prefix.
    size : int, optional
        Number of ranks.
    """
    global _prefix
    _prefix = "" if rank is None else f"[rank {rank}/{size}] "


def configure(level: str) -> None:
    """Let hpcdist write its own log to stderr.

    Does nothing for an empty level: then the program's own logging decides.

    Parameters
    ----------
    level : {"", "debug", "info", "warning", "error"}
        Least severe record that is written.
    """
    global _configured
    if not level:
        return
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level.upper())
    _configured = logger.level
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        # our handler writes them; the root's would write each record a second time
        logger.propagate = False


def set_by_program() -> bool:
    """Return whether the program has set another level of hpcdist's log than :func:`configure`."""
    return logging.getLogger(_ROOT).level not in (logging.NOTSET, _configured)
