/* reduce_scatter, all_gather, all_to_all and broadcast through the slots of hd_node.c.
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
 * touches another's tensor. */
#include <string.h>

#include "hd_comm.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_node.h"
#include "hd_scale.h"
#include "hd_slots.h"
#include "hd_threads.h"
#include "hd_types.h"

/* Bytes: with both halves, and its part of the tensors, a piece stays in a second-level cache. */
#define PIECE (128 << 10)
/* Bytes: where ranks take turns on cores, shorter operations go through MPI. */
#define TURNS (16 << 10)
#define RANKS 64

typedef hd_node_run run;

static int64_t longest(const hd_seg *list, int n)
{
    int64_t most = 0;
    for (int i = 0; i < n; i++)
        most = list[i].n > most ? list[i].n : most;
    return most;
}

/* What is left of n elements behind `at`, at most a piece. */
static int64_t part(const run *r, int64_t n, int64_t at)
{
    const int64_t left = n - at;
    return left < 0 ? 0 : left < r->step ? left : r->step;
}

static void copy(const run *r, char *to, const char *from, int64_t n)
{
    if (to != from && n)
        memcpy(to, from, (size_t)(n * r->item));
}

/* Begins an operation that gives each rank `shares` blocks per piece, of at most PIECE bytes in
 * all. */
static void begin(run *r, hd_comm *c, hd_job *j, int shares)
{
    int64_t bytes;
    hd_node_begin(r, c, j);
    bytes = r->step * r->item < PIECE ? r->step * r->item : PIECE;
    r->step = bytes / shares / HD_LINE * HD_LINE / r->item;
}

/* Where, in the slot of rank `from`, what it has for rank `to` begins. */
static char *share(const run *r, int from, int to)
{
    return hd_node_slot(r, from) + (to - (to > from)) * r->step * r->item;
}

/* ---- one block of each rank for each ---- */

static void put_scaled(const run *r, char *to, const char *from, int64_t n)
{
    if (r->first)
        hd_scale_mul(to, from, n, r->j->dtype, r->factor);
    else
        copy(r, to, from, n);
}

static int reduce_scatter(run *r, const hd_seg *in, char *to)
{
    const int size = r->c->size, me = r->c->rank;
    const int64_t most = longest(in, size);
    int code;

    for (int64_t at = 0; at < most; at += r->step) {
        const int64_t n = part(r, in[me].n, at), off = at * r->item;
        for (int i = 1; i < size; i++) {
            const int q = (me + i) % size;
            const int64_t m = part(r, in[q].n, at);
            if (m)
                put_scaled(r, share(r, me, q), in[q].ptr + off, m);
        }
        hd_node_give(r);
        if (n)
            put_scaled(r, to + off, in[me].ptr + off, n);
        if ((code = hd_node_wait(r)))
            return code;
        for (int i = 1; i < size && n; i++)
            r->reduce(share(r, (me + i) % size, me), to + off, n);
        if (n)
            hd_scale_after(r->c, r->j, to + off, n);
        hd_node_next(r);
    }
    return HD_OK;
}

static int all_to_all(run *r, const hd_seg *in, const hd_seg *out)
{
    const int size = r->c->size, me = r->c->rank;
    const int64_t most = in[0].n;
    int code;

    for (int64_t at = 0; at < most; at += r->step) {
        const int64_t n = part(r, most, at), off = at * r->item;
        for (int i = 1; i < size; i++)
            copy(r, share(r, me, (me + i) % size), in[(me + i) % size].ptr + off, n);
        hd_node_give(r);
        copy(r, out[me].ptr + off, in[me].ptr + off, n);
        if ((code = hd_node_wait(r)))
            return code;
        for (int i = 1; i < size; i++)
            copy(r, out[(me + i) % size].ptr + off, share(r, (me + i) % size, me), n);
        hd_node_next(r);
    }
    return HD_OK;
}

/* ---- one block of a rank for all ---- */

/* An input that lies across an output would be overwritten before it is read. */
static hd_seg safe(const run *r, hd_seg in, const hd_seg *out)
{
    const hd_seg own = out[r->c->rank];
    for (int q = 0; q < r->c->size; q++)
        if (in.ptr != own.ptr && in.n && in.ptr < out[q].ptr + out[q].n * r->item &&
            out[q].ptr < in.ptr + in.n * r->item) {
            memmove(own.ptr, in.ptr, (size_t)(in.n * r->item));
            return own;
        }
    return in;
}

static int all_gather(run *r, hd_seg in, const hd_seg *out)
{
    const int size = r->c->size, me = r->c->rank;
    const int64_t most = longest(out, size);
    int code;

    for (int64_t at = 0; at < most; at += r->step) {
        const int64_t n = part(r, in.n, at), off = at * r->item;
        copy(r, hd_node_slot(r, me), in.ptr + off, n);
        hd_node_give(r);
        copy(r, out[me].ptr + off, in.ptr + off, n);
        if ((code = hd_node_wait(r)))
            return code;
        for (int i = 1; i < size; i++) {
            const int q = (me + i) % size;
            copy(r, out[q].ptr + off, hd_node_slot(r, q), part(r, out[q].n, at));
        }
        hd_node_next(r);
    }
    return HD_OK;
}

static int broadcast(run *r, hd_seg one, int root)
{
    int code;
    for (int64_t at = 0; at < one.n; at += r->step) {
        const int64_t n = part(r, one.n, at);
        if (r->c->rank == root)
            copy(r, hd_node_slot(r, root), one.ptr + at * r->item, n);
        hd_node_give(r);
        if ((code = hd_node_wait(r)))
            return code;
        if (r->c->rank != root)
            copy(r, one.ptr + at * r->item, hd_node_slot(r, root), n);
        hd_node_next(r);
    }
    return HD_OK;
}

/* ---- the operations ---- */

/* Equal blocks of one tensor. */
static void divide(const run *r, char *at, int64_t n, hd_seg *out)
{
    for (int q = 0; q < r->c->size; q++)
        out[q] = (hd_seg){.ptr = at + q * n * r->item, .n = n};
}

static int reduced(run *r, char *to)
{
    hd_job *j = r->j;
    hd_seg blocks[RANKS];
    if (j->listed)
        return reduce_scatter(r, j->in, to);
    divide(r, j->in[0].ptr, j->out[0].n, blocks);
    return reduce_scatter(r, blocks, to);
}

static int gathered(run *r)
{
    const int size = r->c->size, me = r->c->rank;
    hd_job *j = r->j;
    hd_seg blocks[RANKS];
    int code = HD_OK;

    if (!j->listed) {
        divide(r, j->out[0].ptr, j->in[0].n, blocks);
        return all_gather(r, safe(r, j->in[0], blocks), blocks);
    }
    /* Several inputs, all of them first: one may lie in an output of another. */
    for (int i = 0; i < j->nin && j->nin > 1; i++) {
        const hd_seg own = j->out[(int64_t)i * size + me];
        if (own.n && own.ptr != j->in[i].ptr)
            memmove(own.ptr, j->in[i].ptr, (size_t)(own.n * r->item));
        j->in[i] = own;
    }
    for (int i = 0; i < j->nin && !code; i++) {
        const hd_seg *out = j->out + (int64_t)i * size;
        code = all_gather(r, safe(r, j->in[i], out), out);
    }
    return code;
}

/* What the ranks agree on decides: the sum of all blocks, or -1 if it cannot go this way. Sizes
 * that differ between ranks, which no rank knows all of, do not; nor do lists that may, unchecked.
 */
static int64_t elements(const hd_comm *c, const hd_job *j)
{
    const hd_seg *list = j->out;
    int64_t sum = 0;
    int n = j->nout;

    if (j->kind == HD_REDUCE_SCATTER) {
        if (!hd_reduce_kernel(j->redop, j->dtype))
            return -1;
        list = j->in;
        n = j->nin;
    } else if (j->kind == HD_ALL_TO_ALL) {
        if (j->uneven || (j->listed && !c->check))
            return -1;
    } else if (j->kind != HD_ALL_GATHER && j->kind != HD_BROADCAST) {
        return -1;
    }
    for (int i = 0; i < n; i++)
        sum += list[i].n;
    return sum;
}

static int64_t least(const hd_comm *c)
{
    return hd_session_spin(c->session, 0) ? hd_node_least(c) : TURNS;
}

int hd_slots_takes(hd_comm *c, hd_job *j)
{
    int64_t n;
    if (!c->page || c->on_device || c->size < 2 || c->size > RANKS || (n = elements(c, j)) < 0 ||
        n * (int64_t)hd_itemsize(j->dtype) < least(c))
        return 0;
    return hd_node_ready(c, j);
}

int hd_slots(hd_comm *c, hd_job *j)
{
    int code;
    run r;

    begin(&r, c, j, j->kind == HD_REDUCE_SCATTER || j->kind == HD_ALL_TO_ALL ? c->size - 1 : 1);
    switch (j->kind) {
    case HD_REDUCE_SCATTER: code = reduced(&r, j->apart ? j->apart : j->out[0].ptr); break;
    case HD_ALL_GATHER: code = gathered(&r); break;
    case HD_ALL_TO_ALL: code = all_to_all(&r, j->in, j->out); break;
    default: code = broadcast(&r, j->out[0], j->root); break;
    }
    if (code || (code = hd_node_part(&r)))
        return code;
    if (j->apart)
        copy(&r, j->out[0].ptr, j->apart, j->out[0].n);
    return HD_OK;
}
