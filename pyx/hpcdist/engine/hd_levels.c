/* all_reduce over two levels, for a long tensor of a group whose ranks share several nodes.
 *
 * The ranks of a node combine a tensor through memory that they share, a slice each. For each
 * slice one rank of every node has its node's sum then; these ranks, a *rail*, combine theirs over
 * the network. At last the ranks of a node read each other's slices. So each byte crosses the
 * network once for a node, not once for a rank, and all ranks drive the network at once. There are
 * as many rails as the smallest node has ranks; on larger nodes the others carry no slice.
 *
 * A tensor goes in pieces. For each piece a rank
 *   1. copies into its slot what the others of its node are to reduce, and announces `in`;
 *   2. when the others have, adds their slots to its own slice, in place, and begins the all-reduce
 *      of the slice on its rail;
 *   3. begins the next piece meanwhile, up to here;
 *   4. when the rail is done, puts the result into its slot, in the place that step 1 left out, and
 *      announces `out`;
 *   5. when the others have, copies their slices out.
 *
 * A slot has three parts, which pieces use in turn. A rank that begins piece k+3 has seen `out` of
 * piece k+1 from all ranks of its node, and a rank announces that only when it is done with k.
 *
 * Each slice is combined by one rank of a node, in the same order each time, so all ranks get the
 * same bits, as far as the library's all-reduce gives them.
 *
 * No rank gives up here: the others may be inside a call of MPI's that cannot be cancelled. As for
 * every such call, the watchdog ends the job when it takes longer than its timeout. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_levels.h"
#include "hd_mpi_ops.h"
#include "hd_report.h"
#include "hd_scale.h"
#include "hd_shared.h"
#include "hd_status.h"
#include "hd_threads.h"
#include "hd_types.h"

#define LEAST (32 << 10)  /* bytes: shorter tensors take one call of MPI's */
#define PIECE (256 << 10) /* bytes */
/* Bytes: with more ranks than cores, each piece costs a round of the scheduler. */
#define LONG_PIECE (1 << 20)
#define LEAST_SLICE (4 << 10)
#define PARTS 3 /* of a slot */

typedef struct line {
    uint64_t in __attribute__((aligned(HD_LINE)));  /* pieces */
    uint64_t out __attribute__((aligned(HD_LINE))); /* pieces */
} line;

struct hd_levels {
    MPI_Comm node, rail; /* the members on this node; those that carry the same slice */
    int place, ranks;    /* this rank's place among the former, and how many there are */
    int rails;
    line *lines; /* one per rank of the node; then, from the next page on, the slots */
    char *slots;
    size_t bytes;
    int64_t piece; /* bytes of a part of a slot */
    uint64_t done; /* pieces */
    int failed;    /* MPI did in the middle of a tensor: pieces are not counted alike any more */
};

typedef struct run {
    hd_comm *c;
    hd_job *j;
    struct hd_levels *l;
    hd_reduce_fn reduce;
    MPI_Datatype type;
    MPI_Op op;
    int64_t item, step; /* bytes of an element; elements of a piece */
    double factor;
    int first;
    char *data;
    int64_t n;
    uint64_t before;      /* pieces of earlier tensors */
    MPI_Request rails[2]; /* of even and of odd pieces */
} run;

int hd_levels_wanted(void)
{
    const char *text = getenv("HPCDIST_TWO_LEVEL");
    return text && strcasecmp(text, "on") == 0; /* config.py has refused other words */
}

/* ---- communicators and memory ---- */

static int64_t page_up(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static int64_t head_bytes(const struct hd_levels *l)
{
    return page_up((int64_t)sizeof(line) * l->ranks);
}

/* The communicators of this rank's node and rail. */
static int split(hd_comm *c, struct hd_levels *l)
{
    int first = 0, least = 0, rc;

    while (c->node_slot[first] < 0)
        first++;
    /* 0: it failed here, so that no rank goes on. */
    if (MPI_Comm_split(c->mpi, first, c->rank, &l->node) == MPI_SUCCESS) {
        MPI_Comm_rank(l->node, &l->place);
        MPI_Comm_size(l->node, &l->ranks);
        least = l->ranks;
    }
    rc = MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, c->mpi);
    if (rc || !least)
        return rc ? rc : MPI_ERR_OTHER;
    l->rails = least;
    rc = MPI_Comm_split(c->mpi, l->place < least ? l->place : MPI_UNDEFINED, c->rank, &l->rail);
    if (!rc)
        MPI_Comm_set_errhandler(l->node, MPI_ERRORS_RETURN);
    if (!rc && l->rail != MPI_COMM_NULL)
        MPI_Comm_set_errhandler(l->rail, MPI_ERRORS_RETURN);
    return rc;
}

/* The largest piece that every node's memory allows, the same for all ranks; 0: none that is worth
 * using. */
static int64_t piece_of(const hd_comm *c, const struct hd_levels *l)
{
    const int64_t most = hd_session_spin(c->session, 0) ? PIECE : LONG_PIECE;
    const int64_t piece = (c->node_limit - head_bytes(l)) / (PARTS * l->ranks) / 4096 * 4096;
    return piece < LEAST_SLICE * l->ranks ? 0 : piece < most ? piece : most;
}

static int share(hd_comm *c, struct hd_levels *l)
{
    int64_t piece = piece_of(c, l);
    void *at = NULL;
    int ok, rc;

    if ((rc = MPI_Allreduce(MPI_IN_PLACE, &piece, 1, MPI_INT64_T, MPI_MIN, c->mpi)) || !piece)
        return rc;
    l->piece = piece;
    l->bytes = (size_t)(head_bytes(l) + PARTS * l->ranks * piece);
    if ((rc = hd_share(l->node, l->bytes, &at)))
        return rc;
    ok = at != NULL;
    rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, c->mpi);
    if (at && (rc || !ok)) {
        munmap(at, l->bytes);
    } else if (at) {
        madvise(at, l->bytes, MADV_DONTFORK); /* a child that outlives the group would keep it */
        l->lines = at;
        l->slots = (char *)at + head_bytes(l);
    }
    return rc;
}

static void free_comms(struct hd_levels *l)
{
    if (l->node != MPI_COMM_NULL)
        MPI_Comm_free(&l->node);
    if (l->rail != MPI_COMM_NULL)
        MPI_Comm_free(&l->rail);
}

/* Whether some node has several of the members; each knows those of its own. */
static int has_several(hd_comm *c, struct hd_levels *l, int *rc)
{
    int sides[2] = {0, 0}; /* the least, as the most of the negative; and the most */
    for (int r = 0; l && r < c->size; r++)
        sides[1] += c->node_slot[r] >= 0;
    sides[0] = -sides[1];
    *rc = MPI_Allreduce(MPI_IN_PLACE, sides, 2, MPI_INT, MPI_MAX, c->mpi);
    /* 0: without memory for the list, or on a node without a status page. */
    return !*rc && sides[0] < 0 && sides[1] > 1;
}

/* Collective, at the first tensor that can use it. Where each node has one rank, or memory or a
 * communicator cannot be had somewhere, all ranks go on without it. */
static int open_levels(hd_comm *c, hd_job *j)
{
    struct hd_levels *l = calloc(1, sizeof *l);
    int rc, ok;

    c->levels_asked = 1;
    hd_mpi_lock(c->session);
    if (has_several(c, l, &rc)) {
        l->node = l->rail = MPI_COMM_NULL;
        ok = split(c, l) == MPI_SUCCESS;
        rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, c->mpi);
        if (!rc && ok)
            rc = share(c, l);
        if (l->lines)
            c->levels = l;
        else
            free_comms(l);
    }
    hd_mpi_unlock(c->session);
    if (!c->levels)
        free(l);
    return hd_mpi_failed(j, rc, "MPI_Allreduce");
}

void hd_levels_close(hd_comm *c)
{
    if (!c->levels || !c->levels->lines)
        return;
    munmap(c->levels->lines, c->levels->bytes);
    c->levels->lines = NULL;
}

void hd_levels_free(hd_comm *c, int together)
{
    struct hd_levels *l = c->levels;
    c->levels = NULL;
    if (l && together)
        free_comms(l);
    free(l);
}

int64_t hd_levels_bytes(const hd_comm *c)
{
    return c->levels && c->levels->lines ? (int64_t)c->levels->bytes : 0;
}

int hd_levels_takes(hd_comm *c, hd_job *j)
{
    int64_t bytes = 0;
    if (!c->two_level || c->one_node || c->page || c->on_device || hd_ft_on(c->session) ||
        !hd_reduce_kernel(j->redop, j->dtype))
        return 0;
    for (int i = 0; i < j->nout; i++)
        bytes += j->out[i].n * (int64_t)hd_itemsize(j->dtype);
    if (bytes < LEAST)
        return 0;
    if (!c->levels_asked && open_levels(c, j))
        return -1;
    if (c->levels && c->levels->failed) {
        hd_fail(j, HD_ERR_BACKEND,
                "%s: an earlier one failed in MPI, between two pieces, and group '%s' cannot be "
                "used "
                "any more",
                j->api, c->name);
        return -1;
    }
    return c->levels != NULL;
}

/* ---- waiting ---- */

static int behind(const line *of, int out, uint64_t n)
{
    return __atomic_load_n(out ? &of->out : &of->in, __ATOMIC_ACQUIRE) < n;
}

/* Until all others of the node have announced `in` or `out` of n pieces. */
static int wait_all(run *r, int out, uint64_t n)
{
    struct hd_levels *l = r->l;
    hd_waiter w;

    hd_waiter_init(&w, hd_session_spin(r->c->session, !r->j->inline_), -1);
    for (int i = 1; i < l->ranks; i++) {
        const line *of = &l->lines[(l->place + i) % l->ranks];
        while (behind(of, out, n)) {
            const int ev = hd_waiter_step(&w);
            if (!ev)
                continue;
            hd_session_progress(r->c->session);
            if (!(ev & HD_WAIT_HOOK))
                continue;
            hd_session_note(r->c->session, r->j);
            if (hd_session_broken(r->c->session))
                return hd_fail_broken(r->c, r->j);
        }
    }
    return HD_OK;
}

/* ---- moving ---- */

static int64_t slice(const run *r, int64_t n, int rail)
{
    const int64_t unit = HD_LINE / r->item, each = (n + r->l->rails - 1) / r->l->rails;
    const int64_t at = (each + unit - 1) / unit * unit * rail;
    return rail >= r->l->rails || at > n ? n : at;
}

static char *slot(const run *r, int place, int64_t k)
{
    const int64_t part = (int64_t)((r->before + (uint64_t)k) % PARTS);
    return r->l->slots + (PARTS * place + part) * r->l->piece;
}

static int64_t length(const run *r, int64_t k)
{
    const int64_t left = r->n - k * r->step;
    return left < r->step ? left : r->step;
}

static void give(const run *r, char *to, const char *from, int64_t n)
{
    if (r->first)
        hd_scale_mul(to, from, n, r->j->dtype, r->factor);
    else
        memcpy(to, from, (size_t)(n * r->item));
}

/* Steps 1 and 2 of piece k. */
static int reduce_piece(run *r, int64_t k)
{
    struct hd_levels *l = r->l;
    const int64_t item = r->item, n = length(r, k);
    const int64_t a = slice(r, n, l->place), b = slice(r, n, l->place + 1);
    char *data = r->data + k * r->step * item, *own = slot(r, l->place, k);
    int code, rc = MPI_SUCCESS;

    give(r, own, data, a);
    give(r, own + b * item, data + b * item, n - b);
    __atomic_store_n(&l->lines[l->place].in, r->before + (uint64_t)k + 1, __ATOMIC_RELEASE);
    if (r->first)
        hd_scale_mul(data + a * item, data + a * item, b - a, r->j->dtype, r->factor);
    if ((code = wait_all(r, 0, r->before + (uint64_t)k + 1)))
        return code;
    for (int i = 1; i < l->ranks; i++)
        r->reduce(slot(r, (l->place + i) % l->ranks, k) + a * item, data + a * item, b - a);
    r->rails[k & 1] = MPI_REQUEST_NULL;
    if (b > a) {
        hd_mpi_lock(r->c->session);
        rc = MPI_Iallreduce(MPI_IN_PLACE, data + a * item, (int)(b - a), r->type, r->op, l->rail,
                            &r->rails[k & 1]);
        hd_mpi_unlock(r->c->session);
    }
    return hd_mpi_failed(r->j, rc, "MPI_Iallreduce");
}

/* Steps 4 and 5. */
static int spread_piece(run *r, int64_t k)
{
    struct hd_levels *l = r->l;
    const int64_t item = r->item, n = length(r, k);
    const int64_t a = slice(r, n, l->place), b = slice(r, n, l->place + 1);
    char *data = r->data + k * r->step * item;
    int code;

    if ((code = hd_poll(r->c, r->j, &r->rails[k & 1])))
        return code;
    hd_scale_after(r->c, r->j, data + a * item, b - a);
    memcpy(slot(r, l->place, k) + a * item, data + a * item, (size_t)((b - a) * item));
    __atomic_store_n(&l->lines[l->place].out, r->before + (uint64_t)k + 1, __ATOMIC_RELEASE);
    if ((code = wait_all(r, 1, r->before + (uint64_t)k + 1)))
        return code;
    for (int i = 1; i < l->ranks; i++) {
        const int q = (l->place + i) % l->ranks;
        const int64_t from = slice(r, n, q), to = slice(r, n, q + 1);
        memcpy(data + from * item, slot(r, q, k) + from * item, (size_t)((to - from) * item));
    }
    return HD_OK;
}

int hd_levels_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n)
{
    run r = {.c = c,
             .j = j,
             .l = c->levels,
             .reduce = hd_reduce_kernel(j->redop, j->dtype),
             .type = hd_mpi_type(j->dtype),
             .op = hd_mpi_op(j->redop, j->dtype),
             .item = (int64_t)hd_itemsize(j->dtype),
             .factor = 1,
             .data = data,
             .n = n,
             .before = c->levels->done,
             .rails = {MPI_REQUEST_NULL, MPI_REQUEST_NULL}};
    int64_t pieces;
    int code = HD_OK;

    r.first = hd_scales_first(c, j, &r.factor);
    r.step = r.l->piece / r.item;
    pieces = (n + r.step - 1) / r.step;
    for (int64_t k = 0; k <= pieces && !code; k++) {
        if (k < pieces)
            code = reduce_piece(&r, k);
        if (k > 0 && !code)
            code = spread_piece(&r, k - 1);
    }
    if (code) {
        r.l->failed = 1;
        for (int i = 0; i < 2; i++) /* MPI writes to the tensor until then */
            if (r.rails[i] != MPI_REQUEST_NULL)
                (void)hd_poll(c, j, &r.rails[i]);
        return code;
    }
    r.l->done += (uint64_t)pieces;
    return HD_OK;
}
