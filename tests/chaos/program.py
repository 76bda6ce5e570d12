"""What an episode does, drawn from its seed: the same on every rank and in the driver.

An episode is one job. It consists of *streams*, one per thread that communicates; a stream is an
endless sequence of *moves*; a move is one step, or a burst of asynchronous ones. Nothing here
depends on what happens, so the driver can draw a program again when it judges the journals.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos.rows import ROWS, Row

SIZES = [0, 1, 2, 3, 8, 15, 16, 17, 60, 250, 700, 1023, 1024, 1025, 3000, 9000]
LONG_SIZES = [65_536, 70_001, 300_000]
DTYPES = ["float32"] * 4 + ["float64", "int32", "int64", "uint8", "int16", "float16", "complex64"]
REDUCTIONS = ["SUM"] * 4 + ["AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]

REDUCING = "all_reduce all_reduce_coalesced reduce reduce_scatter reduce_scatter_tensor".split()
MOVING = (
    "broadcast all_gather all_gather_into_tensor all_gather_coalesced gather scatter all_to_all "
    "all_to_all_single"
).split()
OBJECTS = "broadcast_object_list all_gather_object gather_object scatter_object_list".split()
WAITING = ["barrier", "monitored_barrier"]
COLLECTIVES = REDUCING + MOVING + OBJECTS + WAITING
P2P = ["pair", "ring", "pair_any", "pair_objects"]
GROUPS = ["subgroup", "subgroup_left", "destroyed"]
WINDOWS = ["window_ring", "window_sum", "window_overlap", "window_threads", "window_closed"]
HOOKS = [
    "allreduce", "fp16", "bf16", "fp16_wrapper", "bf16_wrapper", "per_tensor", "per_channel",
    "power", "batched_power", "post_local", "noop", "own", "own_blocking", "then_step", "averager",
]  # fmt: skip
#: Hooks after which a rank has its own gradients, whatever the others did.
LOCAL = {"post_local", "noop", "averager"}
#: Operations with a root.
ROOTED = {"reduce", "broadcast", "gather", "scatter", *OBJECTS} - {"all_gather_object"}
#: Operations that are one call of `Comm`, so that `Comm.seq` tells whether it was made.
SINGLE = {*REDUCING, *MOVING, "barrier", "aliased"}
#: The calls of a step about groups, as parts of its outcome.
MAKE, USE, DESTROY = range(3)
#: Those of a step about windows; from `ACTS` on those of threads, or one move after the other.
PUT, TELL, WAIT, GET, ADD, FOUND, REFUSED, CLOSE, DESTROYED, ACTS = range(1, 11)
#: The most threads or moves of a step.
MOST = 6
#: Mistakes of one rank that every rank must hear of.
ODD_TENSOR = ["dtype", "shape", "gaps", "none", "text", "endian", "locked", "mode", "call"]

ODD_WINDOW = ["gaps", "kind", "range", "dtype", "peer"]
ODD_HOOK = [
    "raises in backward", "raises in the hook", "raises in a callback", "returns nothing"
]  # fmt: skip
ODD_TORCH = ["dtype", "shape", "gaps", "none", "mode", "call", "resized", "meta", "sparse", "conj"]


@dataclass(frozen=True)
class Step:
    """One call that the ranks of a group make together.

    Attributes
    ----------
    number : int
        Of the step in its stream.
    group : int
        Which of the episode's groups.
    op : str
        An operation's name, or one of `P2P`, `GROUPS` and `WINDOWS`.
    dtype, size, reduction, root
        Of the call; `root` is a rank of the group.
    mode : str
        ``"sync"``, ``"async"`` (waited for at once), ``"burst"`` or ``"dropped"`` (never waited
        for).
    late : dict
        Rank -> seconds that it sleeps before the call.
    signal : tuple, optional
        Rank, seconds from the call's beginning to SIGALRM, and what the handler does.
    odd : tuple, optional
        Rank, and the mistake in its call.
    """

    number: int
    group: int
    op: str
    dtype: str = "float32"
    size: int = 1
    reduction: str = "SUM"
    root: int = 0
    mode: str = "sync"
    late: dict[int, float] = field(default_factory=dict)
    signal: tuple[int, float, str] | None = None
    odd: tuple[int, str] | None = None

    def __str__(self) -> str:
        words = [f"#{self.number} group {self.group} {self.op} {self.dtype}[{self.size}]"]
        words += [self.reduction] if self.op in [*REDUCING, "window_sum"] else []
        words += [f"root {self.root}"] if self.op in {*ROOTED, *P2P, "window_sum"} else []
        words += [self.mode]
        words += [f"rank {rank} {late * 1e3:.1f} ms late" for rank, late in self.late.items()]
        if self.signal:
            rank, after, what = self.signal
            words += [f"rank {rank} gets a signal after {after * 1e3:.1f} ms that {what}"]
        if self.odd:
            words += [f"rank {self.odd[0]} calls it wrongly: {self.odd[1]}"]
        return ", ".join(words)


@dataclass(frozen=True)
class Episode:
    """All that is drawn for one job before its streams."""

    seed: str
    number: int
    row: Row
    ranks: int
    seconds: float
    timeouts: tuple[float, ...]
    env: dict[str, str]
    death: tuple[int, float, str] | None
    shm: int
    descriptors: int
    memory: int

    def rng(self, *which: object) -> random.Random:
        return random.Random(":".join(map(str, (self.seed, self.number, *which))))

    @property
    def between_nodes(self) -> bool:
        """Whether groups agree through MPI, as those whose ranks are not on one node."""
        return self.env.get("HPCDIST_CHECK_TRANSPORT") == "mpi" or "HPCDIST_NODES" in self.env

    def group_of(self, stream: int, rng: random.Random) -> int:
        """A group for a move: a stream has its own where there are several."""
        return stream if self.row.streams > 1 else rng.randrange(len(self.timeouts))


def episode(seed: str, number: int, rows: list[str], ranks: list[int], seconds: float) -> Episode:
    """Draw an episode."""
    rng = random.Random(f"{seed}:{number}")
    order = random.Random(seed).sample(rows, len(rows))  # a short run has other rows each time
    row = ROWS[order[number % len(order)]]
    size = rng.choice(ranks)
    groups = max(row.streams, 3 if row.streams == 1 else 0)
    timeouts = tuple(rng.choice(row.timeouts) for _ in range(groups))
    env = {}
    if rng.random() < row.between_nodes:
        env["HPCDIST_CHECK_TRANSPORT"] = "mpi"
    elif size > 1 and rng.random() < row.divided:
        env["HPCDIST_NODES"] = _nodes(rng, size)
        env["HPCDIST_TWO_LEVEL"] = rng.choice(["on", "on", "auto"])
    if rng.random() < 0.15:
        env["HPCDIST_CHECK"] = "full"
    if rng.random() < 0.15:
        env["HPCDIST_NODE_MEMORY"] = str(rng.choice([0, 65536, 300_000]))
    death = None
    if row.deaths:
        death = (rng.randrange(size), rng.uniform(0.05, 0.6) * seconds, rng.choice(row.deaths))
    return Episode(
        seed, number, row, size, seconds, timeouts, env, death,
        shm=rng.choice(row.shm), descriptors=rng.choice(row.descriptors),
        memory=rng.choice(row.memory),
    )  # fmt: skip


def _nodes(rng: random.Random, ranks: int) -> str:
    """Two blocks, or a node for each rank, in any order."""
    places = [rng.randrange(ranks) for _ in range(ranks)]
    return "2" if rng.random() < 0.5 else ",".join(map(str, places))


def moves(drawn: Episode, stream: int) -> Iterator[list[Step]]:
    """The moves of one stream, without end."""
    rng = drawn.rng("stream", stream)
    number = 0
    while True:
        length = 1
        if rng.random() < drawn.row.bursts:
            length = rng.randint(2, 8)
        move = [_step(drawn, stream, rng, number)]
        if length > 1 and move[0].op in SINGLE - {"aliased"} and not move[0].odd:
            first = move[0]
            move = [
                _replace(_step(drawn, stream, rng, number + i, first.group, True), mode="burst")
                for i in range(length)
            ]
            move[0] = _replace(move[0], late=first.late, signal=first.signal)
        number += len(move)
        yield move


def _replace(step: Step, **changed: object) -> Step:
    return Step(**{**step.__dict__, **changed})  # type: ignore[arg-type]


def _step(
    drawn: Episode, stream: int, rng: random.Random, number: int, group: int = -1,
    plain: bool = False,
) -> Step:  # fmt: skip
    row = drawn.row
    group = drawn.group_of(stream, rng) if group < 0 else group
    chance = rng.random()
    if row.trains:
        op = "train"
    elif plain:
        op = rng.choice(REDUCING + MOVING + ["barrier"])
    elif chance < row.p2p and drawn.ranks > 1:
        op = rng.choice(P2P)
    elif chance < row.p2p + row.groups:
        op = rng.choice(GROUPS if row.lonely else GROUPS[:1])
    elif chance < row.p2p + row.groups + row.aliased:
        op = "aliased"
    elif chance < row.p2p + row.groups + row.aliased + row.windows:
        # Threads that make groups at the same time would make them in another order on each rank.
        op = rng.choice(WINDOWS if row.lonely and row.streams == 1 else WINDOWS[:-1])
    elif chance < row.p2p + row.groups + row.aliased + row.windows + row.small:
        op = "all_reduce"
    else:
        op = rng.choice(COLLECTIVES)
    dtype = rng.choice(DTYPES)
    reduction = _reduction(rng, dtype)
    size = rng.choice(SIZES if rng.random() > row.long else LONG_SIZES)
    if rng.random() < row.small:
        size = rng.choice(SIZES[:6])
    mode = "sync"
    if op in SINGLE:
        weights = [1 - row.asynchronous, row.asynchronous, 0.02]
        mode = rng.choices(["sync", "async", "dropped"], weights)[0]
    late = {} if plain else _lateness(drawn, rng, drawn.timeouts[group])
    signal = odd = None
    if not plain and rng.random() < row.signals:
        after = rng.choice([0.0002, 0.001, 0.005, 0.02, 0.06])
        signal = (rng.randrange(drawn.ranks), after, rng.choice(row.handlers))
        if not late and drawn.ranks > 1:  # or the call has returned before
            late = {(signal[0] + 1) % drawn.ranks: rng.uniform(0, 2 * after)}
    if not plain and op in COLLECTIVES and rng.random() < row.odd and drawn.ranks > 1:
        size = max(2 * drawn.ranks, size)  # one element has no gaps
        odd = _mistake(rng, drawn.ranks, op, row.tensors)
        mode = "async" if mode == "dropped" else mode  # nobody would hear of it
    if op == "train" and rng.random() < row.odd:
        odd = (rng.randrange(drawn.ranks), rng.choice(ODD_HOOK if row.hooks else ODD_HOOK[:1]))
        mode = "async" if mode == "dropped" else mode
    if op in WINDOWS:
        reduction = _accumulated(reduction, dtype)
        if op != "window_closed" and rng.random() < row.odd and drawn.ranks > 1:
            odd = (rng.randrange(drawn.ranks), rng.choice(ODD_WINDOW))
    if op == "train":
        dtype = "float32"
    root = rng.randrange(drawn.ranks)
    return Step(number, group, op, dtype, size, reduction, root, mode, late, signal, odd)


def _reduction(rng: random.Random, dtype: str) -> str:
    reduction = rng.choice(REDUCTIONS)
    if dtype.startswith("complex") and reduction not in ("SUM", "AVG", "PREMUL_SUM"):
        return "SUM"
    if "float" in dtype and reduction in ("BAND", "BOR", "BXOR"):
        return "MAX"
    if dtype == "float16" and reduction == "PRODUCT":  # overflows
        return "SUM"
    if "int" in dtype and reduction in ("AVG", "PREMUL_SUM"):
        return "SUM"
    return reduction


def _accumulated(reduction: str, dtype: str) -> str:
    """What a window's accumulate has, with exact results."""
    if reduction in ("AVG", "PREMUL_SUM"):
        return "SUM"
    return reduction


def hook_of(drawn: Episode, step: Step) -> str:
    """The communication hook of an iteration; one stays for some iterations of a group."""
    if not drawn.row.hooks:
        return ""
    rng = drawn.rng("hooks", step.group)
    return rng.sample(HOOKS, len(HOOKS))[step.number // 40 % len(HOOKS)]


def _lateness(drawn: Episode, rng: random.Random, timeout: float) -> dict[int, float]:
    if rng.random() >= drawn.row.late:
        return {}
    late = {}
    for rank in range(drawn.ranks):
        if rng.random() < 0.5:
            longest = 0.03 if timeout > 4 else min(0.6, 2.2 * timeout)
            late[rank] = rng.uniform(0, longest)
    return late


def _mistake(rng: random.Random, ranks: int, op: str, tensors: str) -> tuple[int, str]:
    known = ["call"]
    if op in REDUCING + MOVING:
        known = list(ODD_TENSOR if tensors == "numpy" else ODD_TORCH)
        if op in ("gather", "scatter", "all_to_all", "all_to_all_single", "all_gather",
                  "reduce_scatter"):  # fmt: skip
            known.remove("shape")
        if op in ROOTED:
            known.append("root")
    return rng.randrange(ranks), rng.choice(known)


def must_fail(how: str, op: str, dtype: str, hook: str = "") -> bool:
    """Whether a call is wrong at all: some mistakes are none for some operations."""
    if op in WINDOWS:  # of the others only the rank itself hears
        return how in ("gaps", "kind")
    if op == "train":  # what comes after the communication is no business of the other ranks
        return how != "raises in a callback" and hook not in LOCAL
    if how == "locked":  # inputs may be read-only
        return op.startswith(("all_", "reduce_scatter"))
    return how != "endian" or dtype != "uint8"


def lifetime(step: Step, timeout: float) -> float:
    """The timeout of a step's new group, if it makes one: short where a rank waits in vain."""
    waits = step.op in ("subgroup_left", "destroyed", "window_closed")
    return min(0.5, timeout) if waits else timeout


def members(drawn: Episode, stream: int, step: Step) -> list[int]:
    """Who is in a step's new group, in which order."""
    rng = drawn.rng("members", stream, step.number)
    ranks = rng.sample(range(drawn.ranks), rng.randint(1, drawn.ranks))
    return sorted(ranks) if step.number % 2 else ranks
