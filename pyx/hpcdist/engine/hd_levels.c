/* Collectives over two levels, for long tensors of a group whose ranks share several nodes: what
 * hd_levels_reductions.c and hd_levels_moves.c have in common.
 *
 * The ranks of a node exchange through memory that they share. What crosses the network is divided
 * among them: those that have the same place on their nodes, a *rail*, exchange their part over the
 * network. So each byte crosses the network once for a node, not once for a rank, and all ranks
 * drive the network at once. There are as many rails as the smallest node has ranks; on larger
 * nodes the others carry nothing.
 *
 * A tensor goes in pieces. What a rank does with a piece has two halves: it *begins* the piece,
 * with a nonblocking call on its rail at the end of that, begins the next piece meanwhile, and then
 * *ends* the first one. In between it makes two announcements: `in`, when its slot of the shared
 * memory has what the others of its node are to read first, and `out`, when it has what they read
 * at last.
 *
 * A slot has three parts, which pieces use in turn. A rank that begins piece k+3 has seen `out` of
 * piece k+1 from all ranks of its node, and a rank announces that only when it is done with k. This
 * holds for each operation, so they may follow each other in any order.
 *
 * No rank gives up here: the others may be inside a call of MPI's that cannot be cancelled. As for
 * every such call, the watchdog ends the job when it takes longer than its timeout. */
#include <stdlib.h>
#include <strings.h>
#include <sys/mman.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_levels.h"
#include "hd_report.h"
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

int hd_levels_wanted(void)
{
    const char *text = getenv("HPCDIST_TWO_LEVEL");
    return text && strcasecmp(text, "on") == 0; /* config.py has refused other words */
}

/* ---- communicators and memory ---- */

static int64_t page_up(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static int64_t head_bytes(const struct hd_levels *l)
{
    return page_up((int64_t)sizeof(hd_levels_line) * l->ranks);
}

/* Tells all members where each of them is: the nodes are numbered by the first of their members. */
static int seat(hd_comm *c, struct hd_levels *l, int first)
{
    const hd_levels_seat mine = {first, l->place};
    const int rc = MPI_Allgather(&mine, 2, MPI_INT, l->seats, 2, MPI_INT, c->mpi);
    for (int r = 0; r < c->size && !rc; r++) {
        hd_levels_seat *s = &l->seats[r];
        s->node = s->node == r ? l->nodes++ : l->seats[s->node].node;
    }
    return rc;
}

/* The communicators of this rank's node and rail. A node has the same rank in all rails. */
static int split(hd_comm *c, struct hd_levels *l)
{
    int first = 0, sides[2] = {0, 0}, rc; /* of all nodes' ranks, the least and the most */

    while (c->node_slot[first] < 0)
        first++;
    /* 0: it failed here, so that no rank goes on. */
    if (MPI_Comm_split(c->mpi, first, c->rank, &l->node) == MPI_SUCCESS) {
        MPI_Comm_rank(l->node, &l->place);
        MPI_Comm_size(l->node, &l->ranks);
        l->seats = malloc((size_t)c->size * sizeof *l->seats);
        sides[0] = l->seats ? l->ranks : 0;
        sides[1] = -l->ranks;
    }
    rc = MPI_Allreduce(MPI_IN_PLACE, sides, 2, MPI_INT, MPI_MIN, c->mpi);
    if (rc || !sides[0])
        return rc ? rc : MPI_ERR_OTHER;
    l->rails = sides[0];
    l->even = sides[0] == -sides[1];
    if ((rc = seat(c, l, first)))
        return rc;
    rc = MPI_Comm_split(c->mpi, l->place < l->rails ? l->place : MPI_UNDEFINED, first, &l->rail);
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

static void discard(struct hd_levels *l)
{
    if (l)
        free(l->seats);
    free(l);
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
        discard(l);
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
    discard(l);
}

int64_t hd_levels_bytes(const hd_comm *c)
{
    return c->levels && c->levels->lines ? (int64_t)c->levels->bytes : 0;
}

int hd_levels_takes(hd_comm *c, hd_job *j, int64_t n, int divided)
{
    if (!c->two_level || c->one_node || c->page || c->on_device || hd_ft_on(c->session) ||
        n < LEAST / (int64_t)hd_itemsize(j->dtype) ||
        (j->redop >= 0 && !hd_reduce_kernel(j->redop, j->dtype)))
        return 0;
    if (!c->levels_asked && open_levels(c, j))
        return -1;
    if (!c->levels || (divided && (!c->levels->even || c->levels->piece < 2 * c->size * HD_LINE)))
        return 0;
    if (!c->levels->failed)
        return 1;
    hd_fail(j, HD_ERR_BACKEND,
            "%s: an earlier operation failed in MPI, between two pieces, and group '%s' cannot be "
            "used any more",
            j->api, c->name);
    return -1;
}

/* ---- announcements ---- */

static uint64_t *count(const hd_levels_run *r, int place, enum hd_levels_of which)
{
    hd_levels_line *of = &r->l->lines[place];
    return which == HD_LEVELS_IN ? &of->in : &of->out;
}

void hd_levels_announce(const hd_levels_run *r, enum hd_levels_of which, int64_t k)
{
    __atomic_store_n(count(r, r->l->place, which), r->before + (uint64_t)k + 1, __ATOMIC_RELEASE);
}

/* Until that rank of the node has announced piece k. */
static int wait_for(hd_levels_run *r, hd_waiter *w, int place, enum hd_levels_of which, int64_t k)
{
    const uint64_t *of = count(r, place, which), n = r->before + (uint64_t)k + 1;
    while (__atomic_load_n(of, __ATOMIC_ACQUIRE) < n) {
        const int ev = hd_waiter_step(w);
        if (!ev)
            continue;
        hd_session_progress(r->c->session);
        if (!(ev & HD_WAIT_HOOK))
            continue;
        hd_session_note(r->c->session, r->j);
        if (hd_session_broken(r->c->session))
            return hd_fail_broken(r->c, r->j);
    }
    return HD_OK;
}

int hd_levels_wait(hd_levels_run *r, int place, enum hd_levels_of which, int64_t k)
{
    hd_waiter w;
    hd_waiter_init(&w, hd_session_spin(r->c->session, !r->j->inline_), -1);
    return wait_for(r, &w, place, which, k);
}

int hd_levels_wait_all(hd_levels_run *r, enum hd_levels_of which, int64_t k)
{
    const struct hd_levels *l = r->l;
    hd_waiter w;
    int code = HD_OK;
    hd_waiter_init(&w, hd_session_spin(r->c->session, !r->j->inline_), -1);
    for (int i = 1; i < l->ranks && !code; i++)
        code = wait_for(r, &w, (l->place + i) % l->ranks, which, k);
    return code;
}

/* ---- pieces ---- */

char *hd_levels_slot(const hd_levels_run *r, int place, int64_t k)
{
    const int64_t part = (int64_t)((r->before + (uint64_t)k) % PARTS);
    return r->l->slots + (PARTS * place + part) * r->l->piece;
}

int64_t hd_levels_length(const hd_levels_run *r, int64_t k)
{
    const int64_t left = r->n - k * r->step;
    return left < r->step ? left : r->step;
}

int64_t hd_levels_slice(const hd_levels_run *r, int64_t n, int place)
{
    const int64_t unit = HD_LINE / r->item, each = (n + r->l->rails - 1) / r->l->rails;
    const int64_t at = (each + unit - 1) / unit * unit * place;
    return place >= r->l->rails || at > n ? n : at;
}

int hd_levels_go(hd_levels_run *r, hd_comm *c, hd_job *j, int64_t n, int blocks)
{
    const int64_t unit = HD_LINE / (int64_t)hd_itemsize(j->dtype);
    int64_t pieces;
    int code = HD_OK;

    r->c = c;
    r->j = j;
    r->l = c->levels;
    r->n = n;
    r->item = (int64_t)hd_itemsize(j->dtype);
    r->step = r->l->piece / r->item / blocks / unit * unit;
    r->before = r->l->done;
    r->rails[0] = r->rails[1] = MPI_REQUEST_NULL;
    pieces = (n + r->step - 1) / r->step;
    for (int64_t k = 0; k <= pieces && !code; k++) {
        if (k < pieces)
            code = r->begin(r, k, &r->rails[k & 1]);
        if (k > 0 && !code)
            code = hd_poll(c, j, &r->rails[~k & 1]);
        if (k > 0 && !code)
            code = r->end(r, k - 1);
    }
    r->l->done += (uint64_t)pieces;
    for (int i = 0; i < 2 && code; i++) /* MPI writes to the tensor until then */
        if (r->rails[i] != MPI_REQUEST_NULL)
            (void)hd_poll(c, j, &r->rails[i]);
    r->l->failed = code != HD_OK;
    return code;
}
