"""Two seconds of all_reduce, with NumPy, and a verdict against what this machine itself can do.

Within a node the ranks first copy memory, all at the same time: an all_reduce through memory is a
number of such copies. Between nodes the rate of the links is the limit. Both are added, as if
nothing overlapped and nothing stayed in a cache, and the verdict asks for a time near that. Judged
is the fastest call: medians of a busy machine say how busy it is, not whether something is broken.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hpcdist._ops import ReduceOp
from hpcdist.collectives.barrier import barrier
from hpcdist.collectives.reduce import all_reduce
from hpcdist.groups.state import get_rank, get_world_size

from . import advice
from .section import FAULT, WARNING

BYTES = 32 << 20
#: A healthy all_reduce takes at most so many times what is expected: docs/diagnose.md tells what
#: was measured, and with what switched off.
GOOD = 2.5
#: Above this factor something is broken.
BROKEN = 33.0
#: Seconds for a small one within a node, in the fastest case, that only a rank takes which waits
#: for a core: a scheduler's slice.
SLICE = 1e-3


def expected(size: int, local: int, copy: float, link: float, nbytes: int = BYTES) -> float:
    """Return the seconds of an all_reduce limited by memory and links, without overlap and caches.

    Parameters
    ----------
    size : int
        Ranks.
    local : int
        Ranks on the fullest host.
    copy : float
        Bytes a second that one rank copies while all of its host do.
    link : float
        Bytes a second of a host's links; 0 where they are not known or there is one host.
    nbytes : int
        Size of the tensor.
    """
    # Reduce-scatter and all-gather handle (n-1)/n of the tensor each. A copy reads and writes
    # (2 bytes of traffic for each); a reduction takes a copy first, then reads two and writes one:
    # 2 + 3 and 2.
    traffic = 7 * nbytes * (local - 1) / local
    seconds = traffic / (2 * copy)
    hosts = -(-size // local)
    if hosts > 1 and link > 0:
        seconds += 2 * nbytes * (hosts - 1) / hosts / link
    return seconds


def judge(
    best: float, limit: float, latency: float, hosts: int, crowded: bool, known: bool
) -> dict[str, str] | None:
    """Return a finding, or None if it is as fast as it should be.

    Parameters
    ----------
    best : float
        Seconds of the fastest long one.
    limit : float
        As :func:`expected` gives it.
    latency : float
        Seconds of the fastest small one.
    hosts : int
        Hosts of the job.
    crowded : bool
        Whether ranks share cores: then time depends on the scheduler, and nothing is judged.
    known : bool
        Whether the links' rate is known, or not needed.
    """
    if crowded:
        return None
    if known and best > limit * GOOD:
        times = best / limit
        return {
            "severity": FAULT if times > BROKEN else WARNING,
            "what": f"all_reduce of {BYTES >> 20} MiB takes at best {best * 1e3:.1f} ms: "
            f"{times:.1f} times what memory and links allow; up to {GOOD:g} times is good",
            "fix": "fix what is reported above first (binding, CMA, adapters). Then see whether "
            f"other jobs use the hosts, and which transport is used: {advice.give('transport')}",
        }
    if hosts == 1 and latency > SLICE:
        return {
            "severity": WARNING,
            "what": f"all_reduce of 8 bytes takes {latency * 1e6:.0f} us within a host: some rank "
            "waits for a core each time",
            "fix": "give each rank cores of its own (see the section on cores), and stop other "
            "jobs",
        }
    return None


def measure(seconds: float = 2.0) -> dict[str, Any]:
    """Time a small and a long all_reduce, and copies of memory; all ranks call it.

    Parameters
    ----------
    seconds : float
        How long it may take, about.

    Returns
    -------
    dict
        ``latency_s`` and ``seconds`` (medians) and ``latency_best_s`` and ``best_s`` (the fastest)
        of the calls of each kind, each call as the slowest rank saw it; ``bytes``, ``calls``,
        ``correct``; ``copy_bytes_per_s``: what the slowest rank copies at best, while all copy.
    """
    size, rank = get_world_size(), get_rank()
    small = np.zeros(1, np.float64)
    latency, latency_best, _ = _times(lambda: all_reduce(small), 0.2 * seconds, 1000)
    big = np.empty(BYTES // 4, np.float32)
    other = np.ones(BYTES // 4, np.float32)
    _, copy, _ = _times(lambda: np.copyto(big, other), 0.2 * seconds, 100)
    big.fill(rank + 1)
    all_reduce(big)
    wrong = np.array([int(not (big == size * (size + 1) / 2).all())])
    all_reduce(wrong)
    big.fill(0)  # whatever the number of calls, sums of zero stay what they are
    median, best, calls = _times(lambda: all_reduce(big), 0.6 * seconds, 1000)
    return {
        "bytes": BYTES,
        "latency_s": latency,
        "latency_best_s": latency_best,
        "seconds": median,
        "best_s": best,
        "copy_bytes_per_s": BYTES / copy,
        "calls": calls,
        "correct": int(wrong[0]) == 0,
    }


def _times(call: Any, seconds: float, most: int) -> tuple[float, float, int]:
    """Return median and least seconds of as many calls as fit, and their number, on all ranks."""
    barrier()
    for _ in range(2):
        call()
    began = time.perf_counter()
    call()
    one = np.array([time.perf_counter() - began])
    all_reduce(one, ReduceOp.MAX)
    times = np.empty(max(3, min(most, int(seconds / max(one[0], 1e-7)))))
    for place in range(len(times)):
        began = time.perf_counter()
        call()
        times[place] = time.perf_counter() - began
    all_reduce(times, ReduceOp.MAX)
    times.sort()
    return float(times[len(times) // 2]), float(times[0]), len(times)
