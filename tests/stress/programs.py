"""The stress programs: what they are compiled from, in which variants, with which mistakes."""

from __future__ import annotations

from between_nodes import BETWEEN_NODES
from messages import MESSAGES
from sources import BASE, CHECK, KERNELS, NODE, P2P, STREAMED, WATCHDOG, WINDOW, engine
from variants import FLAGS, INCLUDES, ROOT, VARIANTS, Program

__all__ = ["FLAGS", "INCLUDES", "PROGRAMS", "ROOT", "VARIANTS", "Program"]

#: So that the numbers of checks wrap in the course of the run.
NEAR_WRAP = str(2**32 - 10_000)

PROGRAMS = (
    *(
        Program(
            name=f"check-{ranks}",
            sources=("tests/stress/check.c", *CHECK),
            variants=("plain", "aarch64"),
            short=("processes", str(ranks), "200000", NEAR_WRAP),
            long=("processes", str(ranks), "4000000", NEAR_WRAP),
            slow=("processes", str(ranks), "20000", NEAR_WRAP),
        )
        for ranks in (2, 3, 4)
    ),
    Program(
        name="check-threads",
        sources=("tests/stress/check.c", *CHECK),
        variants=("plain", "tsan", "asan"),
        short=("threads", "3", "40000", NEAR_WRAP),
        long=("threads", "3", "1000000", NEAR_WRAP),
        slow=("threads", "3", "20000", NEAR_WRAP),
    ),
    *(
        Program(
            name=f"check-{name}",
            sources=("tests/stress/check.c", *CHECK),
            variants=("plain",),
            short=("processes", "3", "200000", "0"),
            long=("processes", "3", "200000", "0"),
            mutation=(*engine(file), old, new),
        )
        for name, file, old, new in (
            ("early", "check", "c->decided != n - 1 && (code", "0 && (code"),
            ("no-veto", "page", "late = vetoed(old, n);", "late = 0;"),
            ("order", "page_pairs", "r < rank; r++", "r < rank - 1; r++"),
        )
    ),
    *(
        Program(
            name=f"node-{ranks}",
            sources=("tests/stress/node.c", *NODE),
            variants=("plain", "aarch64"),
            short=("processes", str(ranks), "20000"),
            long=("processes", str(ranks), "1000000"),
            slow=("processes", str(ranks), "2000"),
            flags=STREAMED,
        )
        for ranks in (2, 3, 4)
    ),
    Program(
        name="node-threads",
        sources=("tests/stress/node.c", *NODE),
        variants=("plain", "tsan", "asan"),
        short=("threads", "3", "10000"),
        long=("threads", "3", "200000"),
        slow=("threads", "3", "2000"),
        flags=STREAMED,
    ),
    *(
        Program(
            name=f"node-{name}",
            sources=("tests/stress/node.c", *NODE),
            variants=("plain",),
            short=("processes", "3", "20000"),
            long=("processes", "3", "20000"),
            mutation=(*engine(file), old, new),
        )
        for name, file, old, new in (
            ("halves", "node", "(int64_t)(piece & 1)", "0"),
            ("scaled", "node", "r->c->rank, r->node->given + 1", "r->c->rank, r->node->given"),
            ("blocks", "slots", "{scatter, 1,", "{scatter, 0,"),
        )
    ),
    *MESSAGES,
    *BETWEEN_NODES,
    Program(
        name="lane",
        sources=(
            "tests/stress/threads.c",
            *BASE,
            *engine("lane", "notify"),
        ),
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("4", "10000"),
        long=("8", "1000000"),
        slow=("4", "2000"),
    ),
    Program(
        name="p2p",
        sources=P2P,
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("4", "5000"),
        long=("8", "300000"),
        slow=("4", "1000"),
    ),
    Program(
        name="p2p-lost",
        sources=P2P,
        variants=("plain",),
        short=("4", "2000"),
        long=("4", "2000"),
        # the poller drops what MPI has not sent yet
        mutation=(*engine("unsent"), "if (hd_post_unsent(*at))", "if (!*at)"),
    ),
    Program(
        name="window",
        sources=WINDOW,
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("4", "3000"),
        long=("8", "15000"),
        slow=("4", "500"),
    ),
    *(
        Program(
            name=f"window-{name}",
            sources=WINDOW,
            variants=(variant,),
            short=("4", "3000"),
            long=("4", "3000"),
            mutation=(*engine("window"), old, new),
        )
        for name, variant, old, new in (
            # a rank's requests overtake each other: one that is served, one that waits itself, and
            # a long get
            ("order", "plain", "!s->reply ||", "0 ||"),
            ("behind", "plain", "begun)\n        return s->", "begun)\n        return 0 && s->"),
            ("reads", "plain", "later->asked.call != HD_GET &&", "0 &&"),
            # memory is withdrawn while data for it are on their way
            ("late", "asan", "if (s->of == e)", "if (s->of == e && 0)"),
        )
    ),
    Program(
        name="watchdog",
        sources=("tests/stress/watchdog.c", *WATCHDOG),
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("4", "60"),
        long=("4", "20000"),
        slow=("4", "32"),
    ),
    *(
        Program(
            name=f"watchdog-{name}",
            sources=("tests/stress/watchdog.c", *WATCHDOG),
            variants=(variant,),
            short=("4", "60"),
            long=("4", "60"),
            mutation=(*engine("watchdog"), old, new),
        )
        for name, variant, old, new in (
            ("left", "plain", "__ATOMIC_ACQUIRE) != LEAVING", "__ATOMIC_ACQUIRE)"),
            ("order", "plain", "if (ends)\n        mourn", "s->dead[slot] = 1;\n    mourn"),
            (
                "race",
                "tsan",
                "__atomic_load_n(&c->transfer.seq, __ATOMIC_ACQUIRE)",
                "c->transfer.seq",
            ),
        )
    ),
    Program(
        name="watchdog-delay",
        sources=("tests/stress/watchdog.c", *WATCHDOG),
        variants=("plain",),
        short=("4", "81"),
        long=("4", "2000"),
        delay=(
            *engine("watchdog"),
            "look_at_comms(s, now);",
            "static __thread int64_t paused;\n"
            "if (now - paused > 200000000) { usleep(100000); paused = now; }\n"
            "look_at_comms(s, now);",
        ),
    ),
    Program(
        name="store",
        sources=("tests/stress/store.c", "pyx/hpcdist/store/hd_*.c"),
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("6", "5000"),
        long=("12", "300000"),
        slow=("6", "1000"),
    ),
    Program(
        name="kernels",
        sources=KERNELS,
        variants=("aarch64",),
        short=("200", "neon"),
        long=("20000", "neon"),
        flags=("-O3",),
    ),
    Program(
        name="kernels-round",
        sources=KERNELS,
        variants=("aarch64",),
        short=("200", "neon"),
        long=("200", "neon"),
        mutation=(
            "pyx/hpcdist/kernels/hd_kernels_neon.c",
            "vdupq_n_u32(0x7FFF)",
            "vdupq_n_u32(0x8000)",
        ),
    ),
)
