/* all_reduce through memory that the ranks of a node share: where they all are on one, and the tensor is long.
 *
 * Each rank has a slot of two halves in a segment of the communicator's. A tensor goes in pieces, which use the
 * halves in turn; a piece has a slice for each rank. For each piece a rank
 *   1. copies into its slot what the others are to reduce, and says so: `in`;
 *   2. when the others have, adds their slots to its own slice, in place, and puts the result into its slot, in
 *      the place that step 1 left out: `out`;
 *   3. when the others have, copies their slices out.
 * Each slice is combined by one rank, so all ranks get the same bits. Nobody touches another's tensor, and a
 * piece stays in the caches until it is done.
 *
 * Two halves suffice: a rank that begins piece k+2 has seen `out` of piece k+1 from everybody, and whoever says
 * that is done with all of piece k.
 *
 * All waits know the timeout and look at who has gone. A rank that gives up marks the segment as broken, and
 * the others, wherever in it they are, give up too; from then on the group takes MPI. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "hd_data.h"

#define LEAST (4 << 10)      /* bytes: shorter tensors alone are not worth the memory */
#define PIECE (256 << 10)    /* bytes: with what belongs to it, it fits the second-level caches of today */
#define LONG_PIECE (1 << 20) /* bytes: with more ranks than cores each piece costs a round of the scheduler */
#define LEAST_SLICE (4 << 10)
#define PATIENCE 0.2         /* seconds for the next piece, after Ctrl-C */

typedef struct line {
    uint64_t in __attribute__((aligned(HD_LINE)));  /* pieces, as those below */
    uint64_t out __attribute__((aligned(HD_LINE)));
    double after __attribute__((aligned(HD_LINE))); /* seconds, when this rank gave up */
    uint64_t at;                                    /* in the piece after so many */
    int interrupted;                                /* why it did */
} line;

typedef struct segment {
    int32_t broken __attribute__((aligned(HD_LINE))); /* 1 + the rank that gave up */
    line lines[];
    /* then, from the next page on, the slots */
} segment;

struct hd_node {
    segment *at;
    char *slots;
    size_t bytes;
    int64_t piece; /* bytes of one half of a slot */
    uint64_t done; /* pieces so far, the same on all ranks */
    int told;      /* an operation of this rank has failed here */
};

typedef struct run {
    hd_comm *c;
    hd_job *j;
    struct hd_node *node;
    hd_reduce_fn reduce;
    int64_t item, until; /* bytes of an element; ns */
    double factor;
    int first;
} run;

/* ---- the segment ---- */

static int64_t page_up(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static int64_t head_bytes(const hd_comm *c)
{
    return page_up((int64_t)(sizeof(segment) + (size_t)c->size * sizeof(line)));
}

/* The largest piece that the memory allows; 0: none that is worth it. */
static int64_t piece_of(const hd_comm *c, int64_t limit)
{
    const int64_t most = hd_session_spin(c->session, 0) ? PIECE : LONG_PIECE;
    int64_t piece = (limit - head_bytes(c)) / (2 * c->size) / 4096 * 4096;
    piece = piece > most ? most : piece;
    return piece < (int64_t)LEAST_SLICE * c->size ? 0 : piece;
}

/* Collective, at the first tensor for it: a group that never reduces one needs no memory. */
static int open_node(hd_comm *c, hd_job *j)
{
    struct hd_node *node;
    void *at = NULL;
    int64_t limit = c->node_limit, piece;
    int rc;

    c->node_asked = 1;
    node = calloc(1, sizeof *node);
    if (!node)
        limit = 0; /* the others must do without, too */
    hd_mpi_lock(c->session);
    rc = MPI_Allreduce(MPI_IN_PLACE, &limit, 1, MPI_INT64_T, MPI_MIN, c->mpi);
    piece = piece_of(c, limit);
    if (!rc && piece) {
        node->piece = piece;
        node->bytes = (size_t)(head_bytes(c) + 2 * c->size * piece);
        rc = hd_session_share(c->mpi, node->bytes, &at) ? MPI_ERR_OTHER : MPI_SUCCESS;
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

static int64_t deadline(const hd_job *j)
{
    return j->timeout < 0 || j->timeout > 1e9 ? INT64_MAX : hd_now() + (int64_t)(j->timeout * 1e9);
}

/* Who gives up first speaks for all; 0: somebody else did. */
static int break_off(const run *r, double after, int interrupted)
{
    segment *s = r->node->at;
    int32_t none = 0;
    r->node->told = 1;
    s->lines[r->c->rank].after = after;
    s->lines[r->c->rank].at = r->node->done;
    s->lines[r->c->rank].interrupted = interrupted;
    return __atomic_compare_exchange_n(&s->broken, &none, r->c->rank + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static int behind(const segment *s, int rank, int out, uint64_t n)
{
    return __atomic_load_n(out ? &s->lines[rank].out : &s->lines[rank].in, __ATOMIC_ACQUIRE) < n;
}

static int fail_broken(const run *r)
{
    const int by = r->node->at->broken - 1;
    const line *who = &r->node->at->lines[by];
    char buffer[HD_TEXT];
    hd_text t;
    r->node->told = 1;
    hd_note_site(r->j);
    hd_text_init(&t, buffer, sizeof buffer);
    if (who->interrupted)
        hd_say(&t, "rank %d was interrupted while data moved in ", by);
    else
        hd_say(&t, "rank %d gave up after %.3g s while data moved in ", by, who->after);
    hd_say_call(&t, r->c, r->j);
    hd_say(&t, ". What the tensors hold is undefined; the group can still be used.");
    hd_fail(r->j, HD_ERR_TIMEOUT, "%s", buffer);
    return HD_ERR_TIMEOUT;
}

static int give_up(const run *r, int out, uint64_t n, double after)
{
    hd_comm *c = r->c;
    char buffer[HD_TEXT];
    const char *sep = "";
    hd_text t;

    if (!break_off(r, after, r->j->code == HD_ERR_INTERRUPT))
        return fail_broken(r);
    hd_note_site(r->j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "timeout after %.3g s while data moved in ", after);
    hd_say_call(&t, c, r->j);
    hd_say(&t, ": no data from rank ");
    for (int q = 0; q < c->size; q++)
        if (q != c->rank && behind(r->node->at, q, out, n)) {
            hd_say(&t, "%s%d", sep, q);
            sep = ", ";
        }
    for (int q = 0; q < c->size && t.used < 1200; q++)
        if (q != c->rank) {
            hd_say(&t, "\n  rank %d: ", q);
            hd_session_report(c->session, c->node_slot[q], &t);
        }
    hd_say(&t, "\nWhat the tensors hold is undefined; the group can still be used.");
    hd_fail(r->j, HD_ERR_TIMEOUT, "%s", buffer);
    return HD_ERR_TIMEOUT;
}

static int wait_slowly(run *r, int rank, int out, uint64_t n)
{
    hd_comm *c = r->c;
    hd_job *j = r->j;
    hd_waiter w;

    hd_waiter_init(&w, hd_session_spin(c->session, !j->inline_), -1);
    while (behind(r->node->at, rank, out, n)) {
        const int ev = hd_waiter_step(&w);
        if (!ev)
            continue;
        if (__atomic_load_n(&r->node->at->broken, __ATOMIC_ACQUIRE))
            return fail_broken(r);
        hd_session_progress(c->session);
        if (ev & HD_WAIT_HOOK) {
            int how;
            hd_session_note(c->session, j);
            if (j->inline_ && j->code == HD_OK && hd_py.slow && hd_py.slow(j))
                j->code = HD_ERR_INTERRUPT; /* raised when all are through, or nothing comes any more */
            how = hd_session_gone(c->session, c->node_slot[rank]);
            if (how && behind(r->node->at, rank, out, n)) { /* read in this order */
                break_off(r, hd_waiter_elapsed(&w), 0);
                return hd_fail_gone(c, j, rank, how);
            }
        }
        if (hd_now() > r->until || (j->code == HD_ERR_INTERRUPT && hd_waiter_elapsed(&w) > PATIENCE))
            return give_up(r, out, n, hd_waiter_elapsed(&w));
    }
    return HD_OK;
}

/* Until all others have said `in` or `out` of piece n-1. */
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

/* ---- moving ---- */

static char *slot(const run *r, int rank)
{
    return r->node->slots + (2 * rank + (int64_t)(r->node->done & 1)) * r->node->piece;
}

/* Where rank's slice of n elements begins; all but the last are whole cache lines. */
static int64_t slice(const run *r, int64_t n, int rank)
{
    const int64_t unit = HD_LINE / r->item, each = (n + r->c->size - 1) / r->c->size;
    const int64_t at = (each + unit - 1) / unit * unit * rank;
    return at < n ? at : n;
}

static void give(const run *r, char *to, const char *from, int64_t n)
{
    if (r->first)
        hd_scale_mul(to, from, n, r->j->dtype, r->factor);
    else
        memcpy(to, from, (size_t)(n * r->item));
}

static int piece(run *r, char *data, int64_t n)
{
    const int size = r->c->size, me = r->c->rank;
    const int64_t item = r->item, a = slice(r, n, me), b = slice(r, n, me + 1);
    line *mine = &r->node->at->lines[me];
    char *own = slot(r, me);
    int code;

    give(r, own, data, a);
    give(r, own + b * item, data + b * item, n - b);
    __atomic_store_n(&mine->in, r->node->done + 1, __ATOMIC_RELEASE);
    if (r->first)
        hd_scale_mul(data + a * item, data + a * item, b - a, r->j->dtype, r->factor);
    if ((code = wait_all(r, 0, r->node->done + 1)))
        return code;
    for (int i = 1; i < size; i++)
        r->reduce(slot(r, (me + i) % size) + a * item, data + a * item, b - a);
    hd_scale_after(r->c, r->j, data + a * item, b - a);
    memcpy(own + a * item, data + a * item, (size_t)((b - a) * item));
    __atomic_store_n(&mine->out, r->node->done + 1, __ATOMIC_RELEASE);
    if ((code = wait_all(r, 1, r->node->done + 1)))
        return code;
    for (int i = 1; i < size; i++) {
        const int q = (me + i) % size;
        const int64_t from = slice(r, n, q), to = slice(r, n, q + 1);
        memcpy(data + from * item, slot(r, q) + from * item, (size_t)((to - from) * item));
    }
    r->node->done++;
    return HD_OK;
}

int hd_node_takes(hd_comm *c, hd_job *j)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    /* Where each rank has a core, which they agree on, it beats MPI for short ones, too; in turns it does not. */
    const int64_t least = c->node && hd_session_spin(c->session, 0) ? 1 : LEAST;
    int any = 0, by;
    if (!c->page || c->on_device || !hd_reduce_kernel(j->redop, j->dtype))
        return 0;
    for (int i = 0; i < j->nout; i++)
        any |= j->out[i].n * item >= least;
    if (!any || (!c->node_asked && open_node(c, j)) || !c->node)
        return 0;
    by = __atomic_load_n(&c->node->at->broken, __ATOMIC_ACQUIRE);
    /* Without the entry check this rank may come to the operation that another has given up, or to the one after. */
    if (by && !c->node->told && c->node->done <= c->node->at->lines[by - 1].at)
        fail_broken(&(run){.c = c, .j = j, .node = c->node});
    return !by;
}

int hd_node_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n)
{
    run r = {.c = c, .j = j, .node = c->node, .item = (int64_t)hd_itemsize(j->dtype), .factor = 1};
    const int64_t step = r.node->piece / r.item;

    r.reduce = hd_reduce_kernel(j->redop, j->dtype);
    r.first = hd_scales_first(c, j, &r.factor);
    r.until = deadline(j);
    for (int64_t at = 0; at < n; at += step) {
        const int code = piece(&r, data + at * r.item, n - at < step ? n - at : step);
        if (code)
            return code;
    }
    return HD_OK;
}
