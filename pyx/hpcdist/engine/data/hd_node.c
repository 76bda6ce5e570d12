/* Memory that the ranks of a node share, and their meetings there, for long tensors of a group on
 * one node: see hd_node_reduce.c, hd_slots.c and hd_direct.c.
 *
 * Each rank has a slot of two halves in a segment of the communicator. A tensor goes in pieces,
 * which use the halves in turn. For each piece a rank announces `in` when what it has for the
 * others is in its slot, and `out` when it is done with it, as far as others must know.
 *
 * Two halves suffice in an all_reduce: a rank that begins piece k+2 has seen `out` of piece k+1
 * from all ranks, and a rank announces that only when it is done with all of piece k.
 *
 * All waits end at the timeout and check for ranks that have gone. Giving up is one decision for
 * all ranks, because a rank that has seen `out` from all ranks returns, with the result if it gets
 * one:
 *   - a rank that has not announced `out` of a piece gives up by never announcing it;
 *   - a rank that has must keep another rank from it: it puts a veto into the `out` of a rank that
 *     has not, by compare-and-swap on the word that the other must itself swap. Either the veto is
 *     first, and no rank gets past this piece; or all have announced `out`, and the rank that
 *     wanted to give up has its result.
 * Only then is the segment marked as broken. A rank that finds the mark, waiting or about to begin
 * the same operation, fails as well; from then on the group uses MPI. tests/model/node.pml models
 * this protocol. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_node.h"
#include "hd_page.h"
#include "hd_report.h"
#include "hd_shared.h"
#include "hd_status.h"
#include "hd_stream.h"
#include "hd_threads.h"
#include "hd_types.h"

#define LEAST (4 << 10)   /* bytes: shorter tensors alone do not justify the memory */
#define PIECE (256 << 10) /* bytes: with its buffers, it fits the second-level caches of today */
/* Bytes: with more ranks than cores, each piece costs a round of the scheduler. */
#define LONG_PIECE (1 << 20)
#define LEAST_SLICE (4 << 10)
#define PATIENCE 0.2 /* seconds for the next piece, after Ctrl-C */

#define UNDEFINED "What the tensors hold is undefined; the group can still be used."

#define VETO 48 /* bits of pieces in `out`; above them 1 + the rank that gave up on this one */

typedef struct line {
    uint64_t in __attribute__((aligned(HD_LINE)));  /* pieces */
    hd_spot place;                                  /* written before `in`: see hd_direct.c */
    uint64_t out __attribute__((aligned(HD_LINE))); /* pieces, or operations of hd_slots.c, and
                                                     * veto */
    double after __attribute__((aligned(HD_LINE))); /* seconds, when this rank gave up */
    uint64_t at;                                    /* in the piece after so many */
    int interrupted;                                /* whether it gave up because of a signal */
    int lost;                                       /* or because a rank of the job died */
} line;

typedef struct segment {
    /* 1 + a rank that gave up; all ranks give up the same piece. */
    int32_t broken __attribute__((aligned(HD_LINE)));
    line lines[];
    /* followed, from the next page on, by the slots */
} segment;

struct hd_node {
    segment *at;
    char *slots;
    size_t bytes;
    int64_t piece;   /* bytes of one half of a slot */
    uint64_t given;  /* `in` so far, and */
    uint64_t done;   /* `out`, the same on all ranks */
    int failed_here; /* an operation of this rank has failed here */
};

typedef hd_node_run run;

/* ---- the segment ---- */

static int64_t head_bytes(const hd_comm *c)
{
    return (int64_t)hd_whole_pages(sizeof(segment) + (size_t)c->size * sizeof(line));
}

/* The largest piece that the memory allows; 0: none that is worth using. */
static int64_t piece_of(const hd_comm *c, int64_t limit)
{
    const int64_t most = hd_session_spin(c->session, 0) ? PIECE : LONG_PIECE;
    int64_t piece = (limit - head_bytes(c)) / (2 * c->size) / 4096 * 4096;
    piece = piece > most ? most : piece;
    return piece < (int64_t)LEAST_SLICE * c->size ? 0 : piece;
}

/* Collective, at the first tensor that can use it: a group that never reduces one needs no
 * memory. */
static int open_node(hd_comm *c, hd_job *j)
{
    struct hd_node *node;
    void *at = NULL;
    int64_t limit = c->node_limit, piece;
    int rc;

    c->node_asked = 1;
    node = calloc(1, sizeof *node);
    if (!node)
        limit = 0; /* the others must do without it, too */
    hd_mpi_lock(c->session);
    rc = MPI_Allreduce(MPI_IN_PLACE, &limit, 1, MPI_INT64_T, MPI_MIN, c->mpi);
    piece = piece_of(c, limit);
    if (!rc && piece) {
        node->piece = piece;
        node->bytes = (size_t)(head_bytes(c) + 2 * c->size * piece);
        rc = hd_share(c->mpi, node->bytes, &at);
    }
    hd_mpi_unlock(c->session);
    if (at) {
        madvise(at, node->bytes, MADV_DONTFORK); /* a child that outlives the group would keep it */
        node->at = at;
        node->slots = (char *)at + head_bytes(c);
        c->node = node;
    } else {
        free(node);
    }
    return hd_mpi_failed(j, rc, "MPI_Allreduce");
}

void hd_node_close(hd_comm *c)
{
    if (!c->node)
        return;
    munmap(c->node->at, c->node->bytes);
    free(c->node);
    c->node = NULL;
}

int64_t hd_node_bytes(const hd_comm *c) { return c->node ? (int64_t)c->node->bytes : 0; }

/* ---- waiting ---- */

static int64_t deadline(hd_job *j)
{
    const int64_t now = hd_now();
    if (!j->begun)
        j->begun = now;
    return hd_job_data_until(j, now);
}

static uint64_t announced_out(const line *of)
{
    return __atomic_load_n(&of->out, __ATOMIC_ACQUIRE) & ((1ull << VETO) - 1);
}

static int behind(const segment *s, int rank, int out, uint64_t n)
{
    return (out ? announced_out(&s->lines[rank])
                : __atomic_load_n(&s->lines[rank].in, __ATOMIC_ACQUIRE)) < n;
}

/* 1 + a rank that gave up this rank's piece, or the next one if this rank is about to begin it;
 * else 0. If the mark is for a later piece, this rank will get there: all ranks have announced
 * `out` of the present one. */
static int broken(const struct hd_node *node)
{
    const int by = __atomic_load_n(&node->at->broken, __ATOMIC_ACQUIRE);
    return by && node->at->lines[by - 1].at <= node->done ? by : 0;
}

static int fail_broken(const run *r, int by)
{
    const line *who = &r->node->at->lines[by - 1];
    char buffer[HD_TEXT];
    hd_text t;
    r->node->failed_here = 1;
    if (who->lost)
        hd_ft_hear(r->c->session);
    if (!who->interrupted && hd_fail_if_broken(r->c, r->j))
        return r->j->code;
    hd_note_site(r->j);
    hd_text_init(&t, buffer, sizeof buffer);
    if (who->interrupted)
        hd_say(&t, "rank %d was interrupted while data moved in ", by - 1);
    else
        hd_say(&t, "rank %d gave up after %.3g s while data moved in ", by - 1, who->after);
    hd_say_call(&t, r->c, r->j);
    hd_say(&t, ". ");
    hd_say_last(&t, UNDEFINED);
    hd_fail(r->j, HD_ERR_TIMEOUT, "%s", buffer);
    return HD_ERR_TIMEOUT;
}

/* Keeps a rank from announcing `out`. 0: all have announced it; else 1 + the rank whose veto was
 * first, which may be another rank. */
static int veto(const run *r)
{
    const uint64_t before = r->node->done, mine = (uint64_t)(r->c->rank + 1) << VETO;
    for (int q = 0; q < r->c->size; q++) {
        uint64_t old = before;
        if (__atomic_compare_exchange_n(&r->node->at->lines[q].out, &old, mine | before, 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return r->c->rank + 1;
        if (old >> VETO)
            return (int)(old >> VETO);
    }
    return 0;
}

/* Gives this piece up for all ranks. 0: too late, it is done; else 1 + the rank that gave it up for
 * all. */
static int break_off(const run *r, int out, double after)
{
    segment *s = r->node->at;
    line *mine = &s->lines[r->c->rank];
    int32_t by = 0;

    mine->after = after;
    mine->at = r->node->done;
    mine->interrupted = r->j->code == HD_ERR_INTERRUPT;
    mine->lost = hd_session_broken(r->c->session);
    if (out) {
        const int first = veto(r);
        if (first != r->c->rank + 1)
            return first;
    }
    r->node->failed_here = 1;
    if (__atomic_compare_exchange_n(&s->broken, &by, r->c->rank + 1, 0, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        return r->c->rank + 1;
    return by;
}

static int give_up(const run *r, int out, uint64_t n, double after)
{
    hd_comm *c = r->c;
    char buffer[HD_TEXT], names[256];
    hd_text t, missing;
    int by;

    hd_text_init(&missing, names, sizeof names);
    for (int q = 0; q < c->size; q++)
        if (q != c->rank && behind(r->node->at, q, out, n))
            hd_say(&missing, "%s%d", missing.used ? ", " : "", q);
    by = break_off(r, out, after);
    if (by != c->rank + 1)
        return by ? fail_broken(r, by) : HD_OK;
    hd_note_site(r->j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "timeout after %.3g s while data moved in ", after);
    hd_say_call(&t, c, r->j);
    hd_say(&t, ": no data from rank %s", names);
    for (int q = 0; q < c->size && t.used < 1200; q++)
        if (q != c->rank) {
            hd_say(&t, "\n  rank %d: ", q);
            hd_session_report(c->session, c->node_slot[q], &t);
        }
    hd_say(&t, "\n");
    hd_say_last(&t, UNDEFINED);
    hd_fail(r->j, HD_ERR_TIMEOUT, "%s", buffer);
    return HD_ERR_TIMEOUT;
}

/* Every 50 ms: checks for signals, and whether the rank that is waited for has gone. */
static int look_around(run *r, int rank, int out, uint64_t n)
{
    hd_comm *c = r->c;
    hd_job *j = r->j;
    enum hd_gone how;
    hd_session_note(c->session, j);
    if (j->inline_ && j->code == HD_OK && hd_py.slow && hd_py.slow(j))
        /* Raised when all ranks are through, or no data arrives any more. */
        j->code = HD_ERR_INTERRUPT;
    if (hd_session_broken(c->session)) {
        const int by = break_off(r, out, hd_job_elapsed(j));
        return by ? hd_fail_broken(c, j) : HD_OK;
    }
    how = hd_session_gone(c->session, c->node_slot[rank]);
    if (how && behind(r->node->at, rank, out, n)) { /* the order of these two reads matters */
        const int by = break_off(r, out, hd_job_elapsed(j));
        if (by)
            return by == c->rank + 1 ? hd_fail_gone(c, j, rank, how) : fail_broken(r, by);
    }
    return HD_OK;
}

/* HD_OK also if this rank was too late to give up: all ranks have announced `out` then. */
static int wait_slowly(run *r, int rank, int out, uint64_t n)
{
    hd_waiter w;

    hd_waiter_init(&w, hd_session_spin(r->c->session, !r->j->inline_), -1);
    hd_page_cores(r->c, &w, rank);
    while (behind(r->node->at, rank, out, n)) {
        const int ev = hd_waiter_step(&w);
        int by, code;
        if (!ev)
            continue;
        if ((by = broken(r->node)))
            return fail_broken(r, by);
        hd_session_progress(r->c->session);
        if ((ev & HD_WAIT_HOOK) && (code = look_around(r, rank, out, n)))
            return code;
        if (hd_now() > r->until ||
            (r->j->code == HD_ERR_INTERRUPT && hd_waiter_elapsed(&w) > PATIENCE))
            return give_up(r, out, n, hd_job_elapsed(r->j));
    }
    return HD_OK;
}

/* Waits until all others have announced `in` or `out` of piece n-1. */
static int wait_all(run *r, int out, uint64_t n)
{
    for (int i = 1; i < r->c->size; i++) {
        const int q = (r->c->rank + i) % r->c->size;
        if (behind(r->node->at, q, out, n)) {
            const int code = wait_slowly(r, q, out, n);
            if (code)
                return code;
        }
    }
    return HD_OK;
}

/* ---- meeting ---- */

void hd_node_give(hd_node_run *r)
{
    __atomic_store_n(&r->node->at->lines[r->c->rank].in, r->node->given + 1, __ATOMIC_RELEASE);
}

int hd_node_wait(hd_node_run *r) { return wait_all(r, 0, r->node->given + 1); }

void hd_node_next(hd_node_run *r) { r->node->given++; }

int hd_node_meet(hd_node_run *r, hd_spot mine)
{
    int code;
    r->node->at->lines[r->c->rank].place = mine;
    hd_node_give(r);
    code = hd_node_wait(r);
    hd_node_next(r);
    return code;
}

hd_spot hd_node_place(const hd_node_run *r, int rank) { return r->node->at->lines[rank].place; }

int hd_node_part(hd_node_run *r)
{
    uint64_t before = r->node->done;
    int code;
    if (!__atomic_compare_exchange_n(&r->node->at->lines[r->c->rank].out, &before, before + 1, 0,
                                     __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return fail_broken(r, (int)(before >> VETO));
    if ((code = wait_all(r, 1, r->node->done + 1)) == HD_OK)
        r->node->done++;
    return code;
}

/* ---- moving ---- */

static char *half_of(const run *r, int rank, uint64_t piece)
{
    return r->node->slots + (2 * rank + (int64_t)(piece & 1)) * r->node->piece;
}

char *hd_node_slot(const hd_node_run *r, int rank) { return half_of(r, rank, r->node->given); }

char *hd_node_other_half(const hd_node_run *r)
{
    return half_of(r, r->c->rank, r->node->given + 1);
}

void hd_node_put(const hd_node_run *r, char *to, const char *from, int64_t n)
{
    if (r->streams)
        hd_stream(to, from, (size_t)(n * r->item));
    else
        memcpy(to, from, (size_t)(n * r->item));
}

int64_t hd_node_slice(const hd_node_run *r, int64_t n, int rank)
{
    const int64_t unit = HD_LINE / r->item, each = (n + r->c->size - 1) / r->c->size;
    const int64_t at = (each + unit - 1) / unit * unit * rank;
    return at < n ? at : n;
}

int hd_node_ready(hd_comm *c, hd_job *j)
{
    int by;
    if (!c->node_asked && open_node(c, j))
        return -1;
    if (!c->node || c->node->failed_here)
        return 0;
    /* In this operation: without this rank no rank got past its first piece. */
    if ((by = broken(c->node))) {
        fail_broken(&(run){.c = c, .j = j, .node = c->node}, by);
        return -1;
    }
    return 1;
}

/* Where each rank has a core, which the ranks agree on, it beats MPI for short tensors, too; where
 * ranks take turns it does not. */
int64_t hd_node_least(const hd_comm *c)
{
    return c->node && hd_session_spin(c->session, 0) ? 1 : LEAST;
}

void hd_node_begin(hd_node_run *r, hd_comm *c, hd_job *j)
{
    *r = (run){.c = c, .j = j, .node = c->node, .item = (int64_t)hd_itemsize(j->dtype)};
    r->reduce = hd_reduce_kernel(j->redop, j->dtype);
    if (!j->data_until)
        j->data_until = deadline(j);
    r->until = j->data_until;
    r->step = c->node->piece / r->item;
}
