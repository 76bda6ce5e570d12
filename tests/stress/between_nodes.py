"""The stress programs of the entry check between nodes, of one rank and of several each."""

from __future__ import annotations

from sources import FAST, FEW, POST, STEPS, engine
from variants import Program

EVERYWHERE = ("plain", "tsan", "asan", "aarch64")
#: Ranks, and how many of them share a node.
FOUR, PAIRS = ("4",), ("4", "2")


def sized(ranks: tuple[str, ...], checks: int) -> tuple[str, ...]:
    """Return the arguments of the program: how many ranks, how many checks, how many to a node."""
    return (ranks[0], str(checks), *ranks[1:])


#: Of each mutation: in which form the check is, which of the engine's files has it, and what it is.
MUTATIONS = (
    ("once", FOUR, (), "check_mpi", "if (!p->rounds.seen)", "if (0)"),
    # the data is taken although a rank may still have given up
    (
        "early",
        FOUR,
        (),
        "check_mpi",
        "    if (second_round(c, j, NULL)) {",
        "    hd_letter_read(c, j, &p->rounds.all->letter);\n    if (second_round(c, j, NULL)) {",
    ),
    # among a few, a no is not heard
    (
        "deaf",
        FOUR,
        (),
        "rounds",
        "            r->seen = p->in->head.seen;",
        "            r->seen = 1;",
    ),
    # a rank that has left says yes
    ("yes", FOUR, (), "rounds", "    r->seen = 0;\n    rc", "    r->seen = 1;\n    rc"),
    # of a word that two ranks' parts share one remains
    ("shared", FOUR, (), "ballot", "        word |= other;\n", "        word = other;\n"),
    # a node is sent less than the blocks of its ranks, or another node than the root's all
    ("blocks", FOUR, (), "carry", "block_at(j, s.last + 1)", "block_at(j, s.last)"),
    ("root", FOUR, (), "carry", "node_of(c, j->root) == node ?", "node == 0 ?"),
    # of what is reduced the wrong part is added
    ("apart", FOUR, (), "ballot", "in->data + (from - in->from)", "in->data"),
    # says yes although ranks of the node may still give up
    (
        "nodes-eager",
        PAIRS,
        (),
        "caucus",
        "{ return stand(k, n, 1); }",
        "{ return (void)k, (void)n, 1; }",
    ),
    # gives up after that yes
    ("nodes-hasty", PAIRS, (), "caucus", "return now == stand_of(n, 1) ||", "return !n ||"),
    # goes on after a check from which some ranks have gone on
    (
        "fast-apart",
        FOUR,
        FAST,
        "check_mpi",
        "if (c->check == HD_CHECK_FAST && v[WENT] & v[STAYED])",
        "if (0)",
    ),
    # ends a check without a letter with its first round
    ("fast-long", FOUR, FAST, "check_mpi", "all->letter.kind != HD_NO_LETTER;", "1;"),
)

#: A speaker pauses while it reads a rank's vote; the rank may give up and write its next one.
TORN = (
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
)

BETWEEN_NODES = (
    *(
        Program(
            name=f"post-{name}",
            sources=POST,
            variants=EVERYWHERE,
            short=sized(ranks, 150),
            long=sized(ranks, 10_000),
            slow=sized(ranks, 50),
            flags=flags,
        )
        for name, ranks, flags in (
            ("4", FOUR, ()),
            ("steps", FOUR, STEPS),
            ("9", ("9",), FEW),
            ("fast", FOUR, FAST),
            ("nodes-4", PAIRS, ()),
            ("nodes-7", ("7", "3"), ()),
            ("nodes-fast", ("7", "2"), (*FAST, *STEPS, *FEW)),
        )
    ),
    *(
        Program(
            name=f"post-{name}",
            sources=POST,
            variants=("plain",),
            short=sized(ranks, 2_000),
            long=sized(ranks, 2_000),
            flags=flags,
            mutation=(*engine(file), old, new),
        )
        for name, ranks, flags, file, old, new in MUTATIONS
    ),
    Program(
        name="post-fast-torn",
        sources=POST,
        variants=("plain",),
        short=sized(PAIRS, 600),
        long=sized(PAIRS, 20_000),
        flags=FAST,
        delay=(*engine("caucus"), *TORN),
    ),
    Program(
        name="post-left",
        sources=POST,
        variants=("plain",),
        short=sized(FOUR, 50),
        long=sized(FOUR, 50),
        # at its end a rank takes no ballots of checks that it has not begun
        mutation=(*engine("rounds"), "r->over ? UINT64_MAX : ", ""),
    ),
)
