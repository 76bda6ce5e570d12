"""A name for each start of torchrun's workers, whose store keeps what earlier ones have left there.

TORCHELASTIC_RESTART_COUNT does not tell the starts apart: each agent counts the failures of its own
workers, and no restart because another node's have failed, or a node has come or gone. So rank 0
makes a name up, and the others ask for it. Only workers that live take part: rank 0 first removes
what dead ones have asked, and agents end all of their workers before they start others.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import Any

from hpcdist.errors import DistError, DistNetworkError, DistTimeoutError

#: Seconds after which a rank asks again: rank 0 may have removed its question as a dead one's.
_AGAIN = 0.25
#: Seconds between two looks at the store.
_SHORTEST, _LONGEST = 0.002, 0.05


def name_of_start(store: Any, rank: int, size: int, seconds: float) -> str:
    """Agree on a name for this start of the workers.

    All ranks must call it. Rank 0 does not wait here: a thread of its own answers the others.

    Parameters
    ----------
    store : object
        Of the agents, torch's or hpcdist's; its keys serve nothing else.
    rank, size : int
        This process's rank, and how many there are.
    seconds : float
        How long to wait for rank 0.

    Returns
    -------
    str
        Another one for each start; "none" for a rank that is none.

    Raises
    ------
    DistTimeoutError
        If rank 0 does not arrive in time.
    DistNetworkError
        If the store fails.
    """
    global _last
    if not 0 <= rank < size:
        return "none"  # the roll call refuses it
    end = time.monotonic() + seconds
    try:
        if rank == 0:
            name = secrets.token_hex(8)
            if _last is not None:  # of a start that has failed early
                _last.end()
            for other in range(1, size):
                store.delete_key(_question(other))
            _last = _Answers(store, name, size, end)
            _last.start()
            return name
        return _ask(store, rank, size, seconds, end)
    except DistError:
        raise
    except (RuntimeError, OSError) as error:  # torch's stores raise RuntimeError
        raise DistNetworkError(
            f"rank {rank} of {size}, started by torchrun: the store of its agent failed: {error}"
        ) from error


def _question(rank: int) -> str:
    return f"asks/{rank}"


class _Answers(threading.Thread):
    """Tells all ranks the name, as they come."""

    calls_no_operation = True  # for the engine

    def __init__(self, store: Any, name: str, size: int, end: float) -> None:
        super().__init__(name="hpcdist-torchrun", daemon=True)
        self._store, self._name, self._end = store, name, end
        self._waited_for = set(range(1, size))
        self._over = threading.Event()

    def run(self) -> None:
        nap = _SHORTEST
        with contextlib.suppress(DistError, RuntimeError, OSError):  # the others will say so too
            while self._waited_for and time.monotonic() < self._end and not self._over.wait(nap):
                # a look takes a call of the store for each rank
                nap = min(2 * nap, _LONGEST + 1e-4 * len(self._waited_for))
                for rank in sorted(self._waited_for):
                    if not self._over.is_set() and self._store.check([_question(rank)]):
                        token = self._store.get(_question(rank)).decode()
                        self._store.set(f"answers/{token}", self._name)
                        self._waited_for.discard(rank)
                        nap = _SHORTEST

    def end(self) -> None:
        """Answer nobody any more."""
        self._over.set()
        self.join()


#: What answers for this process, or has done so last.
_last: _Answers | None = None


def _ask(store: Any, rank: int, size: int, seconds: float, end: float) -> str:
    token = secrets.token_hex(8)
    again, nap = 0.0, _SHORTEST
    while not store.check([f"answers/{token}"]):
        now = time.monotonic()
        if now >= end:
            raise DistTimeoutError(
                f"rank {rank} of {size}, started by torchrun: rank 0 has not arrived within "
                f"{seconds:g} s. Look at what that process printed"
            )
        if now >= again:
            store.set(_question(rank), token)
            again, nap = now + _AGAIN, _SHORTEST
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST)
    return store.get(f"answers/{token}").decode()
