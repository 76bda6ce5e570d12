/* Reductions over two levels: see hd_levels.c.
 *
 * all_reduce and reduce: the ranks of a node combine a tensor, a slice each. For each slice one
 * rank of every node has its node's sum then, and these, a rail, combine theirs over the network.
 * At last the ranks of a node, or the root, read the slices.
 *
 * reduce_scatter: a rank combines what its node has for all ranks of its rail. These exchange their
 * sums, and each adds up those that it gets. A rank whose place is beyond the rails reads its
 * result from the slot of one that carries it. (Open MPI's MPI_Ireduce_scatter_block reduces
 * everything to one rank, which scatters it.)
 *
 * For each piece a rank
 *   1. copies into its slot what the others of its node are to reduce, and announces `in`;
 *   2. when the others have, adds their slots to its own part, and begins the call on its rail;
 *   3. later, unless each rank has its result by then, puts it into its slot, and announces `out`;
 *   4. when the others have, copies their results out.
 *
 * Each slice is combined by one rank of a node, in the same order each time, so all ranks get the
 * same bits, as far as the library's calls give them. */
#include <string.h>

#include "hd_comm.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_levels.h"
#include "hd_levels_reductions.h"
#include "hd_mpi_ops.h"
#include "hd_scale.h"
#include "hd_threads.h"
#include "hd_types.h"

/* A slice of a piece, in elements. */
typedef struct slice {
    int64_t n, a, b;
} slice;

static slice slice_of(const hd_levels_run *r, int64_t k, int place)
{
    const int64_t n = hd_levels_length(r, k);
    return (slice){n, hd_levels_slice(r, n, place), hd_levels_slice(r, n, place + 1)};
}

/* When the others have announced `in`, adds n elements that lie there in their slots. */
static int add(hd_levels_run *r, int64_t k, int64_t at, char *to, int64_t n)
{
    const struct hd_levels *l = r->l;
    const hd_reduce_fn reduce = hd_reduce_kernel(r->j->redop, r->j->dtype);
    const int code = hd_levels_wait_all(r, HD_LEVELS_IN, k);
    for (int i = 1; i < l->ranks && !code; i++)
        reduce(hd_levels_slot(r, (l->place + i) % l->ranks, k) + at * r->item, to, to, n);
    return code;
}

/* Steps 1 and 2 with slices, up to the call; the sum goes to `sum`. */
static int combine(hd_levels_run *r, int64_t k, slice s, char *sum)
{
    const int64_t item = r->item;
    const char *from = r->in + k * r->step * item;
    char *own = hd_levels_slot(r, r->l->place, k);

    hd_scale_before(r->c, r->j, own, from, s.a);
    hd_scale_before(r->c, r->j, own + s.b * item, from + s.b * item, s.n - s.b);
    hd_levels_announce(r, HD_LEVELS_IN, k);
    hd_scale_before(r->c, r->j, sum, from + s.a * item, s.b - s.a);
    return add(r, k, s.a, sum, s.b - s.a);
}

/* Step 4 of a piece, into `to`. */
static int collect(hd_levels_run *r, int64_t k, char *to)
{
    const int ranks = r->l->ranks, place = r->l->place;
    const int code = hd_levels_wait_all(r, HD_LEVELS_OUT, k);
    for (int i = 0; i < ranks && to && !code; i++) {
        const int q = (place + i) % ranks;
        const slice s = slice_of(r, k, q);
        const int64_t at = s.a * r->item;
        memcpy(to + at, hd_levels_slot(r, q, k) + at, (size_t)((s.b - s.a) * r->item));
    }
    return code;
}

/* ---- all_reduce: the sums are made in the output, which may be the input ---- */

static int begin_all_reduce(hd_levels_run *r, int64_t k, MPI_Request *rail)
{
    const slice s = slice_of(r, k, r->l->place);
    char *sum = r->out + (k * r->step + s.a) * r->item;
    int rc = MPI_SUCCESS;

    if (combine(r, k, s, sum))
        return r->j->code;
    if (s.b > s.a) {
        hd_mpi_lock(r->c->session);
        rc = MPI_Iallreduce(MPI_IN_PLACE, sum, (int)(s.b - s.a), hd_mpi_type(r->j->dtype),
                            hd_mpi_op(r->j->redop, r->j->dtype), r->l->rail, rail);
        hd_mpi_unlock(r->c->session);
    }
    return hd_mpi_failed(r->j, rc, "MPI_Iallreduce");
}

static int end_all_reduce(hd_levels_run *r, int64_t k)
{
    const slice s = slice_of(r, k, r->l->place);
    char *to = r->out + k * r->step * r->item, *sum = to + s.a * r->item;

    hd_scale_after(r->c, r->j, sum, s.b - s.a);
    memcpy(hd_levels_slot(r, r->l->place, k) + s.a * r->item, sum, (size_t)((s.b - s.a) * r->item));
    hd_levels_announce(r, HD_LEVELS_OUT, k);
    return collect(r, k, to);
}

int hd_levels_all_reduce(hd_comm *c, hd_job *j, char *from, hd_seg to)
{
    hd_levels_run r = {.begin = begin_all_reduce, .end = end_all_reduce, .in = from, .out = to.ptr};
    return hd_levels_go(&r, c, j, to.n, 1);
}

/* ---- reduce: the sums are made in the slots, because the input must not change ---- */

static int at_root(const hd_levels_run *r)
{
    const hd_levels_seat *seats = r->l->seats;
    return seats[r->c->rank].node == seats[r->j->root].node;
}

static int begin_reduce(hd_levels_run *r, int64_t k, MPI_Request *rail)
{
    const slice s = slice_of(r, k, r->l->place);
    char *sum = hd_levels_slot(r, r->l->place, k) + s.a * r->item;
    const int takes = at_root(r);
    int rc = MPI_SUCCESS;

    if (combine(r, k, s, sum))
        return r->j->code;
    if (s.b > s.a) {
        hd_mpi_lock(r->c->session);
        rc = MPI_Ireduce(takes ? MPI_IN_PLACE : sum, takes ? sum : NULL, (int)(s.b - s.a),
                         hd_mpi_type(r->j->dtype), hd_mpi_op(r->j->redop, r->j->dtype),
                         r->l->seats[r->j->root].node, r->l->rail, rail);
        hd_mpi_unlock(r->c->session);
    }
    return hd_mpi_failed(r->j, rc, "MPI_Ireduce");
}

static int end_reduce(hd_levels_run *r, int64_t k)
{
    const slice s = slice_of(r, k, r->l->place);
    if (at_root(r))
        hd_scale_after(r->c, r->j, hd_levels_slot(r, r->l->place, k) + s.a * r->item, s.b - s.a);
    hd_levels_announce(r, HD_LEVELS_OUT, k);
    return collect(r, k, r->c->rank == r->j->root ? r->out + k * r->step * r->item : NULL);
}

int hd_levels_reduce(hd_comm *c, hd_job *j)
{
    hd_levels_run r = {.begin = begin_reduce,
                       .end = end_reduce,
                       .in = j->in[0].ptr,
                       .out = j->out[0].ptr};
    return hd_levels_go(&r, c, j, j->in[0].n, 1);
}

/* ---- reduce_scatter: a slot has all blocks, and behind them what the rail brings ---- */

/* Copies the blocks for the rail of this rank into its slot, or all others. */
static void give_blocks(const hd_levels_run *r, int64_t k, int mine)
{
    const struct hd_levels *l = r->l;
    const int64_t n = hd_levels_length(r, k);
    char *own = hd_levels_slot(r, l->place, k);

    for (int q = 0; q < r->c->size; q++) {
        const char *block = r->list ? r->list[q].ptr : r->in + q * r->n * r->item;
        if ((hd_levels_rail(l, q) == l->place) == mine)
            hd_scale_before(r->c, r->j, own + l->at[q] * n * r->item, block + k * r->step * r->item,
                            n);
    }
}

/* Where the nodes' sums of the blocks arrive that a rank carries for its node. */
static char *received(const hd_levels_run *r, int place, int64_t k)
{
    return hd_levels_slot(r, place, k) + r->c->size * hd_levels_length(r, k) * r->item;
}

/* The blocks that this rank carries for its node, its own first. */
static int own_blocks(const hd_levels_run *r)
{
    return hd_levels_blocks(r->l, r->l->place, r->l->seats[r->c->rank].node);
}

/* The call on the rail. */
static int swap(const hd_levels_run *r, int64_t k, const char *sum, MPI_Request *rail)
{
    const struct hd_levels *l = r->l;
    const MPI_Datatype type = hd_mpi_type(r->j->dtype);
    const int n = (int)hd_levels_length(r, k), m = own_blocks(r);
    int *gives = hd_levels_lists(l, k), *from = gives + l->nodes, *takes = from + l->nodes,
        *to = takes + l->nodes;
    char *into = received(r, l->place, k);

    if (l->even)
        return MPI_Ialltoall(sum, n, type, into, n, type, l->rail, rail);
    for (int i = 0; i < l->nodes; i++) {
        gives[i] = hd_levels_blocks(l, l->place, i) * n;
        from[i] = hd_levels_begins(l, l->place, i) * n;
        takes[i] = m * n;
        to[i] = i * m * n;
    }
    return MPI_Ialltoallv(sum, gives, from, type, into, takes, to, type, l->rail, rail);
}

static int begin_reduce_scatter(hd_levels_run *r, int64_t k, MPI_Request *rail)
{
    const struct hd_levels *l = r->l;
    const int64_t n = hd_levels_length(r, k);
    int64_t at;
    char *sum;
    int rc;

    give_blocks(r, k, 0);
    hd_levels_announce(r, HD_LEVELS_IN, k);
    if (l->place >= l->rails)
        return HD_OK;
    at = l->start[l->place * l->nodes] * n;
    sum = hd_levels_slot(r, l->place, k) + at * r->item;
    give_blocks(r, k, 1);
    if (add(r, k, at, sum, l->start[(l->place + 1) * l->nodes] * n - at))
        return r->j->code;
    if (l->even)
        hd_levels_announce(r, HD_LEVELS_OUT, k); /* no result: it has read the slots */
    hd_mpi_lock(r->c->session);
    rc = swap(r, k, sum, rail);
    hd_mpi_unlock(r->c->session);
    return hd_mpi_failed(r->j, rc, l->even ? "MPI_Ialltoall" : "MPI_Ialltoallv");
}

/* Adds up what the nodes have sent: the own block into the result, the others where they are. */
static void add_nodes(const hd_levels_run *r, int64_t k, char *to)
{
    const hd_reduce_fn reduce = hd_reduce_kernel(r->j->redop, r->j->dtype);
    const int64_t n = hd_levels_length(r, k), m = own_blocks(r), bytes = n * r->item;
    char *from = received(r, r->l->place, k);

    memcpy(to, from, (size_t)bytes);
    for (int64_t q = 1; q < r->l->nodes; q++) {
        reduce(from + q * m * bytes, to, to, n);
        if (m > 1)
            reduce(from + (q * m + 1) * bytes, from + bytes, from + bytes, (m - 1) * n);
    }
    hd_scale_after(r->c, r->j, to, n);
    if (m > 1)
        hd_scale_after(r->c, r->j, from + bytes, (m - 1) * n);
}

static int end_reduce_scatter(hd_levels_run *r, int64_t k)
{
    const struct hd_levels *l = r->l;
    const int64_t bytes = hd_levels_length(r, k) * r->item;
    char *to = r->out + k * r->step * r->item;

    if (l->place < l->rails)
        add_nodes(r, k, to);
    if (!l->even)
        hd_levels_announce(r, HD_LEVELS_OUT, k);
    if (hd_levels_wait_all(r, HD_LEVELS_OUT, k))
        return r->j->code;
    if (l->place >= l->rails)
        memcpy(to, received(r, l->place % l->rails, k) + l->place / l->rails * bytes,
               (size_t)bytes);
    return HD_OK;
}

int hd_levels_reduce_scatter(hd_comm *c, hd_job *j, char *to)
{
    hd_levels_run r = {.begin = begin_reduce_scatter,
                       .end = end_reduce_scatter,
                       .in = j->in[0].ptr,
                       .out = to,
                       .list = j->listed ? j->in : NULL};
    return hd_levels_go(&r, c, j, j->out[0].n, c->size + c->levels->nodes * c->levels->most);
}
