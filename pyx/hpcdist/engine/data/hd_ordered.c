/* See hd_ordered.h.
 *
 * A tensor goes in pieces, of which each rank adds up one slice. For each piece a rank
 *   1. sends each rank that one's slice of what it has;
 *   2. adds up what it gets, in the order of the ranks;
 *   3. sends its sum to those that want it: to all, to the root, or in a reduce_scatter to nobody.
 * All ranks have all of a short tensor, and add it up themselves. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "hd_base.h"
#include "hd_data.h"
#include "hd_kernels.h"
#include "hd_ordered.h"
#include "hd_scale.h"

#define PIECE (2 << 20)  /* bytes that a rank sends at once, and gets */
#define SHORT (64 << 10) /* bytes that all ranks together have of a short tensor */
#define CHUNK (16 << 10) /* bytes of a slice that are added up in the first caches */

typedef struct run {
    hd_comm *c;
    hd_job *j;
    hd_reduce_fn reduce;
    int64_t item;
    char *given, *got; /* a place for each rank in both */
} run;

int hd_ordered_wanted(void)
{
    const char *text = getenv("HPCDIST_DETERMINISTIC"); /* config.py has refused other words */
    return text && strcasecmp(text, "layout") == 0;
}

/* ---- sizes ---- */

/* Elements of a slice, at most. */
static int64_t longest_slice(const hd_comm *c, int64_t item)
{
    const int64_t bytes = PIECE / c->size / HD_LINE * HD_LINE;
    return (bytes ? bytes : HD_LINE) / item;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Of a tensor that all ranks have whole. */
static int64_t slice_of(const hd_comm *c, int64_t item, int64_t n)
{
    return least((n + c->size - 1) / c->size, longest_slice(c, item));
}

static int is_short(const hd_comm *c, int64_t item, int64_t n)
{
    return n <= SHORT / item / c->size;
}

static const hd_seg *block(const hd_comm *c, const hd_job *j, int rank, hd_seg *of)
{
    if (j->listed)
        return &j->in[rank];
    (void)c;
    *of = (hd_seg){.ptr = j->in[0].ptr + rank * j->out[0].n * (int64_t)hd_itemsize(j->dtype),
                   .n = j->out[0].n};
    return of;
}

static int64_t longest_block(const hd_comm *c, const hd_job *j)
{
    int64_t most = 0;
    for (int q = 0; q < c->size; q++) {
        hd_seg of;
        const int64_t n = block(c, j, q, &of)->n;
        most = n > most ? n : most;
    }
    return most;
}

/* Elements of one of the places that a job needs. */
static int64_t place_of(const hd_comm *c, const hd_job *j)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    const hd_seg *all = j->kind == HD_ALL_REDUCE ? j->out : j->in;
    const int count = j->kind == HD_ALL_REDUCE ? j->nout : 1;
    int64_t most = 0;
    if (j->kind == HD_REDUCE_SCATTER)
        return least(longest_block(c, j), longest_slice(c, item));
    for (int i = 0; i < count; i++) {
        const int64_t n = is_short(c, item, all[i].n) ? all[i].n : slice_of(c, item, all[i].n);
        most = n > most ? n : most;
    }
    return most;
}

int64_t hd_ordered_stage(const hd_comm *c, const hd_job *j)
{
    return 2 * c->size * place_of(c, j) * (int64_t)hd_itemsize(j->dtype);
}

/* ---- steps ---- */

static int begin(run *r, hd_comm *c, hd_job *j)
{
    const int64_t bytes = hd_ordered_stage(c, j);
    *r = (run){.c = c, .j = j, .item = (int64_t)hd_itemsize(j->dtype)};
    r->reduce = hd_reduce_kernel(j->redop, j->dtype);
    if (!(r->given = hd_stage(c, j, bytes ? bytes : HD_LINE)))
        return j->code;
    r->got = r->given + bytes / 2;
    return HD_OK;
}

/* What this rank has for place `at`, of which each has `each` elements. */
static void give(const run *r, int at, int64_t each, const char *from, int64_t n)
{
    if (n > 0)
        hd_scale_before(r->c, r->j, r->given + at * each * r->item, from, n);
}

/* Adds up n elements of all places, in the order of the ranks. */
static void add(const run *r, int64_t each, char *to, int64_t n)
{
    const int64_t step = CHUNK / r->item;
    for (int64_t at = 0; at < n; at += step) {
        const int64_t m = least(n - at, step);
        char *sum = to + at * r->item;
        memmove(sum, r->got + at * r->item, (size_t)(m * r->item));
        for (int q = 1; q < r->c->size; q++)
            r->reduce(r->got + (q * each + at) * r->item, sum, sum, m);
        hd_scale_after(r->c, r->j, sum, m);
    }
}

static int swap(const run *r, int64_t each)
{
    const int bytes = (int)(each * r->item);
    CALL(r->c, r->j, Alltoall, Ialltoall, r->given, bytes, MPI_BYTE, r->got, bytes, MPI_BYTE,
         r->c->mpi);
    return HD_OK;
}

static int collect(const run *r, int64_t each, const char *from, char *to)
{
    const int bytes = (int)(each * r->item);
    if (r->j->kind == HD_REDUCE)
        CALL(r->c, r->j, Gather, Igather, from, bytes, MPI_BYTE, to, bytes, MPI_BYTE, r->j->root,
             r->c->mpi);
    else
        CALL(r->c, r->j, Allgather, Iallgather, from, bytes, MPI_BYTE, to, bytes, MPI_BYTE,
             r->c->mpi);
    return HD_OK;
}

/* ---- the operations ---- */

/* to: NULL on a rank that wants no sum. */
static int short_tensor(const run *r, const char *from, char *to, int64_t n)
{
    give(r, 0, n, from, n);
    if (collect(r, n, r->given, r->got))
        return r->j->code;
    if (to)
        add(r, n, to, n);
    return HD_OK;
}

static int piece(const run *r, const char *from, char *to, int64_t n)
{
    const int64_t each = (n + r->c->size - 1) / r->c->size;
    for (int q = 0; q < r->c->size; q++)
        give(r, q, each, from + q * each * r->item, least(n - q * each, each));
    if (swap(r, each))
        return r->j->code;
    add(r, each, r->got, least(n - r->c->rank * each, each));
    if (collect(r, each, r->got, r->given))
        return r->j->code;
    if (to)
        memcpy(to, r->given, (size_t)(n * r->item));
    return HD_OK;
}

static int whole(const run *r, const char *from, char *to, int64_t n)
{
    const int64_t step = slice_of(r->c, r->item, n) * r->c->size;
    int code = HD_OK;
    if (n && is_short(r->c, r->item, n))
        return short_tensor(r, from, to, n);
    for (int64_t at = 0; at < n && !code; at += step)
        code = piece(r, from + at * r->item, to ? to + at * r->item : NULL, least(n - at, step));
    return code;
}

int hd_ordered_all_reduce(hd_comm *c, hd_job *j, const char *from, char *to, int64_t n)
{
    run r;
    return begin(&r, c, j) ? j->code : whole(&r, from, to, n);
}

int hd_ordered_reduce(hd_comm *c, hd_job *j)
{
    char *to = c->rank == j->root ? j->out[0].ptr : NULL;
    run r;
    return begin(&r, c, j) ? j->code : whole(&r, j->in[0].ptr, to, j->in[0].n);
}

int hd_ordered_reduce_scatter(hd_comm *c, hd_job *j, char *to)
{
    const int64_t most = longest_block(c, j);
    run r;
    if (begin(&r, c, j))
        return j->code;
    for (int64_t at = 0, step = longest_slice(c, r.item); at < most; at += step) {
        const int64_t each = least(most - at, step);
        for (int q = 0; q < c->size; q++) {
            hd_seg of;
            const hd_seg *b = block(c, j, q, &of);
            give(&r, q, each, b->ptr + at * r.item, least(b->n - at, each));
        }
        if (swap(&r, each))
            return j->code;
        add(&r, each, to + at * r.item, least(j->out[0].n - at, each));
    }
    return HD_OK;
}
