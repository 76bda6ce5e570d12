"""The roll call: all ranks arrive, or all that arrived raise the same error, in time.

Each rank writes its name under its number; the last one to arrive gathers what all have written in
one value and writes the verdict, for which all wait. A rank that finds an error, or runs out of
time, writes another verdict instead. Only the first verdict counts, so it is the same for all. The
keys of a meeting are under its own number: a later meeting over the same store does not see them.

A rank's calls of the store do not grow with the number of ranks: only one rank looks at the places
of all, the last to arrive, or the first whose time is up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcdist.errors import (
    DistError,
    DistMismatchError,
    DistNetworkError,
    DistTimeoutError,
    StoreTimeoutError,
)
from hpcdist.store import Store

# Seconds that one call of the store may wait: it may not notice Ctrl-C before it returns.
_SLICE = 1.0
# Seconds in which the first rank whose time is up finds out who is missing. Then the others do.
_LOOK = 5.0
# The number of keys that one call of the store asks for, and of the missing that a message names.
_KEYS, _NAMED = 1024, 32
#: Distinguishes this process from all others, also from the child of a fork.
_token = (0, "")

_ERRORS = {"mismatch": DistMismatchError, "timeout": DistTimeoutError}


@dataclass(frozen=True)
class Meeting:
    """A roll call that all ranks answered.

    Parameters
    ----------
    store : object
        The store.
    prefix : str
        Prefix of this meeting's keys.
    rank : int
        This process's rank.
    size : int
        Number of ranks.
    name : str
        Unique name of the meeting, the same on all ranks.
    """

    store: Any
    prefix: str
    rank: int
    size: int
    name: str

    def published(self) -> list[dict[str, Any]]:
        """Return what each rank published about itself, in the order of the ranks.

        Returns
        -------
        list of dict
            ``host``, ``pid``, and what :func:`hold_roll_call` was given.
        """
        return json.loads(zlib.decompress(self.store.get(f"{self.prefix}/published")))


def hold_roll_call(
    store: Any,
    rank: int,
    size: int,
    seconds: float,
    where: str,
    about: dict[str, Any] | None = None,
    agree: str = "",
) -> Meeting:
    """Wait for all ranks.

    All ranks must call it.

    Parameters
    ----------
    store : object
        Key-value store that the ranks share; ours, or torch's.
    rank : int
        This process's rank.
    size : int
        Number of ranks, as this process knows it.
    seconds : float
        How long to wait for the others.
    where : str
        The place, for messages: a URL.
    about : dict, optional
        What this rank publishes about itself; JSON.
    agree : str
        A text that must be the same on all ranks.

    Returns
    -------
    Meeting
        Name, keys, and what the other ranks published.

    Raises
    ------
    ValueError
        If this rank is not one of the ranks; the others get a DistMismatchError.
    DistMismatchError
        On all ranks that arrived: if two of them are the same rank, or they disagree on the size.
    DistTimeoutError
        On all ranks that arrived: if others do not arrive in time; it names them.
    DistNetworkError
        If the store fails.
    """
    end = time.monotonic() + seconds
    host, pid = socket.gethostname(), os.getpid()
    me = f"pid {pid} on {host}"
    place = f"rank {rank} of {size}, meeting at {where}"
    try:
        if size < 1 or not 0 <= rank < size:
            text = f"rank {rank} is not one of {size} ranks ({me})"
            _judge(store, _open_round(store), f"mismatch {text}")
            raise ValueError(f"{text}: ranks go from 0 to world_size - 1")
        prefix, other = _enter(store, rank, {**(about or {}), "host": host, "pid": pid})
        if other is not None:
            complaint = (
                f"two processes say they are rank {rank}: pid {other['pid']} on {other['host']}, "
                f"and {me}. If the first belongs to an earlier job, the store is that job's: start "
                "with another port, or a file that does not exist"
            )
        else:
            complaint = _disagreement(store, prefix, rank, size, me, agree)
        if complaint:
            _judge(store, prefix, f"mismatch {complaint}")
            raise DistMismatchError(f"{place}: {complaint}")
        if store.add(f"{prefix}/count", 1) == size:
            _publish(store, prefix, size)
            _judge(store, prefix, "ok")
        verdict = _wait(store, prefix, end)
        if verdict is None and store.add(f"{prefix}/looking", 1) > 1:
            verdict = _wait(store, prefix, time.monotonic() + _LOOK)
        if verdict is None:
            verdict = _judge(store, prefix, _absent(store, prefix, size, seconds))
        if verdict == "ok":
            name = _first(store, f"{prefix}/name", secrets.token_hex(8))
            return Meeting(store, prefix, rank, size, name)
    except (DistError, ValueError):
        raise
    except (RuntimeError, OSError) as error:  # torch's stores raise RuntimeError, sockets OSError
        raise DistNetworkError(f"{place}: the store failed: {error}") from error
    kind, _, text = verdict.partition(" ")
    raise _ERRORS[kind](f"{place}: {text}")


def _own_token() -> str:
    global _token
    if _token[0] != os.getpid():
        _token = (os.getpid(), secrets.token_hex(8))
    return _token[1]


def _first(store: Any, key: str, value: str) -> str:
    """Write a key unless it exists; return its value."""
    return store.compare_set(key, "", value).decode()


def _judge(store: Any, prefix: str, verdict: str) -> str:
    """Write a verdict, unless there is one; return the one that counts."""
    return _first(store, f"{prefix}/verdict", verdict)


def _prefix(number: int) -> str:
    return f"hpcdist/meeting/{number}"


def _open_round(store: Any) -> str:
    """Find the first meeting without a verdict, for a rank that has no number to find its own."""
    number = 0
    while store.check([f"{_prefix(number)}/verdict"]):
        number += 1
    return _prefix(number)


def _enter(store: Any, rank: int, about: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Take this rank's place in the first meeting it has not attended.

    Returns the meeting's prefix, and the process that has the place if it is another one.
    """
    mine = {**about, "token": _own_token()}
    number = 0
    while True:
        prefix = _prefix(number)
        there = json.loads(_first(store, f"{prefix}/rank/{rank}", json.dumps(mine)))
        if there.get("token") != mine["token"]:
            return prefix, there
        if store.add(f"{prefix}/seen/{rank}", 1) == 1:
            return prefix, None
        number += 1


def _disagreement(store: Any, prefix: str, rank: int, size: int, me: str, agree: str) -> str:
    """Compare what must be the same on all ranks with the first rank's text."""
    mine = {"size": size, "agree": agree, "who": f"rank {rank} ({me})"}
    first = json.loads(_first(store, f"{prefix}/agreed", json.dumps(mine)))
    if first["size"] != size:
        return (
            f"the ranks disagree on the world size: {first['who']} says {first['size']}, "
            f"{mine['who']} says {size}"
        )
    if first["agree"] != agree:
        return f"the ranks disagree: {first['who']} has {first['agree']}, {mine['who']} has {agree}"
    return ""


def _wait(store: Any, prefix: str, end: float) -> str | None:
    """Wait for the verdict; None after the deadline."""
    key = f"{prefix}/verdict"
    pause = 0.002
    while not store.check([key]):
        left = end - time.monotonic()
        if left <= 0:
            return None
        if isinstance(store, Store) and store._waits_quietly:
            with contextlib.suppress(StoreTimeoutError):
                store.wait([key], min(left, _SLICE))
        else:  # in torch's, what a short wait does depends on the store (HashStore: it never ends)
            time.sleep(min(left, pause))
            pause = min(2 * pause, 0.1)
    return store.get(key).decode()


def _places(prefix: str, ranks: range) -> list[str]:
    return [f"{prefix}/rank/{rank}" for rank in ranks]


def _blocks(size: int) -> Iterator[range]:
    """Split the ranks by what one call of the store asks for."""
    return (range(first, min(first + _KEYS, size)) for first in range(0, size, _KEYS))


def _publish(store: Any, prefix: str, size: int) -> None:
    """Gather what all ranks have written in one value."""
    written: list[dict[str, Any]] = []
    for ranks in _blocks(size):
        keys = _places(prefix, ranks)
        try:
            values = store.multi_get(keys)
        except NotImplementedError:
            values = [store.get(key) for key in keys]
        written += map(json.loads, values)
    for one in written:
        del one["token"]
    store.set(f"{prefix}/published", zlib.compress(json.dumps(written).encode()))


def _missing(store: Any, prefix: str, ranks: range) -> Iterator[int]:
    """Find the ranks that have not arrived, by halves: one call each for the halves that have."""
    if not store.check(_places(prefix, ranks)):
        if len(ranks) == 1:
            yield ranks[0]
            return
        middle = len(ranks) // 2
        yield from _missing(store, prefix, ranks[:middle])
        yield from _missing(store, prefix, ranks[middle:])


def _absent(store: Any, prefix: str, size: int, seconds: float) -> str:
    """Say who has not arrived."""
    found = (rank for ranks in _blocks(size) for rank in _missing(store, prefix, ranks))
    missing = list(itertools.islice(found, _NAMED + 1))
    if not missing:
        return (
            f"timeout all {size} ranks have arrived, but the last of them has not said so within "
            f"{seconds:g} s. Look at what the processes printed: one may have died, or the store "
            "is very slow"
        )
    arrived = size - len(missing) if len(missing) <= _NAMED else store.add(f"{prefix}/count", 0)
    names = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return (
        f"timeout after {seconds:g} s only {arrived} of {size} ranks have arrived; "
        f"missing: rank{'s' if len(missing) > 1 else ''} {names}. Look at what those processes "
        "printed, and whether they were given the same address"
    )
