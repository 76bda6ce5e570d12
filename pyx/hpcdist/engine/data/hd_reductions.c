/* Reductions. Long ones go in pieces of a few MiB: MPI's temporaries then stay below the
 * allocator's mmap limit and in cache, which makes 64 MiB twice as fast as one call, and the 2^31
 * limit on elements no longer applies. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_levels.h"
#include "hd_levels_reductions.h"
#include "hd_mpi_ops.h"
#include "hd_node_reduce.h"
#include "hd_order.h"
#include "hd_ordered.h"
#include "hd_reductions.h"
#include "hd_ring.h"
#include "hd_scale.h"
#include "hd_types.h"

#define SCATTER_WHOLE (64ll << 20) /* bytes: longer reduce_scatters go block by block */

/* Shorter lists of a reduce_scatter are copied to one block, and so are tensors that a factor
 * changes before the sum: otherwise each rank's part is a call of its own. Open MPI's calls for two
 * and three ranks take no longer than that: docs/performance.md. */
#define PACKED (64 << 10) /* bytes, for all ranks together */
#ifdef HD_MAYBE_OPEN_MPI
#define PACKING_RANKS 4
#else
#define PACKING_RANKS 2
#endif

static int64_t piece(const hd_comm *c, const hd_job *j)
{
    int64_t n = c->chunk / (int64_t)hd_itemsize(j->dtype);
    return n < 1 ? 1 : n > MOVE_MAX ? MOVE_MAX : n;
}

/* What an all_reduce reads for its output i: that itself, or an input apart from it. */
static char *source(const hd_job *j, int i) { return j->nin ? j->in[i].ptr : j->out[i].ptr; }

/* Through memory that the ranks of a node share. 0: not at all; -1: the job has failed. */
static int through_nodes(hd_comm *c, hd_job *j)
{
    const int by_node = hd_node_takes(c, j);
    int takes = by_node, code = HD_OK;
    int64_t n = 0;

    for (int i = 0; i < j->nout; i++)
        n += j->out[i].n;
    if (!by_node)
        takes = hd_levels_takes(c, j, n, 0);
    /* All tensors: MPI would wait for ever for a rank that has given up the node's memory. */
    for (int i = 0; i < j->nout && takes > 0 && !code; i++)
        code = by_node ? hd_node_reduce(c, j, source(j, i), j->out[i].ptr, j->out[i].n)
                       : hd_levels_all_reduce(c, j, source(j, i), j->out[i]);
    return code ? -1 : takes;
}

int hd_all_reduce(hd_comm *c, hd_job *j)
{
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    const MPI_Op op = hd_mpi_op(j->redop, j->dtype);
    const int64_t item = (int64_t)hd_itemsize(j->dtype), step = piece(c, j);
    const int takes = through_nodes(c, j);

    if (takes)
        return takes < 0 ? j->code : HD_OK;
    if (hd_ordered(c, j)) {
        int code = HD_OK;
        for (int i = 0; i < j->nout && !code; i++)
            code = hd_ordered_all_reduce(c, j, source(j, i), j->out[i].ptr, j->out[i].n);
        return code;
    }
    if (j->polls && hd_ring_qualifies(c, j)) {
        for (int i = 0; i < j->nout; i++) {
            hd_scale_before(c, j, j->out[i].ptr, source(j, i), j->out[i].n);
            if (hd_ring_all_reduce(c, j, j->out[i].ptr, j->out[i].n))
                return j->code;
            hd_scale_after(c, j, j->out[i].ptr, j->out[i].n);
        }
        return HD_OK;
    }
    for (int i = 0; i < j->nout; i++) {
        for (int64_t at = 0; at < j->out[i].n; at += step) {
            char *from = source(j, i) + at * item, *p = j->out[i].ptr + at * item;
            const int64_t left = j->out[i].n - at, n = left < step ? left : step;
            hd_scale_before(c, j, p, from, n); /* MPI wants it in place on all ranks, or on none */
            if (c->size > 1)
                CALL(c, j, Allreduce, Iallreduce, MPI_IN_PLACE, p, (int)n, type, op, c->mpi);
            hd_scale_after(c, j, p, n); /* while the piece is in cache */
        }
    }
    return HD_OK;
}

/* One block to one root, piece by piece. At the root, out may equal in. */
static int reduce_block(hd_comm *c, hd_job *j, int root, char *in, char *out, int64_t count)
{
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    const MPI_Op op = hd_mpi_op(j->redop, j->dtype);
    const int64_t item = (int64_t)hd_itemsize(j->dtype), step = piece(c, j);
    double factor = 1;
    const int first = hd_scales_first(c, j, &factor), mine = c->rank == root;

    for (int64_t at = 0; at < count; at += step) {
        const int64_t n = count - at < step ? count - at : step;
        char *from = in + at * item, *to = mine ? out + at * item : NULL;
        const int out_of_place =
            mine && !first && c->on_device && to != from; /* MPI alone may touch them */
        if (mine && !out_of_place) { /* the rank's own part into the result, reduced in place */
            hd_scale_before(c, j, to, from, n);
        } else if (first) { /* the caller's input must not change */
            char *s = hd_stage(c, j, step < count ? step * item : count * item);
            if (!s)
                return j->code;
            hd_scale_before(c, j, s, from, n);
            from = s;
        }
        if (c->size > 1 || out_of_place)
            CALL(c, j, Reduce, Ireduce, mine && !out_of_place ? MPI_IN_PLACE : (void *)from, to,
                 (int)n, type, op, root, c->mpi);
        if (mine)
            hd_scale_after(c, j, to, n);
    }
    return HD_OK;
}

int hd_reduce(hd_comm *c, hd_job *j)
{
    char *to = c->rank == j->root ? j->out[0].ptr : NULL;
    const int by_node = c->size > 2 ? hd_node_takes(c, j) : 0; /* of two: see hd_slots.c */
    const int takes = by_node ? by_node : hd_levels_takes(c, j, j->in[0].n, 0);
    if (takes < 0)
        return j->code;
    if (takes)
        return by_node ? hd_node_reduce(c, j, j->in[0].ptr, to, j->in[0].n)
                       : hd_levels_reduce(c, j);
    if (hd_ordered(c, j))
        return hd_ordered_reduce(c, j);
    return reduce_block(c, j, j->root, j->in[0].ptr, j->out[0].ptr, j->in[0].n);
}

/* All blocks in one call. */
static int reduce_scatter_whole(hd_comm *c, hd_job *j, const char *in, char *to, int64_t n)
{
    CALL(c, j, Reduce_scatter_block, Ireduce_scatter_block, in, to, (int)n, hd_mpi_type(j->dtype),
         hd_mpi_op(j->redop, j->dtype), c->mpi);
    hd_scale_after(c, j, to, n);
    return HD_OK;
}

/* Whether all blocks go in one call. */
static int goes_whole(const hd_comm *c, const hd_job *j)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype), n = j->out[0].n;
    double factor;
    return !j->listed && c->size > 1 && !hd_scales_first(c, j, &factor) &&
           c->size * n * item <= SCATTER_WHOLE && c->size * n <= INT_MAX;
}

int hd_scratch_for(const hd_comm *c, hd_job *j)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype), bytes = j->out[0].n * item;
    const char *to = j->out[0].ptr,
               *own = j->listed ? j->in[c->rank].ptr : j->in[0].ptr + c->rank * bytes;
    int clash = 0;

    /* Block by block, the result may overwrite this rank's own block of the input, unless another
     * rank's block shares that memory. */
    for (int r = 0; r < j->nin; r++)
        clash |= j->in[r].ptr < to + bytes && to < j->in[r].ptr + j->in[r].n * item &&
                 (j->listed ? r != c->rank || own != to : own != to || goes_whole(c, j));
    if (!clash || !bytes)
        return HD_OK;
    j->scratch = malloc((size_t)bytes);
    return j->scratch ? HD_OK : HD_ERR_MEMORY;
}

static int reduce_scatter_by_block(hd_comm *c, hd_job *j, char *to)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype), n = j->out[0].n;
    for (int r = 0; r < c->size && !j->text; r++)
        reduce_block(c, j, r, j->listed ? j->in[r].ptr : j->in[0].ptr + r * n * item, to,
                     j->listed ? j->in[r].n : n);
    return j->text ? j->code : HD_OK;
}

/* The same on all ranks, which have agreed on the sizes. */
static int is_packed(const hd_comm *c, const hd_job *j)
{
    const int64_t n = j->out[0].n;
    return c->size >= PACKING_RANKS && !c->on_device && n > 0 &&
           n <= PACKED / (int64_t)hd_itemsize(j->dtype) / c->size && hd_all_equal(j->in, j->nin);
}

static int reduce_scatter_packed(hd_comm *c, hd_job *j, char *to, int64_t n)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    char *const in = hd_stage(c, j, c->size * n * item);
    char *at = in;

    if (!in)
        return j->code;
    hd_count(&c->packed);
    for (int i = 0; i < j->nin; i++) {
        hd_scale_before(c, j, at, j->in[i].ptr, j->in[i].n);
        at += j->in[i].n * item;
    }
    return reduce_scatter_whole(c, j, in, to, n);
}

int hd_reduce_scatter(hd_comm *c, hd_job *j)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    const hd_seg out = j->out[0];
    char *to = j->scratch ? j->scratch : out.ptr;
    const int takes = hd_all_equal(j->in, j->nin) ? hd_levels_takes(c, j, out.n * c->size, 1) : 0;
    int code;

    if (takes < 0)
        return j->code;
    if (out.n == 0 && !j->listed)
        return HD_OK;
    code = takes              ? hd_levels_reduce_scatter(c, j, to)
           : hd_ordered(c, j) ? hd_ordered_reduce_scatter(c, j, to)
           : goes_whole(c, j) ? reduce_scatter_whole(c, j, j->in[0].ptr, to, out.n)
           : is_packed(c, j)  ? reduce_scatter_packed(c, j, to, out.n)
                              : reduce_scatter_by_block(c, j, to);
    if (j->scratch && !code)
        memcpy(out.ptr, to, (size_t)(out.n * item));
    return code;
}

int64_t hd_reductions_stage(const hd_comm *c, const hd_job *j)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    int64_t most = 0;
    double factor;

    if (hd_ordered(c, j))
        return hd_ordered_stage(c, j);
    if (j->kind == HD_ALL_REDUCE)
        return hd_ring_qualifies(c, j) ? hd_ring_stage() : 0;
    if (j->kind != HD_REDUCE && j->kind != HD_REDUCE_SCATTER)
        return 0;
    if (j->kind == HD_REDUCE_SCATTER && is_packed(c, j) && !goes_whole(c, j))
        return c->size * j->out[0].n * item;
    if ((j->kind == HD_REDUCE && c->rank == j->root) || !hd_scales_first(c, j, &factor))
        return 0;
    for (int i = 0; i < j->nin; i++)
        most = j->in[i].n > most ? j->in[i].n : most;
    if (j->kind == HD_REDUCE_SCATTER && !j->listed)
        most /= c->size;
    return (most < piece(c, j) ? most : piece(c, j)) * item;
}
