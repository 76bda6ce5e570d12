"""What the stress programs are compiled from, and with which limits."""

from __future__ import annotations

#: What every program about shared memory is linked with.
BASE = tuple(
    f"pyx/hpcdist/{name}.c"
    for name in (
        *("engine/hd_base", "engine/hd_job", "engine/hd_recorder", "engine/hd_report"),
        "kernels/hd_types",
    )
) + ("tests/stress/stub/stub.c",)
POSTED = (
    "check_mpi",
    "leave",
    "ballot",
    "rounds",
    "caucus",
    "post",
    "here",
    "outbox",
    "page_pairs",
    "carry",
    "scale",
)
CHECKING = ("check", "page", "page_pairs", "carry", "scale")
SHARING = ("node", "node_reduce", "direct", "slots", "scale", "stream")
NODE = (*BASE, *(f"pyx/hpcdist/engine/hd_{name}.c" for name in SHARING))
CHECK = (*BASE, *(f"pyx/hpcdist/engine/hd_{name}.c" for name in CHECKING))
WATCHING = ("watchdog", "starving", "process", "status")
WATCHDOG = (*BASE, *(f"pyx/hpcdist/engine/hd_{name}.c" for name in WATCHING))
ROLL = (
    "tests/stress/roll.c",
    *BASE,
    *(f"pyx/hpcdist/engine/hd_{name}.c" for name in ("roll", "roll_desk", "roll_words", "outbox")),
)
POST = (
    "tests/stress/post.c",
    *BASE,
    *(f"pyx/hpcdist/engine/hd_{name}.c" for name in POSTED),
)
ACCORD = ("tests/stress/accord.c", "pyx/hpcdist/engine/hd_accord.c")
OUTBOX = ("tests/stress/outbox.c", "pyx/hpcdist/engine/hd_outbox.c")
P2P = (
    "tests/stress/p2p.c",
    *BASE,
    *(f"pyx/hpcdist/engine/hd_{name}.c" for name in ("p2p", "peer", "poller", "unsent")),
)
WINDOW = (
    "tests/stress/window.c",
    *BASE,
    *(f"pyx/hpcdist/engine/hd_{name}.c" for name in ("window", "combine")),
)
#: Of the tensors, which are short here, the longer ones are written past the caches.
STREAMED = ("-DHD_STREAM_LEAST=16384",)
#: Notes go from rank to rank already where there are few.
FEW = ("-DHD_POST_STAR=3",)
#: Rounds go by steps of doubling already where there are few.
STEPS = ("-DHD_ROUNDS_DIRECT=2",)
#: A deep tree of few members.
DEEP = ("-DHD_ROLL_STAR=3", "-DHD_ROLL_ARITY=2")
KERNELS = (
    "tests/stress/kernels.c",
    "pyx/hpcdist/kernels/hd_types.c",
    "pyx/hpcdist/kernels/hd_kernels*.c",
)
