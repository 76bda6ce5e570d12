/* All operations but all_reduce, and reduce among more than two ranks, through the slots of
 * hd_node.c. An operation is a row of the table below: what a rank has for each rank, and what it
 * gets from each.
 *
 * The blocks go in pieces, which use the halves of the slots in turn. For each piece a rank
 *   1. copies into its slot what it has for the others, and then announces `in`;
 *   2. meanwhile handles its own block, which no other rank needs;
 *   3. when the others have announced theirs, reads their slots into its tensor.
 * So all ranks write and read at once, and what they exchange stays in their second-level caches.
 *
 * One meeting per piece suffices: a rank that writes piece k+2 has seen `in` of piece k+1 from all
 * ranks, and a rank announces that only when it has read all of piece k. `out` follows the last
 * piece, so that the whole operation is given up, or not, as one piece of an all_reduce is. No rank
 * touches another's tensor.
 *
 * All ranks go through as many pieces as the longest block of any rank has, also those that have
 * none. Where sizes differ, the entry check has told all of them how long it is. */
#include <string.h>

#include "hd_comm.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_node.h"
#include "hd_order.h"
#include "hd_scale.h"
#include "hd_slots.h"
#include "hd_stream.h"
#include "hd_threads.h"
#include "hd_types.h"

/* Bytes: with both halves, and its part of the tensors, a piece stays in a second-level cache. */
#define PIECE (128 << 10)
/* Bytes: where ranks take turns on cores, shorter operations go through MPI. */
#define TURNS (16 << 10)
#define RANKS 64

typedef hd_node_run run;

/* A rank's blocks, by the rank that each is for, or from. */
typedef struct blocks {
    hd_seg give[RANKS], take[RANKS];
} blocks;

/* ---- which blocks ---- */

/* Equal blocks of one tensor. */
static void divide(const run *r, char *at, int64_t n, hd_seg *out)
{
    for (int q = 0; q < r->c->size; q++)
        out[q] = (hd_seg){.ptr = at + q * n * r->item, .n = n};
}

static void list(const run *r, const hd_seg *from, hd_seg *out)
{
    memcpy(out, from, (size_t)r->c->size * sizeof *out);
}

static void same(const run *r, hd_seg one, hd_seg *out)
{
    for (int q = 0; q < r->c->size; q++)
        out[q] = one;
}

static int overlap(const run *r, hd_seg a, hd_seg b)
{
    return a.n && b.n && a.ptr < b.ptr + b.n * r->item && b.ptr < a.ptr + a.n * r->item;
}

/* An input that lies across an output would be overwritten before it is read. */
static hd_seg safe(const run *r, hd_seg in, const hd_seg *out)
{
    const hd_seg own = out[r->c->rank];
    for (int q = 0; q < r->c->size; q++)
        if (in.ptr != own.ptr && overlap(r, in, out[q])) {
            memmove(own.ptr, in.ptr, (size_t)(in.n * r->item));
            return own;
        }
    return in;
}

/* Each of these fills the lists, which are empty before, for one operation on `in` and `out`. */

static void reduce_scatter(const run *r, const hd_seg *in, const hd_seg *out, blocks *b)
{
    if (r->j->listed)
        list(r, in, b->give);
    else
        divide(r, in->ptr, out->n, b->give);
    same(r, (hd_seg){.ptr = r->j->scratch ? r->j->scratch : out->ptr, .n = out->n}, b->take);
}

static void reduce(const run *r, const hd_seg *in, const hd_seg *out, blocks *b)
{
    b->give[r->j->root] = *in;
    if (r->c->rank == r->j->root)
        same(r, *out, b->take);
}

static void broadcast(const run *r, const hd_seg *in, const hd_seg *out, blocks *b)
{
    (void)in;
    if (r->c->rank == r->j->root)
        same(r, *out, b->give);
    else
        b->take[r->j->root] = *out;
}

static void all_gather(const run *r, const hd_seg *in, const hd_seg *out, blocks *b)
{
    if (r->j->listed)
        list(r, out, b->take);
    else
        divide(r, out->ptr, in->n, b->take);
    same(r, safe(r, *in, b->take), b->give);
}

static void gather(const run *r, const hd_seg *in, const hd_seg *out, blocks *b)
{
    const int root = r->j->root;
    b->give[root] = *in;
    if (r->c->rank == root) {
        list(r, out, b->take);
        b->give[root] = safe(r, *in, out);
    }
}

static void scatter(const run *r, const hd_seg *in, const hd_seg *out, blocks *b)
{
    const int root = r->j->root;
    if (r->c->rank == root)
        list(r, in, b->give);
    b->take[root] = *out;
}

static void all_to_all(const run *r, const hd_seg *in, const hd_seg *out, blocks *b)
{
    list(r, in, b->give);
    list(r, out, b->take);
}

#define ANY INT64_MAX

/* An operation goes this way up to the limits behind it; beyond them MPI was as fast or faster, see
 * docs/performance.md. The root of a reduce combines all blocks here; more ranks than two divide
 * that among them, in hd_node_reduce.c. The root of a scatter writes all blocks, and that of a
 * gather reads them, once more than with MPI, which copies a long block once, from where it lies.
 */
static const struct row {
    void (*blocks)(const run *r, const hd_seg *in, const hd_seg *out, blocks *b);
    int per_peer;         /* a rank has another block for each, and a slot a place for each; else
                           * there is one block for all */
    int ranks;            /* of the group */
    int64_t even, uneven; /* bytes of all blocks, where their sizes are equal and where they are
                           * not */
} rows[] = {
    [HD_REDUCE] = {reduce, 0, 2, ANY, ANY},
    [HD_REDUCE_SCATTER] = {reduce_scatter, 1, RANKS, ANY, ANY},
    [HD_BROADCAST] = {broadcast, 0, RANKS, ANY, ANY},
    [HD_ALL_GATHER] = {all_gather, 0, RANKS, ANY, ANY},
    [HD_GATHER] = {gather, 0, RANKS, 1 << 20, 1 << 20},
    [HD_SCATTER] = {scatter, 1, RANKS, 256 << 10, 256 << 10},
    [HD_ALL_TO_ALL] = {all_to_all, 1, RANKS, ANY, 256 << 10},
};

/* ---- how they move ---- */

static int reduces(const hd_job *j) { return j->kind == HD_REDUCE || j->kind == HD_REDUCE_SCATTER; }

/* What is left of n elements behind `at`, at most a piece. */
static int64_t part(const run *r, int64_t n, int64_t at)
{
    const int64_t left = n - at;
    return left < 0 ? 0 : left < r->step ? left : r->step;
}

static void copy(const run *r, char *to, const char *from, int64_t n)
{
    if (to != from && n)
        hd_node_put(r, to, from, n);
}

/* Where, in the slot of rank `from`, what it has for rank `to` begins. */
static char *place(const run *r, int from, int to)
{
    const int before = rows[r->j->kind].per_peer ? to - (to > from) : 0;
    return hd_node_slot(r, from) + before * r->step * r->item;
}

static void give(const run *r, const hd_seg *list, int64_t at)
{
    const int size = r->c->size, me = r->c->rank;
    for (int i = 1; i < size; i++) {
        const int q = (me + i) % size;
        const int64_t n = part(r, list[q].n, at);
        if (n)
            hd_scale_before(r->c, r->j, place(r, me, q), list[q].ptr + at * r->item, n);
        if (n && !rows[r->j->kind].per_peer)
            return;
    }
}

static void take(const run *r, const hd_seg *list, int64_t at)
{
    const int size = r->c->size, me = r->c->rank;
    for (int i = 1; i < size; i++) {
        const int q = (me + i) % size;
        const int64_t n = part(r, list[q].n, at);
        char *to = list[q].ptr + at * r->item;
        if (n && reduces(r->j))
            r->reduce(place(r, q, me), to, to, n);
        else if (n)
            copy(r, to, place(r, q, me), n);
    }
}

/* Elements of the longest block of any rank. */
static int64_t longest(const run *r, const blocks *b)
{
    int64_t most = 0;
    if (r->j->uneven)
        return r->j->checked.longest;
    for (int q = 0; q < r->c->size; q++) {
        most = b->give[q].n > most ? b->give[q].n : most;
        most = b->take[q].n > most ? b->take[q].n : most;
    }
    return most;
}

/* Whether this rank's own block must be written last, because it lies in what it has for others. */
static int comes_last(const run *r, const blocks *b)
{
    const int me = r->c->rank;
    if (r->j->kind != HD_SCATTER)
        return 0;
    for (int q = 0; q < r->c->size; q++)
        if (b->take[me].ptr != b->give[me].ptr && overlap(r, b->take[me], b->give[q]))
            return 1;
    return 0;
}

static int move(run *r, const blocks *b)
{
    const hd_seg from = b->give[r->c->rank], to = b->take[r->c->rank];
    const int last = comes_last(r, b);
    const int64_t most = longest(r, b);
    int code;

    for (int64_t at = 0; at < most; at += r->step) {
        const int64_t n = part(r, from.n < to.n ? from.n : to.n, at), off = at * r->item;
        give(r, b->give, at);
        hd_node_give(r);
        if (n && !last && !reduces(r->j))
            copy(r, to.ptr + off, from.ptr + off, n);
        else if (n && !last)
            hd_scale_before(r->c, r->j, to.ptr + off, from.ptr + off, n);
        if ((code = hd_node_wait(r)))
            return code;
        take(r, b->take, at);
        if (n && reduces(r->j))
            hd_scale_after(r->c, r->j, to.ptr + off, n);
        hd_node_next(r);
    }
    if (last)
        memmove(to.ptr, from.ptr, (size_t)(to.n * r->item));
    return HD_OK;
}

/* ---- the operations ---- */

/* Several inputs of an all_gather, all of them first: one may lie in an output of another. */
static void put_in_place(const run *r)
{
    const hd_job *j = r->j;
    for (int i = 0; i < j->nin; i++) {
        const hd_seg own = j->out[(int64_t)i * r->c->size + r->c->rank];
        if (own.n && own.ptr != j->in[i].ptr)
            memmove(own.ptr, j->in[i].ptr, (size_t)(own.n * r->item));
        j->in[i] = own;
    }
}

static int has_row(const hd_job *j)
{
    return j->kind < (int)(sizeof rows / sizeof *rows) && rows[j->kind].blocks;
}

/* What the ranks agree on decides: bytes of all blocks, or -1 if it cannot go this way. Sizes that
 * may differ do only where the entry check has told all ranks all of them. */
static int64_t bytes_of(const hd_comm *c, const hd_job *j)
{
    const hd_seg *all = reduces(j) ? j->in : j->out;
    const int n = reduces(j) ? j->nin : j->nout;
    int64_t sum = 0;

    if (reduces(j) && (hd_ordered(c, j) || !hd_reduce_kernel(j->redop, j->dtype)))
        return -1; /* each rank begins with its own block */
    if (!c->check && j->pairwise && (j->kind != HD_ALL_TO_ALL || j->listed))
        return -1;
    if (j->uneven)
        sum = j->checked.verified ? j->checked.total : -1;
    else if (j->kind == HD_GATHER)
        sum = j->in[0].n * c->size;
    else if (j->kind == HD_SCATTER)
        sum = j->out[0].n * c->size;
    else
        for (int i = 0; i < n; i++)
            sum += all[i].n;
    return sum * (int64_t)hd_itemsize(j->dtype);
}

static int64_t least(const hd_comm *c)
{
    return hd_session_spin(c->session, 0) ? hd_node_least(c) : TURNS;
}

int hd_slots_takes(hd_comm *c, hd_job *j)
{
    int64_t bytes;
    if (!c->page || c->on_device || c->size < 2 || !has_row(j) || c->size > rows[j->kind].ranks)
        return 0;
    bytes = bytes_of(c, j);
    if (bytes < least(c) || bytes > (j->uneven ? rows[j->kind].uneven : rows[j->kind].even))
        return 0;
    return hd_node_ready(c, j);
}

int hd_slots(hd_comm *c, hd_job *j)
{
    const int times = j->kind == HD_ALL_GATHER && j->listed ? j->nin : 1;
    int64_t bytes;
    int code;
    run r;

    hd_node_begin(&r, c, j);
    r.streams = hd_streams(bytes_of(c, j));
    bytes = r.step * r.item < PIECE ? r.step * r.item : PIECE;
    r.step = bytes / (rows[j->kind].per_peer ? c->size - 1 : 1) / HD_LINE * HD_LINE / r.item;
    if (times > 1)
        put_in_place(&r);
    for (int i = 0; i < times; i++) {
        blocks b;
        memset(b.give, 0, (size_t)c->size * sizeof *b.give);
        memset(b.take, 0, (size_t)c->size * sizeof *b.take);
        rows[j->kind].blocks(&r, j->in + i, j->out + (int64_t)i * c->size, &b);
        if ((code = move(&r, &b)))
            return code;
    }
    if ((code = hd_node_part(&r)))
        return code;
    if (j->scratch)
        copy(&r, j->out[0].ptr, j->scratch, j->out[0].n);
    return HD_OK;
}
