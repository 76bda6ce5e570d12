"""The engine's message schedules as models, for more ranks than a simulator can run.

Each function returns the messages that one rank sends and receives, at most over all ranks, and the
seconds until the last rank is done. `tests/scale/run.py` compares them with the engine's own files
in SMPI, where both run.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from network import OVERHEAD, POLL, flight

__all__ = ["MODELS", "Cost", "agree", "group", "late", "start"]

#: `HD_ROLL_STAR` and `HD_ROLL_ARITY` of hd_roll.c, `sizeof (hd_word)` of hd_roll_words.h.
STAR, ARITY, WORD = 33, 8, 192
#: Bytes: the ballots of the two rounds of an entry check, the first with eight of data; a mask of
#: context ids.
VOTES, SEEN, CONTEXT = 96, 16, 256
#: `AT_ONCE` of hd_here.c.
AT_ONCE = 2
#: Of 50 ms, more than its ranks need until nothing is new.
TICKS = 100


@dataclass(frozen=True)
class Cost:
    """What one call costs."""

    #: Sent and received by one rank, at most over all ranks.
    messages: int
    #: Until the last rank is done.
    seconds: float


def _reduce(ranks: int, size: int, times: np.ndarray, counts: np.ndarray) -> None:
    """All-reduce by recursive doubling: the ranks beyond a power of two go through a neighbour."""
    core = 1 << (ranks.bit_length() - 1)
    beyond = ranks - core
    step = OVERHEAD + flight(size)
    seen = OVERHEAD + POLL / 2  # half a look passes before a message is seen
    if beyond:
        parts = times[core:] + step
        times[:beyond] = np.maximum(times[:beyond], parts) + seen
        counts[core:] += 1
        counts[:beyond] += 1
    inside = np.arange(core)
    mask = 1
    while mask < core:
        partners = inside ^ mask
        own = times[:core]
        times[:core] = np.maximum(own + OVERHEAD, own[partners] + step) + seen
        counts[:core] += 2
        mask *= 2
    if beyond:
        times[core:] = times[:beyond] + step + seen
        times[:beyond] += OVERHEAD
        counts[core:] += 1
        counts[:beyond] += 1


def agree(ranks: int) -> Cost:
    """Model the entry check between nodes (hd_check_mpi.c): two rounds."""
    times, counts = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
    _reduce(ranks, VOTES, times, counts)
    _reduce(ranks, SEEN, times, counts)
    return Cost(int(counts.max()), float(times.max()))


def group(ranks: int, begin: np.ndarray | None = None) -> Cost:
    """Model the roll call (hd_roll.c): hello and promise go up a tree, go and verdict down."""
    arity = ranks - 1 if ranks <= STAR else ARITY
    kids = [range(arity * r + 1, min(arity * r + 1 + arity, ranks)) for r in range(ranks)]
    free = (np.zeros(ranks) if begin is None else begin).tolist()
    counts, promised, heard = [0] * ranks, [0] * ranks, [False] * ranks
    events: list[tuple[float, int, str, int]] = []
    last = 0.0

    def send(rank: int, to: int, word: str) -> None:
        counts[rank] += 1
        free[rank] += OVERHEAD
        heapq.heappush(events, (free[rank] + flight(WORD), to, word, rank))

    for rank in range(1, ranks):
        send(rank, (rank - 1) // arity, "hello")
    while events:
        now, rank, word, by = heapq.heappop(events)
        counts[rank] += 1
        # A rank looks at each of its neighbours in turn: it is half way round.
        looks = (len(kids[rank]) + (rank > 0)) / 2 + 1
        free[rank] = max(free[rank], now) + looks * POLL + OVERHEAD
        if word == "hello":
            send(rank, by, "go")
        elif word == "go":
            heard[rank] = True
        elif word == "promise":
            promised[rank] += 1
        all_below = promised[rank] == len(kids[rank])
        if word == "verdict" or (word == "promise" and all_below and not rank):
            for kid in kids[rank]:
                send(rank, kid, "verdict")
            last = max(last, free[rank])
        elif rank and heard[rank] and all_below:
            heard[rank] = False  # once
            send(rank, (rank - 1) // arity, "promise")
    return Cost(max(counts), last)


def start(ranks: int) -> Cost:
    """Model the meeting of all ranks (hd_meet.c): a new context id, then the roll call."""
    times, counts = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
    _reduce(ranks, CONTEXT, times, counts)
    after = group(ranks, times)
    return Cost(int(counts.max()) + after.messages, after.seconds)


def _union(known: np.ndarray, sends: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
    """Pass on what each rank knows. Return what each knows now, who learned something, who read."""
    ranks = len(known)
    then, news = known.copy(), np.zeros(ranks, dtype=bool)
    read = np.zeros(ranks, dtype=np.int64)
    for k in range(offsets.shape[1]):
        senders = np.flatnonzero(sends > k)
        to = (senders + offsets[senders, k]) % ranks
        read += np.bincount(to, minlength=ranks)
        for at in range(0, len(senders), 4096):
            of, on = senders[at : at + 4096], to[at : at + 4096]
            merged = then[on] | known[of]
            news[on] |= (merged != then[on]).any(axis=1)
            then[on] = merged
    return then, news, read


def late(ranks: int, absent: int = 1) -> Cost:
    """Model what ranks tell each other about a late one (hd_here.c), and the check itself.

    Every 50 ms each waiting rank takes in what has arrived, and writes to two of the ranks 1, 2, 4
    and so on behind it, until a whole turn has brought nothing new. How long that takes is not
    modelled: the rank is late by more.
    """
    if ranks <= STAR:
        return Cost(agree(ranks).messages + 2 * (ranks - 1) - 1, 0.0)
    steps = (ranks - 1).bit_length()
    powers = 1 << np.arange(steps)
    known = np.zeros((ranks, (ranks + 7) // 8), dtype=np.uint8)
    everyone = np.arange(ranks)
    known[everyone, everyone // 8] = 1 << (everyone % 8)
    known[absent] = 0
    told, until = np.zeros(ranks, dtype=np.int64), np.full(ranks, steps)
    until[absent] = 0
    counts = np.zeros(ranks, dtype=np.int64)
    for _ in range(TICKS):
        sends = np.minimum(until - told, AT_ONCE)
        if not sends.any():
            break
        offsets = powers[(told[:, None] + np.arange(AT_ONCE)) % steps]
        told += sends
        known, news, read = _union(known, sends, offsets)
        known[absent], news[absent], read[absent] = 0, False, 0
        counts += sends + read
        until = np.where(news, told + steps, until)
    own, votes = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
    for size in (VOTES, SEEN):
        _reduce(ranks, size, own, votes)
    return Cost(int((counts + votes).max()), 0.0)


MODELS = {"agree": agree, "group": group, "start": start, "late": late}
