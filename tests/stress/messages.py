"""The stress programs of short messages through MPI: accords, notes to several ranks, rolls."""

from __future__ import annotations

from sources import ACCORD, DEEP, OUTBOX, ROLL, engine
from variants import Program

MESSAGES = (
    Program(
        name="accord",
        sources=ACCORD,
        variants=("plain", "asan", "aarch64"),
        short=("2000",),
        long=("200000",),
    ),
    *(
        Program(
            name=f"accord-{name}",
            sources=ACCORD,
            variants=("plain",),
            short=("2000",),
            long=("2000",),
            mutation=(*engine("accord"), old, new),
        )
        for name, old, new in (
            ("trusting", "(word & MARK) == MARK", "word != 0"),
            ("alone", "over = whole ? value : a->known", "over = a->known"),
            ("asking", "over = whole ? value : a->known", "over = whole && value"),
        )
    ),
    Program(
        name="outbox",
        sources=OUTBOX,
        variants=("plain", "asan", "aarch64"),
        short=("20000",),
        long=("2000000",),
    ),
    Program(
        name="outbox-lost",
        sources=OUTBOX,
        variants=("plain",),
        short=("20000",),
        long=("20000",),
        # a note is dropped while one of its sends goes on
        mutation=(*engine("outbox"), "gone = all_ended(p);", "gone = 1;"),
    ),
    *(
        Program(
            name=f"roll-{members}",
            sources=ROLL,
            variants=("plain", "tsan", "asan", "aarch64"),
            short=(str(members), "4000"),
            long=(str(members), "300000"),
            flags=flags,
        )
        for members, flags in ((2, ()), (7, DEEP), (13, DEEP), (40, ()))
    ),
    Program(
        name="roll-late",
        sources=ROLL,
        variants=("plain", "tsan", "asan", "aarch64"),
        short=("late", "5"),
        long=("late", "30"),
    ),
    Program(
        name="roll-alone",
        sources=ROLL,
        variants=("plain",),
        short=("late", "5"),
        long=("late", "5"),
        # the leader does not wait for those that are late
        mutation=(*engine("roll"), "i < k->kids && k->kid[i].number", "i < k->kids"),
    ),
    *(
        Program(
            name=f"roll-{name}",
            sources=ROLL,
            variants=("plain",),
            short=("4", "100000"),
            long=("4", "300000"),
            flags=DEEP,
            mutation=(*engine("roll"), old, new),
        )
        for name, old, new in (
            ("early", "if (!k->kid[i].promised)\n            return -1;", ";"),
            ("left-over", "!m->number || w.number != m->number", "0"),
        )
    ),
)
