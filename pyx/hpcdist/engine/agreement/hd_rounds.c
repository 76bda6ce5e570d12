/* The rounds of an entry check between nodes: see hd_rounds.h. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "hd_ballot.h"
#include "hd_base.h"
#include "hd_outbox.h"
#include "hd_rounds.h"

#define TAG_BALLOT 3

typedef struct head {
    uint64_t number; /* of its round, over all checks */
    uint64_t seen;
} head;

typedef struct ballot {
    head head;
    hd_first first; /* not in the second round */
} ballot;

/* Bytes of a message, at most: longer ballots go in several. With all that MPI puts before it, each
 * is below the 4 KiB up to which Open MPI sends at once between processes of a machine. A longer
 * one would need the help of a rank that may have left. */
#define PART 3968
#define PARTS ((sizeof(ballot) + PART - 1) / PART)
_Static_assert(offsetof(ballot, first.letter.data) + HD_SHORT_LETTER <= PART,
               "a short letter is no single message");
_Static_assert(PART + 64 <= 4096, "with what MPI puts before it a message is not sent at once");

typedef struct hd_partner {
    int rank;
    uint64_t taken; /* the number of the last ballot that it sent and this rank has taken */
    size_t have;    /* bytes of the next one, of which there is more to come */
    MPI_Request receive, send[HD_ROUNDS][PARTS];
    head vote; /* of the second round */
    ballot *in, *out;
} partner;

static uint64_t number_of(const hd_rounds *r) { return r->check * HD_ROUNDS + (uint64_t)r->round; }

/* Each ballot begins a page of its own: pages that no ballot has reached take no memory. */
static size_t memory(const hd_rounds *r)
{
    return hd_whole_pages((size_t)r->room * sizeof(partner)) +
           2 * (size_t)r->room * hd_whole_pages(sizeof(ballot));
}

static void add_partner(hd_rounds *r, int rank)
{
    partner *p = &r->partners[r->n];
    char *ballots = (char *)r->partners + hd_whole_pages((size_t)r->room * sizeof *p);
    p->in = (ballot *)(void *)(ballots + 2 * (size_t)r->n++ * hd_whole_pages(sizeof *p->in));
    p->out = (ballot *)(void *)((char *)p->in + hd_whole_pages(sizeof *p->in));
    p->rank = rank;
    p->receive = MPI_REQUEST_NULL;
    for (size_t i = 0; i < PARTS; i++)
        p->send[HD_FIRST_ROUND][i] = p->send[HD_SECOND_ROUND][i] = MPI_REQUEST_NULL;
    p->taken = HD_SECOND_ROUND; /* the number before the first check's */
}

/* Before the first ballot, which this rank sends in the same check as all others. */
static int open_rounds(hd_rounds *r, MPI_Comm mpi)
{
    int size, steps = 1, rc;
    if (r->partners)
        return MPI_SUCCESS;
    if ((rc = MPI_Comm_rank(mpi, &r->rank)) || (rc = MPI_Comm_size(mpi, &size)))
        return rc;
    r->mpi = mpi;
    for (r->core = 1; 2 * r->core <= size; r->core *= 2)
        steps++;
    r->is_direct = size <= HD_ROUNDS_DIRECT;
    r->is_beyond = !r->is_direct && r->rank >= r->core;
    r->helps = !r->is_direct && !r->is_beyond && r->rank + r->core < size;
    r->room = r->is_direct ? size : steps;
    if (!(r->partners = hd_pages(memory(r))))
        return MPI_ERR_NO_MEM;
    for (int i = 1; r->is_direct && i < size; i++)
        add_partner(r, (r->rank + i) % size);
    if (r->is_beyond || r->helps)
        add_partner(r, r->rank ^ r->core);
    for (int bit = 1; bit < r->core && !r->is_direct && !r->is_beyond; bit *= 2)
        add_partner(r, r->rank ^ bit);
    return MPI_SUCCESS;
}

void hd_rounds_enter(hd_rounds *r, uint64_t check)
{
    r->check = check;
    r->round = HD_FIRST_ROUND;
    r->heard = r->said = 0;
    r->begun = r->voted = 0;
    r->seen = 0;
    r->all = NULL;
}

/* ---- ballots ---- */

static size_t bytes_of(const ballot *b)
{
    return offsetof(ballot, first) +
           (b->head.number % HD_ROUNDS == HD_FIRST_ROUND ? hd_ballot_bytes(&b->first) : 0);
}

static size_t part_of(size_t bytes, size_t at) { return bytes - at < PART ? bytes - at : PART; }

/* The partner is stopped, and what this rank has sent to it before is still open: this ballot goes
 * into the outbox. */
static int send_by_outbox(hd_rounds *r, const partner *p)
{
    const head now = {number_of(r), r->seen};
    const int first = r->round == HD_FIRST_ROUND;
    const size_t bytes = sizeof now + (first ? hd_ballot_bytes(&r->first) : 0);
    char *text = malloc(bytes);
    int rc = MPI_ERR_NO_MEM;

    if (!text)
        return rc;
    memcpy(text, &now, sizeof now);
    memcpy(text + sizeof now, &r->first, bytes - sizeof now);
    r->unread += hd_outbox_send(&r->late, r->mpi, text, bytes, PART, &p->rank, 1, TAG_BALLOT, &rc);
    free(text);
    return rc;
}

/* Not MPI_Testall, which does not say of an error that the partner has died. */
static int have_gone(MPI_Request *parts, int *gone)
{
    int rc = MPI_SUCCESS;
    *gone = 1;
    for (size_t i = 0; i < PARTS && *gone && !rc; i++)
        if (parts[i] != MPI_REQUEST_NULL)
            rc = MPI_Test(&parts[i], gone, MPI_STATUS_IGNORE);
    return rc;
}

/* All parts at once: a rank may leave right after it. */
static int send_ballot(hd_rounds *r, partner *p)
{
    const int first = r->round == HD_FIRST_ROUND;
    const head now = {number_of(r), r->seen};
    const char *text = first ? (const char *)p->out : (const char *)&p->vote;
    MPI_Request *req = p->send[r->round];
    int gone, rc = have_gone(req, &gone);
    size_t bytes = sizeof now;

    if (rc || !gone)
        return rc ? rc : send_by_outbox(r, p);
    if (first) {
        p->out->head = now;
        if (r->is_direct)
            hd_ballot_copy_part(&p->out->first, &r->first, r->needs[p->rank]);
        else
            hd_ballot_copy(&p->out->first, &r->first);
        bytes = bytes_of(p->out);
    } else {
        p->vote = now;
    }
    for (size_t at = 0; at < bytes && !rc; at += PART, req++) {
        if ((rc = MPI_Isend(text + at, (int)part_of(bytes, at), MPI_BYTE, p->rank, TAG_BALLOT,
                            r->mpi, req)))
            *req = MPI_REQUEST_NULL;
        r->unread += !rc;
    }
    return rc;
}

/* Whoever helps a partner beyond the power of two hears from it first and writes to it last. */
static int say_next(hd_rounds *r)
{
    return send_ballot(r, &r->partners[r->helps ? (r->said++ + 1) % r->n : r->said++]);
}

static int say_rest(hd_rounds *r)
{
    int rc = MPI_SUCCESS, failed = MPI_SUCCESS;
    while (r->said < r->n)
        if ((rc = say_next(r)))
            failed = rc; /* the others are told all the same */
    return failed;
}

/* Lets MPI receive a ballot of the partner's, or the next part of one. */
static int listen(hd_rounds *r, partner *p)
{
    int rc = MPI_SUCCESS;
    if (p->receive == MPI_REQUEST_NULL &&
        (rc = MPI_Irecv((char *)p->in + p->have, (int)part_of(sizeof *p->in, p->have), MPI_BYTE,
                        p->rank, TAG_BALLOT, r->mpi, &p->receive)))
        p->receive = MPI_REQUEST_NULL;
    return rc;
}

/* Whether a partner's ballot of that number may follow the one taken last: of a check that has one
 * round there is no second, unless the partner has left it. */
static int may_follow(uint64_t number, uint64_t taken)
{
    return number == taken + 1 || (number == taken + 2 && number % HD_ROUNDS == HD_FIRST_ROUND);
}

/* Receives up to the ballot of that number; *there: this rank has it. */
static int hear(hd_rounds *r, partner *p, uint64_t number, int *there)
{
    int rc;
    *there = 0;
    while (p->taken < number) {
        MPI_Status status;
        int done = 0, bytes = 0;
        if ((rc = listen(r, p)))
            return rc;
        if ((rc = MPI_Test(&p->receive, &done, &status)) || !done)
            return rc;
        r->unread--;
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        if (!may_follow(p->in->head.number, p->taken) ||
            (size_t)bytes != part_of(bytes_of(p->in), p->have))
            return MPI_ERR_OTHER; /* MPI has lost one, or its sender could not send all of it */
        if ((p->have += PART) < bytes_of(p->in))
            continue;
        p->have = 0;
        p->taken = p->in->head.number;
    }
    *there = 1;
    return MPI_SUCCESS;
}

/* The lower rank's part comes first on both sides, so that all ranks get the same bits. */
static void combine(hd_rounds *r, partner *p)
{
    if (p->in->head.seen < r->seen)
        r->seen = p->in->head.seen;
    if (r->round == HD_SECOND_ROUND)
        return;
    if (r->is_beyond) {
        hd_ballot_copy(&r->first, &p->in->first);
    } else if (p->rank < r->rank) {
        hd_ballot_combine(&p->in->first, &r->first);
    } else {
        hd_ballot_combine(&r->first, &p->in->first);
        hd_ballot_copy(&r->first, &p->in->first);
    }
}

/* What all contribute: the same bits on all ranks, and those that steps of doubling would give. A
 * partner's ballot of the second round is shorter than what its first one has here. */
static void combine_all(hd_rounds *r)
{
    hd_first *of[HD_ROUNDS_DIRECT];
    const int size = r->n + 1, core = r->core;

    of[r->rank] = &r->first;
    for (partner *p = r->partners; p < r->partners + r->n; p++) {
        of[p->rank] = &p->in->first;
        if (p->in->head.seen < r->seen)
            r->seen = p->in->head.seen;
    }
    if (r->round == HD_SECOND_ROUND)
        return;
    for (int i = core; i < size; i++) {
        hd_ballot_combine(of[i - core], of[i]);
        of[i - core] = of[i];
    }
    for (int bit = 1; bit < core; bit *= 2)
        for (int i = 0; i < core; i += 2 * bit) {
            hd_ballot_combine(of[i], of[i + bit]);
            of[i] = of[i + bit];
        }
    r->all = of[0];
}

/* ---- rounds ---- */

static int go_on_directly(hd_rounds *r, int *ended)
{
    int there, rc;
    *ended = 0;
    for (int i = 0; i < r->n && !r->said; i++)
        if (r->partners[i].taken < number_of(r) && (rc = listen(r, &r->partners[i])))
            return rc;
    if ((rc = say_rest(r)))
        return rc;
    for (; r->heard < r->n; r->heard++)
        if ((rc = hear(r, &r->partners[r->heard], number_of(r), &there)) || !there)
            return rc;
    combine_all(r);
    *ended = 1;
    return MPI_SUCCESS;
}

static int go_on(hd_rounds *r, int *ended)
{
    int there, rc;
    if (r->is_direct)
        return go_on_directly(r, ended);
    for (*ended = 0; r->heard < r->n; r->heard++) {
        if (r->said < r->heard + !r->helps && (rc = say_next(r)))
            return rc;
        if ((rc = hear(r, &r->partners[r->heard], number_of(r), &there)) || !there)
            return rc;
        combine(r, &r->partners[r->heard]);
    }
    *ended = 1;
    if (r->round == HD_FIRST_ROUND)
        r->all = &r->first;
    return say_rest(r);
}

int hd_rounds_first(hd_rounds *r, MPI_Comm mpi, int *ended)
{
    const int rc = open_rounds(r, mpi);
    *ended = 0;
    if (rc)
        return rc;
    r->begun = 1;
    return go_on(r, ended);
}

static void begin_second(hd_rounds *r, int seen)
{
    r->round = HD_SECOND_ROUND;
    r->heard = r->said = 0;
    r->seen = (uint64_t)seen;
    r->voted = 1;
}

int hd_rounds_second(hd_rounds *r, int *ended)
{
    if (!r->voted)
        begin_second(r, 1);
    return go_on(r, ended);
}

int hd_rounds_leave(hd_rounds *r, MPI_Comm mpi)
{
    int rc = open_rounds(r, mpi), failed = MPI_SUCCESS;
    if (rc)
        return rc;
    if (!r->voted) {
        r->first.vote[REFUSES] = 1; /* it may lack what others bring: nobody goes on to vote */
        hd_ballot_no_letter(&r->first);
        failed = say_rest(r);
        begin_second(r, 0);
    }
    r->seen = 0;
    rc = say_rest(r);
    return rc ? rc : failed;
}

int hd_rounds_tidy(hd_rounds *r)
{
    const enum hd_round due = r->is_fast ? HD_FIRST_ROUND : HD_SECOND_ROUND;
    const uint64_t last = r->over ? UINT64_MAX : r->check * HD_ROUNDS + (uint64_t)due;
    int clean = hd_outbox_tidy(&r->late);
    for (partner *p = r->partners; p && p < r->partners + r->n; p++) {
        int there = 0, gone = 0;
        clean &= !hear(r, p, last, &there) && (there || r->over);
        for (int round = 0; round < HD_ROUNDS; round++)
            clean &= !have_gone(p->send[round], &gone) && gone;
    }
    return clean;
}

int hd_rounds_unsent(hd_rounds *r)
{
    for (partner *p = r->partners; p && p < r->partners + r->n; p++)
        for (int round = 0; round < HD_ROUNDS; round++) {
            int gone = 0;
            if (!have_gone(p->send[round], &gone) && !gone)
                return 1;
        }
    return hd_outbox_unsent(&r->late);
}

int hd_rounds_end(hd_rounds *r, MPI_Comm mpi)
{
    r->over = 1;
    return open_rounds(r, mpi); /* the others may have begun a check, and this rank none */
}

/* A receive may wait for a ballot that nobody sends. */
void hd_rounds_close(hd_rounds *r)
{
    for (partner *p = r->partners; p && p < r->partners + r->n; p++)
        if (p->receive != MPI_REQUEST_NULL && !MPI_Cancel(&p->receive))
            MPI_Wait(&p->receive, MPI_STATUS_IGNORE);
    if (r->partners)
        hd_pages_free(r->partners, memory(r));
    r->partners = NULL;
}
