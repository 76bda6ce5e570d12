/* all_reduce, reduce_scatter_tensor and all_gather_into_tensor of tensors that lie in blocks
 * (hd_block.c): the ranks read each other's tensors where they lie, with no copy in or out.
 *
 * The meetings are those of hd_node.c. Between `in` and `out` of one piece, which here is a whole
 * tensor, a rank
 *   - all_reduce: reduces its slices, and writes the results into all ranks' tensors. The slices,
 *     and the order in which the ranks' numbers are combined, are those of hd_node_reduce.c, so
 *     both give the same bits;
 *   - reduce_scatter: reduces its block of the others' inputs;
 *   - all_gather: copies the others' inputs.
 * After `out` no rank reads or writes another's tensor any more.
 *
 * A rank that gives up returns earlier, and another may still write into its tensor. So it detaches
 * its part of the block first: its tensor keeps its address and gets memory of its own. */
#include <string.h>

#include "hd_block.h"
#include "hd_comm.h"
#include "hd_direct.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_node.h"
#include "hd_order.h"
#include "hd_scale.h"
#include "hd_types.h"

#define LEAST (4 << 10)  /* bytes: shorter tensors are not worth the meetings */
#define CHUNK (64 << 10) /* bytes: read from all ranks while they are in the first caches */
#define RANKS 64

typedef struct peers {
    char *at[RANKS];
} peers;

static int64_t item_of(const hd_job *j) { return (int64_t)hd_itemsize(j->dtype); }

static int64_t bytes_of(const hd_job *j, const hd_seg *s) { return s->n * item_of(j); }

/* Whether the input lies in the output, but not in its own place there: it would be overwritten
 * while other ranks read it. */
static int in_the_way(const hd_comm *c, const hd_job *j)
{
    const hd_seg in = j->in[0], out = j->out[0];
    const char *own = out.ptr + c->rank * bytes_of(j, &in);
    return in.ptr != own && in.ptr < out.ptr + bytes_of(j, &out) &&
           out.ptr < in.ptr + bytes_of(j, &in);
}

int hd_direct_finds(const hd_comm *c, const hd_job *j)
{
    hd_spot place;
    if (!c->blocks || !c->check || c->on_device || c->size < 2 || c->size > RANKS)
        return 0;
    if (j->kind == HD_ALL_REDUCE) {
        if (j->nin) /* it would be read where it lies, which may be in no block */
            return 0;
        for (int i = 0; i < j->nout; i++)
            if (j->out[i].n && !hd_block_find(c, j->out[i].ptr, bytes_of(j, &j->out[i]), &place))
                return 0;
        return 1;
    }
    if ((j->kind != HD_REDUCE_SCATTER && j->kind != HD_ALL_GATHER) || j->listed)
        return 0;
    if (hd_ordered(c, j)) /* each rank begins with its own block */
        return 0;
    return hd_block_find(c, j->in[0].ptr, bytes_of(j, &j->in[0]), &place) &&
           !(j->kind == HD_ALL_GATHER && in_the_way(c, j));
}

/* Tells the others where this rank's tensor lies, and finds theirs. */
static int meet(hd_node_run *r, const hd_seg *mine, peers *p)
{
    hd_spot place = {0};
    int code;
    hd_block_find(r->c, mine->ptr, bytes_of(r->j, mine), &place);
    if ((code = hd_node_meet(r, place)))
        return code;
    for (int q = 0; q < r->c->size; q++) {
        p->at[q] = hd_block_at(r->c, q, hd_node_place(r, q));
        if (!p->at[q]) {
            hd_fail(r->j, HD_ERR_BACKEND, "rank %d's tensor is in no block of this rank", q);
            return HD_ERR_BACKEND;
        }
    }
    return HD_OK;
}

/* Combines n elements that begin `at` bytes into the tensors, as the rank that owns them. */
static void combine(const hd_node_run *r, const peers *p, int64_t at, char *to, int64_t n)
{
    const int size = r->c->size, me = r->c->rank;
    const char *sum = p->at[me] + at;
    for (int i = 1; i < size; i++, sum = to)
        r->reduce(p->at[(me + i) % size] + at, sum, to, n);
    if (sum != to)
        memcpy(to, sum, (size_t)(n * r->item));
    hd_scale_after(r->c, r->j, to, n);
}

static int all_reduce(hd_comm *c, hd_job *j, const hd_seg *out)
{
    const int size = c->size, me = c->rank;
    hd_node_run r;
    peers p;
    int code;

    hd_node_begin(&r, c, j);
    hd_scale_before(c, j, out->ptr, out->ptr, out->n);
    if ((code = meet(&r, out, &p)))
        return code;
    for (int64_t from = 0; from < out->n; from += r.step) {
        const int64_t n = out->n - from < r.step ? out->n - from : r.step;
        const int64_t a = hd_node_slice(&r, n, me), b = hd_node_slice(&r, n, me + 1);
        for (int64_t i = a; i < b; i += CHUNK / r.item) {
            const int64_t m = b - i < CHUNK / r.item ? b - i : CHUNK / r.item;
            const int64_t at = (from + i) * r.item;
            char *to = p.at[0] + at; /* in the order of the ranks, as in hd_node_reduce.c */
            for (int q = 1; q < size; q++)
                r.reduce(p.at[q] + at, to, to, m);
            hd_scale_after(c, j, to, m);
            for (int q = 1; q < size; q++)
                memcpy(p.at[q] + at, to, (size_t)(m * r.item));
        }
    }
    return hd_node_part(&r);
}

static int all_reduce_all(hd_comm *c, hd_job *j)
{
    int code = HD_OK;
    for (int i = 0; i < j->nout && code == HD_OK; i++)
        if (j->out[i].n)
            code = all_reduce(c, j, &j->out[i]);
    return code;
}

static int reduce_scatter(hd_comm *c, hd_job *j)
{
    const hd_seg *out = &j->out[0];
    const int64_t bytes = bytes_of(j, out);
    char *to = j->scratch ? j->scratch : out->ptr;
    hd_node_run r;
    peers p;
    int code;

    hd_node_begin(&r, c, j);
    if ((code = meet(&r, &j->in[0], &p)))
        return code;
    for (int64_t i = 0; i < bytes; i += CHUNK) {
        const int64_t m = bytes - i < CHUNK ? bytes - i : CHUNK, at = c->rank * bytes + i;
        combine(&r, &p, at, to + i, m / r.item);
    }
    if ((code = hd_node_part(&r)))
        return code;
    if (j->scratch)
        memcpy(out->ptr, to, (size_t)bytes);
    return HD_OK;
}

static int all_gather(hd_comm *c, hd_job *j)
{
    const int64_t bytes = bytes_of(j, &j->in[0]);
    hd_node_run r;
    peers p;
    int code;

    hd_node_begin(&r, c, j);
    if ((code = meet(&r, &j->in[0], &p)))
        return code;
    for (int i = 0; i < c->size; i++) {
        const int q = (c->rank + i) % c->size;
        char *to = j->out[0].ptr + q * bytes;
        if (to != p.at[q])
            memcpy(to, p.at[q], (size_t)bytes);
    }
    return hd_node_part(&r);
}

static void detach(hd_comm *c, hd_job *j)
{
    hd_spot place;
    for (int i = 0; i < j->nout; i++)
        if (hd_block_find(c, j->out[i].ptr, bytes_of(j, &j->out[i]), &place))
            hd_block_detach(c, place);
}

static int reduces(const hd_job *j) { return j->kind != HD_ALL_GATHER; }

int hd_direct_takes(hd_comm *c, hd_job *j)
{
    int64_t most = 0;
    double factor;
    int ready;

    for (int i = 0; i < j->nout; i++)
        most = j->out[i].n > most ? j->out[i].n : most;
    if (most * item_of(j) < LEAST || (reduces(j) && !hd_reduce_kernel(j->redop, j->dtype)) ||
        (j->kind == HD_REDUCE_SCATTER && hd_scales_first(c, j, &factor)))
        return 0; /* as on all ranks */
    ready = hd_node_ready(c, j);
    if (ready < 0 && j->kind == HD_ALL_REDUCE)
        detach(c, j);
    return ready;
}

int hd_direct(hd_comm *c, hd_job *j)
{
    int code;
    if (j->kind == HD_ALL_GATHER)
        return all_gather(c, j);
    if (j->kind == HD_REDUCE_SCATTER)
        return reduce_scatter(c, j);
    code = all_reduce_all(c, j);
    if (code)
        detach(c, j);
    return code;
}
