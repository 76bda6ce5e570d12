/* Operations that move data without reducing it. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_job.h"
#include "hd_levels.h"
#include "hd_levels_moves.h"
#include "hd_moves.h"
#include "hd_mpi_ops.h"
#include "hd_threads.h"
#include "hd_types.h"

#define TAG_EXCHANGE 31        /* user tags never end in 31: see hd_p2p.c */
#define STAGE_LIST (1 << 20)   /* bytes: shorter lists are packed and moved by one MPI call */
#define SHORT_BLOCK (64 << 10) /* bytes: so are lists of shorter tensors */

static int adjacent(const hd_job *j, const hd_seg *list, int n)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    for (int i = 1; i < n; i++)
        if (list[i].ptr != list[i - 1].ptr + list[i - 1].n * item)
            return 0;
    return 1;
}

static int64_t total(const hd_seg *list, int n)
{
    int64_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += list[i].n;
    return sum;
}

static void copy(const hd_job *j, hd_seg to, hd_seg from)
{
    const int64_t n = to.n < from.n ? to.n : from.n; /* equal, or a caller was not careful */
    if (to.ptr != from.ptr && n)
        memmove(to.ptr, from.ptr, (size_t)n * hd_itemsize(j->dtype));
}

/* ---- any pattern of blocks, pair by pair ---- */

/* This rank's own block: copied here, except in device memory, which MPI alone may touch: there it
 * is a message to itself. */
static int copies_itself(const hd_comm *c, const hd_seg *out, const hd_seg *in)
{
    return !c->on_device || (out && in && out[c->rank].ptr == in[c->rank].ptr);
}

static int exchange(hd_comm *c, hd_job *j, const hd_seg *out, const hd_seg *in)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    MPI_Request *reqs = malloc(2 * (size_t)c->size * sizeof *reqs);
    MPI_Datatype *types = malloc(2 * (size_t)c->size * sizeof *types);
    int n = 0, nt = 0, rc = 0;

    if (!reqs || !types) {
        free(reqs);
        free(types);
        hd_fail(j, HD_ERR_MEMORY, "no memory for %d requests", 2 * c->size);
        return j->code;
    }
    if (out && in && copies_itself(c, out, in))
        copy(j, out[c->rank], in[c->rank]);
    hd_mpi_lock(c->session);
    /* Receives first, so that no message arrives unexpected. */
    for (int pass = 0; pass < 2; pass++) {
        const hd_seg *list = pass ? in : out;
        for (int i = copies_itself(c, out, in); list && i < c->size && !rc; i++) {
            const int r = pass ? (c->rank + i) % c->size : (c->rank - i + c->size) % c->size;
            int64_t bytes = list[r].n * item;
            MPI_Datatype type = MPI_BYTE;
            if (!bytes)
                continue;
            if (bytes > INT_MAX) {
                type = types[nt++] = hd_big_type(bytes);
                bytes = 1;
            }
            if (pass)
                rc = MPI_Isend(list[r].ptr, (int)bytes, type, r, TAG_EXCHANGE, c->mpi, &reqs[n++]);
            else
                rc = MPI_Irecv(list[r].ptr, (int)bytes, type, r, TAG_EXCHANGE, c->mpi, &reqs[n++]);
        }
    }
    hd_mpi_unlock(c->session);
    if (!hd_mpi_failed(j, rc, "MPI_Isend/Irecv"))
        hd_wait_all(c, j, n, reqs);
    for (int i = 0; i < nt; i++)
        MPI_Type_free(&types[i]);
    free(reqs);
    free(types);
    return j->text ? j->code : HD_OK;
}

/* ---- the operations ---- */

int hd_broadcast(hd_comm *c, hd_job *j)
{
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    const int takes = hd_levels_takes(c, j, j->out[0].n, 0);
    if (takes)
        return takes < 0 ? j->code : hd_levels_broadcast(c, j);
    for (int64_t at = 0; at < j->out[0].n; at += MOVE_MAX) {
        const int64_t left = j->out[0].n - at;
        CALL(c, j, Bcast, Ibcast, j->out[0].ptr + at * item,
             (int)(left < MOVE_MAX ? left : MOVE_MAX), type, j->root, c->mpi);
    }
    return HD_OK;
}

/* Where the blocks lie, relative to the first of them, in elements, if `at` is not NULL. 0: an int
 * cannot say it. */
static int offsets(const hd_comm *c, const hd_job *j, const hd_seg *out, int *at, char **base)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    *base = NULL;
    for (int r = 0; r < c->size; r++)
        if (out[r].n && (!*base || out[r].ptr < *base))
            *base = out[r].ptr;
    for (int r = 0; r < c->size; r++) {
        const int64_t bytes = out[r].n ? out[r].ptr - *base : 0;
        if (bytes % item || bytes / item > INT_MAX)
            return 0;
        if (at)
            at[r] = (int)(bytes / item);
    }
    return 1;
}

/* By the library. counts: room for two ints per rank. */
static int gatherv(hd_comm *c, hd_job *j, const hd_seg *out, int *counts)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    int *at = counts + c->size, direct;
    int64_t sum = 0;
    char *base;

    for (int r = 0; r < c->size; r++)
        counts[r] = (int)out[r].n;
    if (!(direct = offsets(c, j, out, at, &base))) {
        if (!(base = hd_stage(c, j, total(out, c->size) * item)))
            return j->code;
        for (int r = 0; r < c->size; r++) {
            at[r] = (int)sum;
            sum += out[r].n;
        }
        if (out[c->rank].n)
            memcpy(base + at[c->rank] * item, out[c->rank].ptr, (size_t)(out[c->rank].n * item));
    }
    CALL(c, j, Allgatherv, Iallgatherv, MPI_IN_PLACE, 0, type, base, counts, at, type, c->mpi);
    for (int r = 0; r < c->size && !direct; r++)
        if (r != c->rank && out[r].n)
            memcpy(out[r].ptr, base + at[r] * item, (size_t)(out[r].n * item));
    return HD_OK;
}

/* Sends or receives one block. */
static int post(const hd_job *j, const hd_comm *c, hd_seg block, int peer, int sends,
                MPI_Request *req)
{
    const int64_t bytes = block.n * (int64_t)hd_itemsize(j->dtype);
    const int big = bytes > INT_MAX, n = big ? 1 : (int)bytes;
    MPI_Datatype type = big ? hd_big_type(bytes) : MPI_BYTE;
    int rc;
    *req = MPI_REQUEST_NULL;
    if (!bytes)
        return MPI_SUCCESS;
    rc = sends ? MPI_Isend(block.ptr, n, type, peer, TAG_EXCHANGE, c->mpi, req)
               : MPI_Irecv(block.ptr, n, type, peer, TAG_EXCHANGE, c->mpi, req);
    if (big)
        MPI_Type_free(&type);
    return rc;
}

/* Between nodes each block goes from rank to rank, so that no rank receives from all at once. The
 * next receive is posted before a block is sent, so that no message arrives unexpected. */
static int ring(hd_comm *c, hd_job *j, const hd_seg *out)
{
    const int n = c->size, next = (c->rank + 1) % n, before = (c->rank - 1 + n) % n;
    MPI_Request takes[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL}, gives;
    int rc;
    hd_mpi_lock(c->session);
    rc = post(j, c, out[before], before, 0, &takes[0]);
    hd_mpi_unlock(c->session);
    for (int step = 0; step < n - 1 && !rc; step++) {
        MPI_Request *now = &takes[step & 1], both[2];
        hd_mpi_lock(c->session);
        if (step < n - 2)
            rc = post(j, c, out[(c->rank - step - 2 + 2 * n) % n], before, 0, &takes[~step & 1]);
        if (!rc)
            rc = post(j, c, out[(c->rank - step + n) % n], next, 1, &gives);
        hd_mpi_unlock(c->session);
        both[0] = *now;
        both[1] = gives;
        if (rc || hd_wait_all(c, j, 2, both))
            break;
    }
    hd_mpi_failed(j, rc, "MPI_Isend/Irecv");
    return j->text ? j->code : HD_OK;
}

/* Whether a list goes by MPI_Allgatherv. */
static int gathers(const hd_comm *c, const hd_job *j, const hd_seg *out)
{
    const int64_t item = (int64_t)hd_itemsize(j->dtype), sum = total(out, c->size);
    return !c->on_device && sum <= INT_MAX && hd_has_allgatherv() &&
           (sum * item <= STAGE_LIST || sum * item / c->size < SHORT_BLOCK);
}

/* Every rank's block is in its own place in `out`, unless that is device memory. */
static int all_gather_list(hd_comm *c, hd_job *j, hd_seg in, const hd_seg *out)
{
    hd_seg *same;
    int *counts;

    if (gathers(c, j, out)) {
        if (!(counts = malloc(2 * (size_t)c->size * sizeof *counts))) {
            hd_fail(j, HD_ERR_MEMORY, "no memory for %d counts", c->size);
            return j->code;
        }
        gatherv(c, j, out, counts);
        free(counts);
        return j->text ? j->code : HD_OK;
    }
    if (!c->on_device && !c->page && c->size > 2)
        return ring(c, j, out);
    same = malloc((size_t)c->size * sizeof *same);
    if (!same) {
        hd_fail(j, HD_ERR_MEMORY, "no memory for %d blocks", c->size);
        return j->code;
    }
    for (int r = 0; r < c->size; r++)
        same[r] = in;
    exchange(c, j, out, same);
    free(same);
    return j->text ? j->code : HD_OK;
}

/* An input may lie in any of the outputs. So it is copied to its own place before any block
 * arrives, and sent from there. (In device memory it lies in its own place or in none.) */
static hd_seg put_in_place(const hd_comm *c, const hd_job *j, hd_seg in, hd_seg own)
{
    if (c->on_device)
        return in;
    copy(j, own, in);
    return own;
}

/* nin tensors, each gathered into `size` of the outputs. */
static int all_gather_lists(hd_comm *c, hd_job *j)
{
    /* All of them first: one may lie in an output of another. */
    for (int i = 0; i < j->nin; i++)
        j->in[i] = put_in_place(c, j, j->in[i], j->out[(int64_t)i * c->size + c->rank]);
    for (int i = 0; i < j->nin; i++) {
        const hd_seg *out = j->out + (int64_t)i * c->size;
        const int takes =
            hd_all_equal(out, c->size) ? hd_levels_takes(c, j, out[0].n * c->size, 1) : 0;
        if (takes < 0 ||
            (takes ? hd_levels_all_gather(c, j, out, *out) : all_gather_list(c, j, j->in[i], out)))
            return j->code;
    }
    return HD_OK;
}

int hd_all_gather(hd_comm *c, hd_job *j)
{
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    const int64_t item = (int64_t)hd_itemsize(j->dtype);
    hd_seg in = j->in[0];
    int takes;

    if (j->listed)
        return all_gather_lists(c, j);
    if (j->out[0].n == 0)
        return HD_OK;
    if ((takes = hd_levels_takes(c, j, j->out[0].n, 1)) < 0)
        return j->code;
    if (takes) {
        put_in_place(c, j, in, (hd_seg){j->out[0].ptr + c->rank * in.n * item, in.n});
        return hd_levels_all_gather(c, j, NULL, j->out[0]);
    }
    if (j->out[0].n > INT_MAX) {
        hd_seg *out = malloc((size_t)c->size * sizeof *out);
        if (!out) {
            hd_fail(j, HD_ERR_MEMORY, "no memory for %d blocks", c->size);
            return j->code;
        }
        for (int r = 0; r < c->size; r++)
            out[r] = (hd_seg){j->out[0].ptr + r * in.n * item, in.n};
        all_gather_list(c, j, put_in_place(c, j, in, out[c->rank]), out);
        free(out);
        return j->text ? j->code : HD_OK;
    }
    in = put_in_place(c, j, in, (hd_seg){j->out[0].ptr + c->rank * in.n * item, in.n});
    if (in.ptr == j->out[0].ptr + c->rank * in.n * item)
        CALL(c, j, Allgather, Iallgather, MPI_IN_PLACE, 0, type, j->out[0].ptr, (int)in.n, type,
             c->mpi);
    else
        CALL(c, j, Allgather, Iallgather, in.ptr, (int)in.n, type, j->out[0].ptr, (int)in.n, type,
             c->mpi);
    return HD_OK;
}

/* ---- one block to or from the root, which alone has the list ---- */

/* Few bytes of equal sizes, as the ranks have agreed, go along the library's tree. */
static int by_tree(const hd_comm *c, const hd_job *j, hd_seg one)
{
    return c->check && !j->uneven && !c->on_device &&
           one.n <= STAGE_LIST / (int64_t)hd_itemsize(j->dtype) / c->size;
}

static int64_t room_for(const hd_comm *c, const hd_job *j, const hd_seg *list)
{
    return list[0].n * (int64_t)hd_itemsize(j->dtype) * c->size + 1;
}

/* The root's blocks, one behind the other: where they are, or in the staging buffer. */
static char *blocks(hd_comm *c, hd_job *j, const hd_seg *list)
{
    return adjacent(j, list, c->size) ? list[0].ptr : hd_stage(c, j, room_for(c, j, list));
}

static int gather_by_tree(hd_comm *c, hd_job *j, hd_seg *list, hd_seg one)
{
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    const int n = (int)one.n;
    const size_t bytes = (size_t)n * hd_itemsize(j->dtype);
    char *all = NULL;

    if (!n)
        return HD_OK;
    if (c->rank != j->root) {
        CALL(c, j, Gather, Igather, one.ptr, n, type, NULL, n, type, j->root, c->mpi);
        return HD_OK;
    }
    if (!(all = blocks(c, j, list)))
        return j->code;
    memmove(all + (size_t)c->rank * bytes, one.ptr, bytes);
    CALL(c, j, Gather, Igather, MPI_IN_PLACE, n, type, all, n, type, j->root, c->mpi);
    for (int r = 0; r < c->size && all != list[0].ptr; r++)
        memcpy(list[r].ptr, all + (size_t)r * bytes, bytes);
    return HD_OK;
}

static int scatter_by_tree(hd_comm *c, hd_job *j, hd_seg *list, hd_seg one)
{
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    const int n = (int)one.n;
    const size_t bytes = (size_t)n * hd_itemsize(j->dtype);
    char *all = NULL;

    if (!n)
        return HD_OK;
    if (c->rank != j->root) {
        CALL(c, j, Scatter, Iscatter, NULL, n, type, one.ptr, n, type, j->root, c->mpi);
        return HD_OK;
    }
    if (!(all = blocks(c, j, list)))
        return j->code;
    for (int r = 0; r < c->size && all != list[0].ptr; r++)
        memcpy(all + (size_t)r * bytes, list[r].ptr, bytes);
    CALL(c, j, Scatter, Iscatter, all, n, type, MPI_IN_PLACE, n, type, j->root, c->mpi);
    copy(j, one, list[c->rank]); /* it may lie in any place of the list */
    return HD_OK;
}

static int to_or_from_root(hd_comm *c, hd_job *j, hd_seg one, int to_root)
{
    MPI_Request req;
    int rc;
    hd_mpi_lock(c->session);
    rc = post(j, c, one, j->root, to_root, &req);
    hd_mpi_unlock(c->session);
    if (!hd_mpi_failed(j, rc, "MPI_Isend/Irecv"))
        hd_wait_all(c, j, 1, &req);
    return j->text ? j->code : HD_OK;
}

/* The root exchanges a message with each rank; the others have one. */
static int one_by_one(hd_comm *c, hd_job *j, hd_seg *list, hd_seg one, int to_root)
{
    hd_seg *mine;
    int rc;

    if (c->rank != j->root)
        return to_or_from_root(c, j, one, to_root);
    /* The single block may lie in any place of the list: read it first, write it last. */
    if (!c->on_device) {
        if (to_root)
            copy(j, list[c->rank], one);
        if (exchange(c, j, to_root ? list : NULL, to_root ? NULL : list))
            return j->code;
        if (!to_root)
            copy(j, one, list[c->rank]);
        return HD_OK;
    }
    mine = calloc((size_t)c->size, sizeof *mine);
    if (!mine) {
        hd_fail(j, HD_ERR_MEMORY, "no memory for %d blocks", c->size);
        return j->code;
    }
    mine[j->root] = one;
    rc = exchange(c, j, to_root ? list : mine, to_root ? mine : list);
    free(mine);
    return rc;
}

int hd_gather(hd_comm *c, hd_job *j)
{
    return by_tree(c, j, j->in[0]) ? gather_by_tree(c, j, j->out, j->in[0])
                                   : one_by_one(c, j, j->out, j->in[0], 1);
}

int hd_scatter(hd_comm *c, hd_job *j)
{
    return by_tree(c, j, j->out[0]) ? scatter_by_tree(c, j, j->in, j->out[0])
                                    : one_by_one(c, j, j->in, j->out[0], 0);
}

int hd_all_to_all(hd_comm *c, hd_job *j)
{
    const MPI_Datatype type = hd_mpi_type(j->dtype);
    const int n = c->size;

    if (!j->listed && !j->uneven &&
        total(j->in, n) <= INT_MAX) { /* uneven: as the ranks have agreed */
        if (j->in[0].n)
            CALL(c, j, Alltoall, Ialltoall, j->in[0].ptr, (int)j->in[0].n, type, j->out[0].ptr,
                 (int)j->in[0].n, type, c->mpi);
        return HD_OK;
    }
    return exchange(c, j, j->out, j->in);
}

int64_t hd_moves_stage(const hd_comm *c, const hd_job *j)
{
    const hd_seg *list = j->kind == HD_SCATTER ? j->in : j->out;
    int64_t most = 0;
    char *base;

    if (j->kind == HD_GATHER || j->kind == HD_SCATTER)
        return c->rank == j->root && by_tree(c, j, *list) && !adjacent(j, list, c->size)
                   ? room_for(c, j, list)
                   : 0;
    for (int i = 0; j->kind == HD_ALL_GATHER && j->listed && i < j->nin; i++) {
        const hd_seg *out = j->out + (int64_t)i * c->size;
        const int64_t bytes = total(out, c->size) * (int64_t)hd_itemsize(j->dtype);
        if (bytes > most && gathers(c, j, out) && !offsets(c, j, out, NULL, &base))
            most = bytes;
    }
    return most;
}
