/* Operations over two levels that move data without reducing it: see hd_levels.c.
 *
 * broadcast: the root puts each piece into its slot. The ranks of its node copy it from there, and
 * send a slice each on their rails. On the other nodes a rank receives its slice into its slot, and
 * all copy the slices out.
 *
 * all_gather: a rank gathers the blocks of its rail, into its slot. Then the ranks of a node copy
 * each other's slots out. A rank whose place is beyond the rails puts its block into the slot of
 * one that carries it. */
#include <string.h>

#include "hd_comm.h"
#include "hd_job.h"
#include "hd_levels.h"
#include "hd_levels_moves.h"
#include "hd_mpi_ops.h"
#include "hd_threads.h"

/* ---- broadcast ---- */

/* The root's place among the ranks of this node; -1: it is on another node. */
static int place_of_root(const hd_levels_run *r)
{
    const hd_levels_seat root = r->l->seats[r->j->root];
    return r->l->seats[r->c->rank].node == root.node ? root.place : -1;
}

static int begin_broadcast(hd_levels_run *r, int64_t k, MPI_Request *rail)
{
    const struct hd_levels *l = r->l;
    const int64_t n = hd_levels_length(r, k);
    const int64_t a = hd_levels_slice(r, n, l->place), b = hd_levels_slice(r, n, l->place + 1);
    const int root = place_of_root(r), from = root < 0 ? l->place : root;
    int rc;

    if (l->place == root) {
        memcpy(hd_levels_slot(r, root, k), r->out + k * r->step * r->item, (size_t)(n * r->item));
        hd_levels_announce(r, HD_LEVELS_IN, k);
    }
    if (b <= a)
        return HD_OK;
    if (from != l->place && hd_levels_wait(r, from, HD_LEVELS_IN, k))
        return r->j->code;
    hd_mpi_lock(r->c->session);
    rc = MPI_Ibcast(hd_levels_slot(r, from, k) + a * r->item, (int)(b - a),
                    hd_mpi_type(r->j->dtype), l->seats[r->j->root].node, l->rail, rail);
    hd_mpi_unlock(r->c->session);
    return hd_mpi_failed(r->j, rc, "MPI_Ibcast");
}

static int end_broadcast(hd_levels_run *r, int64_t k)
{
    const struct hd_levels *l = r->l;
    const int64_t n = hd_levels_length(r, k);
    const int root = place_of_root(r);
    char *to = r->out + k * r->step * r->item;

    hd_levels_announce(r, HD_LEVELS_OUT, k);
    if (hd_levels_wait_all(r, HD_LEVELS_OUT, k))
        return r->j->code;
    if (root >= 0 && root != l->place)
        memcpy(to, hd_levels_slot(r, root, k), (size_t)(n * r->item));
    for (int i = 0; i < l->ranks && root < 0; i++) {
        const int q = (l->place + i) % l->ranks;
        const int64_t a = hd_levels_slice(r, n, q), b = hd_levels_slice(r, n, q + 1);
        memcpy(to + a * r->item, hd_levels_slot(r, q, k) + a * r->item,
               (size_t)((b - a) * r->item));
    }
    return HD_OK;
}

int hd_levels_broadcast(hd_comm *c, hd_job *j)
{
    hd_levels_run r = {.begin = begin_broadcast, .end = end_broadcast, .out = j->out[0].ptr};
    return hd_levels_go(&r, c, j, j->out[0].n, 1);
}

/* ---- all_gather: a slot has the blocks of a rail, by nodes ---- */

static char *block(const hd_levels_run *r, int q, int64_t k)
{
    return (r->list ? r->list[q].ptr : r->out + q * r->n * r->item) + k * r->step * r->item;
}

/* A block that a rank of this node carries, in its slot. */
static char *carried(const hd_levels_run *r, int q, int64_t k)
{
    const struct hd_levels *l = r->l;
    const int rail = hd_levels_rail(l, q);
    return hd_levels_slot(r, rail, k) +
           (l->at[q] - l->start[rail * l->nodes]) * hd_levels_length(r, k) * r->item;
}

/* On nodes with different numbers of ranks. */
static int begin_with_others(hd_levels_run *r, int64_t k, MPI_Request *rail)
{
    const struct hd_levels *l = r->l;
    const MPI_Datatype type = hd_mpi_type(r->j->dtype);
    const int n = (int)hd_levels_length(r, k), me = r->c->rank;
    int *counts = hd_levels_lists(l, k), *at = counts + l->nodes, rc;

    memcpy(carried(r, me, k), block(r, me, k), (size_t)(n * r->item));
    hd_levels_announce(r, HD_LEVELS_IN, k);
    if (l->place >= l->rails)
        return HD_OK;
    for (int place = l->place + l->rails; place < l->ranks; place += l->rails)
        if (hd_levels_wait(r, place, HD_LEVELS_IN, k))
            return r->j->code;
    for (int i = 0; i < l->nodes; i++) {
        counts[i] = hd_levels_blocks(l, l->place, i) * n;
        at[i] = hd_levels_begins(l, l->place, i) * n;
    }
    hd_mpi_lock(r->c->session);
    rc = MPI_Iallgatherv(MPI_IN_PLACE, 0, type, hd_levels_slot(r, l->place, k), counts, at, type,
                         l->rail, rail);
    hd_mpi_unlock(r->c->session);
    return hd_mpi_failed(r->j, rc, "MPI_Iallgatherv");
}

static int begin_all_gather(hd_levels_run *r, int64_t k, MPI_Request *rail)
{
    const MPI_Datatype type = hd_mpi_type(r->j->dtype);
    const int n = (int)hd_levels_length(r, k);
    int rc;
    hd_mpi_lock(r->c->session);
    rc = MPI_Iallgather(block(r, r->c->rank, k), n, type, hd_levels_slot(r, r->l->place, k), n,
                        type, r->l->rail, rail);
    hd_mpi_unlock(r->c->session);
    return hd_mpi_failed(r->j, rc, "MPI_Iallgather");
}

static int end_all_gather(hd_levels_run *r, int64_t k)
{
    const int64_t bytes = hd_levels_length(r, k) * r->item;
    const int size = r->c->size;

    hd_levels_announce(r, HD_LEVELS_OUT, k);
    if (hd_levels_wait_all(r, HD_LEVELS_OUT, k))
        return r->j->code;
    for (int i = 1; i < size; i++) {
        const int q = (r->c->rank + i) % size;
        memcpy(block(r, q, k), carried(r, q, k), (size_t)bytes);
    }
    return HD_OK;
}

int hd_levels_all_gather(hd_comm *c, hd_job *j, const hd_seg *list, hd_seg all)
{
    const struct hd_levels *l = c->levels;
    hd_levels_run r = {.begin = l->even ? begin_all_gather : begin_with_others,
                       .end = end_all_gather,
                       .out = all.ptr,
                       .list = list};
    return hd_levels_go(&r, c, j, list ? list[0].n : all.n / c->size, l->start[l->nodes]);
}
