/* all_reduce, and reduce, of a long tensor of a group on one node, through the slots of hd_node.c.
 *
 * A piece of the tensor has a slice for each rank. For each piece a rank
 *   1. copies into its slot what the others are to reduce, and then announces `in`;
 *   2. when the others have, combines its own slice with theirs, puts the result into its slot, in
 *      the place that step 1 left out, and then announces `out`;
 *   3. when the others have, copies their slices out. In a reduce only the root does.
 * Each slice is combined by one rank, in the order of the ranks, so all ranks get the same bits,
 * and those depend on nothing else. No rank touches another's tensor, and a piece stays in the
 * caches until it is done. */
#include <string.h>

#include "hd_comm.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_node.h"
#include "hd_node_reduce.h"
#include "hd_scale.h"
#include "hd_stream.h"
#include "hd_types.h"

#define CHUNK (16 << 10) /* bytes of a slice that are combined in the first caches */

/* This rank's own slice, whose tensor stays as it is. Scaled, it goes into the half of the slot
 * that nobody reads any more when all have announced `in`. */
static const char *untouched(const hd_node_run *r, const char *from, int64_t at, int64_t n)
{
    char *to = hd_node_other_half(r) + at;
    double factor;
    if (!hd_scales_first(r->c, r->j, &factor))
        return from + at;
    hd_scale_before(r->c, r->j, to, from + at, n);
    return to;
}

/* Combines n elements that begin `at` bytes into the slots with this rank's own, and leaves them in
 * its slot and in `to`, where either is read. A `to` that is written past the caches is written
 * once. */
static void combine(const hd_node_run *r, const char *from, char *to, int64_t at, int64_t n)
{
    const int size = r->c->size, me = r->c->rank;
    const size_t bytes = (size_t)(n * r->item);
    const char *own = untouched(r, from, at, n);
    char *slot = hd_node_slot(r, me) + at, *there = to && !r->streams ? to + at : slot;
    /* In place, a rank above 1 would overwrite its own elements before it reads them. */
    char *sum = there == own && me > 1 ? slot : there;
    const char *so_far = me ? hd_node_slot(r, 0) + at : own;

    for (int q = 1; q < size; q++, so_far = sum)
        r->reduce(q == me ? own : hd_node_slot(r, q) + at, so_far, sum, n);
    if (so_far != sum)
        memcpy(sum, so_far, bytes);
    hd_scale_after(r->c, r->j, sum, n);
    if (to && sum == slot)
        hd_node_put(r, to + at, slot, n);
    else if (sum != slot && r->j->kind != HD_REDUCE)
        memcpy(slot, sum, bytes);
}

static int piece(hd_node_run *r, const char *from, char *to, int64_t n)
{
    const int size = r->c->size, me = r->c->rank;
    const int64_t item = r->item, a = hd_node_slice(r, n, me), b = hd_node_slice(r, n, me + 1);
    char *own = hd_node_slot(r, me);
    int code;

    hd_scale_before(r->c, r->j, own, from, a);
    hd_scale_before(r->c, r->j, own + b * item, from + b * item, n - b);
    hd_node_give(r);
    if ((code = hd_node_wait(r)))
        return code;
    for (int64_t i = a; i < b; i += CHUNK / item)
        combine(r, from, to, i * item, b - i < CHUNK / item ? b - i : CHUNK / item);
    if ((code = hd_node_part(r)))
        return code;
    for (int i = 1; i < size && to; i++) {
        const int q = (me + i) % size;
        const int64_t at = hd_node_slice(r, n, q), end = hd_node_slice(r, n, q + 1);
        hd_node_put(r, to + at * item, hd_node_slot(r, q) + at * item, end - at);
    }
    hd_node_next(r);
    return HD_OK;
}

int hd_node_takes(hd_comm *c, hd_job *j)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype), least = hd_node_least(c);
    int any = 0;
    if (!c->page || c->on_device || !hd_reduce_kernel(j->redop, j->dtype))
        return 0;
    for (int i = 0; i < j->nout; i++)
        any |= j->out[i].n * item >= least;
    return any ? hd_node_ready(c, j) : 0;
}

int hd_node_reduce(hd_comm *c, hd_job *j, const char *from, char *to, int64_t n)
{
    hd_node_run r;
    hd_node_begin(&r, c, j);
    r.streams = to && to != from && hd_streams(n * r.item);
    for (int64_t at = 0; at < n; at += r.step) {
        const int64_t bytes = at * r.item, left = n - at < r.step ? n - at : r.step;
        const int code = piece(&r, from + bytes, to ? to + bytes : NULL, left);
        if (code)
            return code;
    }
    return HD_OK;
}
