"""What the stress programs are compiled from, and with which limits."""

from __future__ import annotations

from variants import ROOT

#: The engine's C files by name, ``hd_`` left out.
_ENGINE = {
    path.stem.removeprefix("hd_"): path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("pyx/hpcdist/engine/*/hd_*.c"))
}


def engine(*names: str) -> tuple[str, ...]:
    """Return where C files of the engine are, from the root; their names are without ``hd_``."""
    return tuple(_ENGINE[name] for name in names)


#: What every program about shared memory is linked with.
BASE = (
    *engine("base", "job", "recorder", "report"),
    "pyx/hpcdist/kernels/hd_types.c",
    "tests/stress/stub/stub.c",
)
NODE = (*BASE, *engine("node", "node_reduce", "direct", "slots", "scale", "stream"))
CHECK = (*BASE, *engine("check", "page", "page_pairs", "carry", "scale"))
WATCHDOG = (*BASE, *engine("watchdog", "starving", "process", "status"))
ROLL = ("tests/stress/roll.c", *BASE, *engine("roll", "roll_desk", "roll_words", "outbox"))
POST = (
    "tests/stress/post.c",
    *BASE,
    *engine("check_mpi", "leave", "ballot", "rounds", "caucus", "post", "here", "outbox"),
    *engine("page_pairs", "carry", "scale"),
)
ACCORD = ("tests/stress/accord.c", *engine("accord"))
OUTBOX = ("tests/stress/outbox.c", *engine("outbox"))
P2P = ("tests/stress/p2p.c", *BASE, *engine("p2p", "overdue", "peer", "poller", "unsent"))
WINDOW = ("tests/stress/window.c", *BASE, *engine("window", "combine"))
#: Of the tensors, which are short here, the longer ones are written past the caches.
STREAMED = ("-DHD_STREAM_LEAST=16384",)
#: Notes go from rank to rank already where there are few.
FEW = ("-DHD_POST_STAR=3",)
#: Rounds go by steps of doubling already where there are few.
STEPS = ("-DHD_ROUNDS_DIRECT=2",)
#: A check with a letter has one round.
FAST = ("-DLEVEL=HD_CHECK_FAST",)
#: A deep tree of few members.
DEEP = ("-DHD_ROLL_STAR=3", "-DHD_ROLL_ARITY=2")
KERNELS = (
    "tests/stress/kernels.c",
    "pyx/hpcdist/kernels/hd_types.c",
    "pyx/hpcdist/kernels/hd_kernels*.c",
)
