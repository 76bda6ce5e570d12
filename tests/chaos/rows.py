"""The rows: which faults an episode may have, and what may come of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A kind of episode.

    Attributes
    ----------
    name, about : str
        For ``--rows``, and what it tries.
    timeouts : tuple of float
        Seconds: each group of an episode draws one.
    late, signals, odd, bursts, p2p, groups, aliased, windows, small, long, asynchronous : float
        How often a step has a late rank, a signal, one rank's mistake; is a burst, point to point,
        about making groups, has inputs that are outputs, is about a window, is a short all_reduce;
        has long tensors, is asynchronous.
    handlers : tuple of str
        What signal handlers do: pass, raise, or call a collective of the group waited in.
    stops : tuple of float, optional
        Mean seconds between SIGSTOPs, and the longest stop.
    streams : int
        Threads that communicate, each in a group of its own.
    deaths : tuple of str
        How a rank ends in the middle; empty for never.
    lonely : bool
        Whether ranks destroy groups while others wait in them.
    between_nodes : float
        How often the entry check goes through MPI, as between nodes.
    divided : float
        How often the ranks stand as on two nodes or more, else, and operations use both levels.
    may_end : bool
        Whether hpcdist may end the job: a call that moves data cannot be taken back.
    tensors : str
        ``"numpy"`` or ``"torch"``.
    trains : bool
        Whether every step is an iteration of DistributedDataParallel.
    hooks : bool
        Whether it has communication hooks, one after the other.
    shm, descriptors, memory : tuple of int
        Bytes of /dev/shm that are left after the start, or, negative, that it has in all; spare
        descriptors; spare bytes of address space. 0 for no limit.
    """

    name: str
    about: str
    timeouts: tuple[float, ...] = (20.0,)
    late: float = 0.0
    signals: float = 0.0
    odd: float = 0.0
    bursts: float = 0.05
    p2p: float = 0.1
    groups: float = 0.0
    aliased: float = 0.0
    windows: float = 0.0
    small: float = 0.2
    long: float = 0.02
    asynchronous: float = 0.2
    handlers: tuple[str, ...] = ("passes", "raises")
    stops: tuple[float, float] | None = None
    streams: int = 1
    deaths: tuple[str, ...] = ()
    lonely: bool = True
    between_nodes: float = 0.2
    divided: float = 0.1
    may_end: bool = False
    tensors: str = "numpy"
    trains: bool = False
    hooks: bool = False
    shm: tuple[int, ...] = (0,)
    descriptors: tuple[int, ...] = (0,)
    memory: tuple[int, ...] = (0,)


SHORT = (0.002, 0.005, 0.02, 0.05, 0.2)
#: Mistakes that `--plant` makes.
PLANTS = ("put", "overlap", "accumulate", "signal", "bucket")
DEATHS = ("SIGKILL", "exception", "sys.exit", "os._exit", "SIGTERM")

_all = [
    Row("calm", "no faults: all operations, sync, async, bursts, p2p, groups, windows", groups=0.02,
        windows=0.05, lonely=False),
    Row("late", "ranks come late, timeouts of some ms, retries", SHORT, late=0.15, bursts=0.1),
    Row("stops", "ranks are stopped, shorter and longer than the timeout", (0.01, 0.05, 0.2, 0.6),
        late=0.02, stops=(0.15, 0.9), may_end=True, windows=0.1, small=0.5),
    Row("signals", "signals after 0.2 to 60 ms, handlers that raise or call", (0.3, 10.0),
        signals=0.2, windows=0.1, handlers=("passes", "raises", "calls")),
    Row("arguments", "one rank's arguments are wrong", (10.0,), odd=0.2),
    Row("torch", "torch's tensors; inputs that are outputs; tensors without memory", (10.0,),
        odd=0.1, aliased=0.3, tensors="torch"),
    Row("ddp", "DistributedDataParallel, late before and in backward, or raising there",
        (0.1, 0.5, 10.0), late=0.1, odd=0.05, trains=True, tensors="torch"),
    Row("hooks", "DDP with communication hooks that compress, raise, or return nothing on a rank",
        (0.1, 0.5, 10.0), late=0.1, odd=0.05, trains=True, hooks=True, tensors="torch"),
    Row("windows", "put, get, accumulate, signals; overlapping, from threads, closed while in use",
        (0.05, 0.5, 10.0), late=0.05, signals=0.1, odd=0.1, windows=0.7, tensors="torch",
        between_nodes=0.05, divided=0.05),
    Row("threads", "three threads with a group each, late ranks", (0.05, 0.3, 10.0), late=0.05,
        windows=0.05, streams=3),
    Row("groups", "groups made and destroyed, also while others wait", (0.3, 1.0), late=0.05,
        groups=0.6),
    Row("queue", "long queues behind late ranks", (0.05, 0.2, 0.5), late=0.2, bursts=0.6),
    Row("levels", "ranks divided among nodes, long tensors; late ranks, signals, stops",
        (0.02, 0.2, 1.0, 10.0, 10.0), late=0.05, signals=0.05, bursts=0.1, groups=0.05,
        windows=0.02, long=0.5, asynchronous=0.3, stops=(0.5, 0.7), between_nodes=0.0, divided=1.0,
        may_end=True),
    Row("p2p", "messages, late ranks, signals", (0.05, 0.3, 5.0), late=0.1, signals=0.05, p2p=0.8),
    Row("all", "everything but deaths at once", (0.01, 0.05, 0.3, 10.0), late=0.05, signals=0.05,
        odd=0.05, bursts=0.1, groups=0.05, windows=0.1, stops=(0.5, 0.7), may_end=True),
    Row("death", "a rank dies: SIGKILL, SIGTERM, exception, sys.exit, os._exit", (3.0, 10.0),
        deaths=DEATHS, may_end=True, windows=0.1, asynchronous=0.4),
    Row("shm", "a tiny /dev/shm", (20.0,), shm=(4096, 1 << 16, 1 << 20, -(1 << 16), -(1 << 22),
        -(1 << 24)), groups=0.1, windows=0.1,
        long=0.2, may_end=True),
    Row("descriptors", "no descriptors left", (20.0,), groups=0.2, descriptors=(1, 3, 6, 12)),
    Row("memory", "no address space left", (20.0,), groups=0.1, long=0.3, may_end=True,
        memory=(1 << 20, 1 << 23, 1 << 25)),
]  # fmt: skip

ROWS: dict[str, Row] = {row.name: row for row in _all}
