"""The stress programs: what they are compiled from, in which variants, with which mistakes."""

from __future__ import annotations

from messages import MESSAGES
from sources import (
    BASE,
    CHECK,
    FAST,
    FEW,
    KERNELS,
    NODE,
    P2P,
    POST,
    STEPS,
    STREAMED,
    WATCHDOG,
    WINDOW,
    engine,
)
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
    *(
        Program(
            name=f"post-{name}",
            sources=POST,
            variants=("plain", "tsan", "asan", "aarch64"),
            short=(str(ranks), "150"),
            long=(str(ranks), "10000"),
            slow=(str(ranks), "50"),
            flags=flags,
        )
        for name, ranks, flags in (
            ("4", 4, ()),
            ("steps", 4, STEPS),
            ("9", 9, FEW),
            ("fast", 4, FAST),
        )
    ),
    *(
        Program(
            name=f"post-nodes-{name}",
            sources=POST,
            variants=("plain", "tsan", "asan", "aarch64"),
            short=(str(ranks), "150", str(each)),
            long=(str(ranks), "10000", str(each)),
            slow=(str(ranks), "50", str(each)),
            flags=flags,
        )
        for name, ranks, each, flags in (
            ("4", 4, 2, ()),
            ("7", 7, 3, ()),
            ("fast", 7, 2, (*FAST, *STEPS, *FEW)),
        )
    ),
    *(
        Program(
            name=f"post-nodes-{name}",
            sources=POST,
            variants=("plain",),
            short=("4", "2000", "2"),
            long=("4", "2000", "2"),
            mutation=(*engine("caucus"), old, new),
        )
        for name, old, new in (
            # says yes although ranks of the node may still give up
            ("eager", "{ return stand(k, n, 1); }", "{ return (void)k, (void)n, 1; }"),
            # gives up after that yes
            ("hasty", "return now == stand_of(n, 1) ||", "return !n ||"),
        )
    ),
    *(
        Program(
            name=f"post-{name}",
            sources=POST,
            variants=("plain",),
            short=("4", "2000"),
            long=("4", "2000"),
            mutation=(*engine(file), old, new),
        )
        for name, file, old, new in (
            ("once", "check_mpi", "if (!p->rounds.seen)", "if (0)"),
            # the data is taken although a rank may still have given up
            (
                "early",
                "check_mpi",
                "    if (second_round(c, j, NULL)) {",
                "    hd_letter_read(c, j, &p->rounds.all->letter);\n"
                "    if (second_round(c, j, NULL)) {",
            ),
            # among a few, a no is not heard
            (
                "deaf",
                "rounds",
                "            r->seen = p->in->head.seen;",
                "            r->seen = 1;",
            ),
            # a rank that has left says yes
            ("yes", "rounds", "    r->seen = 0;\n    rc", "    r->seen = 1;\n    rc"),
            # of a word that two ranks' parts share one remains
            ("shared", "ballot", "        word |= other;\n", "        word = other;\n"),
            # a node is sent less than the blocks of its ranks, or another node than the root's all
            ("blocks", "carry", "block_at(j, s.last + 1)", "block_at(j, s.last)"),
            ("root", "carry", "node_of(c, j->root) == node ?", "node == 0 ?"),
            # of what is reduced the wrong part is added
            ("apart", "ballot", "in->data + (from - in->from)", "in->data"),
        )
    ),
    *(
        Program(
            name=f"post-fast-{name}",
            sources=POST,
            variants=("plain",),
            short=("4", "2000"),
            long=("4", "2000"),
            flags=FAST,
            mutation=(*engine("check_mpi"), old, new),
        )
        for name, old, new in (
            # goes on after a check from which some ranks have gone on
            ("apart", "if (c->check == HD_CHECK_FAST && v[WENT] & v[STAYED])", "if (0)"),
            # ends a check without a letter with its first round
            ("long", "all->letter.kind != HD_NO_LETTER;", "1;"),
        )
    ),
    Program(
        name="post-fast-torn",
        sources=POST,
        variants=("plain",),
        short=("4", "600", "2"),
        long=("4", "20000", "2"),
        flags=FAST,
        # a speaker pauses while it reads the vote of a rank, which may give up meanwhile and write
        # its next one
        delay=(
            *engine("caucus"),
            "        hd_ballot_combine(next, into);\n",
            "        extern int usleep(unsigned);\n"
            "        static __thread unsigned votes;\n"
            "        if (votes++ % 2 == 0) {\n"
            "            usleep(1500);\n"
            "            if (votes % 4 == 1)\n"
            "                get_first(next, &seat_of(k, i)->first);\n"
            "            hd_get_words(next->letter.data, seat_of(k, i)->first.letter.data,\n"
            "                         hd_ballot_bytes(next) - offsetof(hd_first, letter.data));\n"
            "        }\n"
            "        hd_ballot_combine(next, into);\n",
        ),
    ),
    Program(
        name="post-left",
        sources=POST,
        variants=("plain",),
        short=("4", "50"),
        long=("4", "50"),
        # at its end a rank takes no ballots of checks that it has not begun
        mutation=(*engine("rounds"), "r->over ? UINT64_MAX : ", ""),
    ),
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
