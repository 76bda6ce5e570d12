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
#include "hd_making.h"
#include "hd_order.h"
#include "hd_report.h"
#include "hd_split.h"
#include "hd_status.h"
#include "hd_threads.h"
#include "hd_types.h"

#define LEAST (32 << 10)  /* bytes: with HPCDIST_TWO_LEVEL=on, shorter tensors take MPI's call */
#define PIECE (256 << 10) /* bytes */
/* Bytes: with more ranks than cores, each piece costs a round of the scheduler. */
#define LONG_PIECE (1 << 20)
#define LEAST_SLICE (4 << 10)
#define PARTS 3 /* of a slot */

/* KiB from which HPCDIST_TWO_LEVEL=auto takes an operation, all blocks together; 0: never. From
 * there on it was no slower than the library's flat call after the entry check, between nodes of
 * equally many ranks: docs/performance.md. */
static const int measured_kib[HD_KIND_COUNT] = {
    [HD_ALL_GATHER] = 64,   [HD_BROADCAST] = 8192,
#ifdef HD_MAYBE_OPEN_MPI
    [HD_ALL_REDUCE] = 1024, [HD_REDUCE] = 2048,    [HD_REDUCE_SCATTER] = 8192,
#else
    [HD_ALL_REDUCE] = 64, [HD_REDUCE] = 64,      [HD_REDUCE_SCATTER] = 256,
#endif
};

enum hd_levels_setting hd_levels_wanted(void)
{
    const char *text = getenv("HPCDIST_TWO_LEVEL"); /* config.py has refused other words */
    return !text || !*text || strcasecmp(text, "auto") == 0 ? HD_LEVELS_AUTO
           : strcasecmp(text, "on") == 0                    ? HD_LEVELS_ON
                                                            : HD_LEVELS_OFF;
}

/* The fewest bytes of a job that goes this way. */
static int64_t least(const hd_comm *c, const hd_job *j)
{
    const int64_t kib = measured_kib[j->kind];
    if (c->two_level != HD_LEVELS_AUTO)
        return c->two_level == HD_LEVELS_ON ? LEAST : INT64_MAX;
    return kib && c->split->even ? kib << 10 : INT64_MAX;
}

/* ---- memory ---- */

static int64_t head_bytes(const struct hd_levels *l)
{
    return (int64_t)hd_whole_pages(sizeof(hd_levels_line) * (size_t)l->ranks);
}

/* Tells all members where each of them is: the nodes are numbered by the first of their members, as
 * in the rails. */
static int seat(const hd_comm *c, struct hd_levels *l)
{
    const hd_levels_seat mine = {c->split->first, l->place};
    const int rc = MPI_Allgather(&mine, 2, MPI_INT, l->seats, 2, MPI_INT, c->mpi);
    for (int r = 0; r < c->size && !rc; r++) {
        hd_levels_seat *s = &l->seats[r];
        s->node = s->node == r ? l->nodes++ : l->seats[s->node].node;
    }
    return rc;
}

/* Orders the blocks. */
static void arrange(const hd_comm *c, struct hd_levels *l)
{
    const int cells = l->rails * l->nodes;
    memset(l->start, 0, (size_t)(cells + 1) * sizeof *l->start);
    for (int r = 0; r < c->size; r++) {
        const int cell = hd_levels_rail(l, r) * l->nodes + l->seats[r].node;
        const int before = l->seats[r].place / l->rails;
        l->at[r] = before;
        l->start[cell + 1] = before + 1; /* how many they are: the last one counts */
        l->most = before + 1 > l->most ? before + 1 : l->most;
    }
    for (int i = 0; i < cells; i++)
        l->start[i + 1] += l->start[i];
    for (int r = 0; r < c->size; r++)
        l->at[r] += l->start[hd_levels_rail(l, r) * l->nodes + l->seats[r].node];
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
    void *at;
    int rc;
    l->bytes = (size_t)(head_bytes(l) + PARTS * l->ranks * l->piece);
    if ((rc = hd_split_share(c, 1, l->bytes, &at)) || !at)
        return rc;
    if ((rc = seat(c, l))) {
        munmap(at, l->bytes);
    } else {
        arrange(c, l);
        l->lines = at;
        l->slots = (char *)at + head_bytes(l);
    }
    return rc;
}

static void discard(struct hd_levels *l)
{
    if (l) {
        free(l->seats);
        free(l->at);
    }
    free(l);
}

/* NULL: no memory. */
static struct hd_levels *levels_of(const hd_comm *c)
{
    const size_t size = (size_t)c->size;
    struct hd_levels *l = calloc(1, sizeof *l);
    if (!l)
        return l;
    l->seats = malloc(size * sizeof *l->seats);
    l->at = malloc((10 * size + 1) * sizeof *l->at); /* nodes and their rails are at most so many */
    if (!l->seats || !l->at) {
        discard(l);
        return NULL;
    }
    l->start = l->at + size;
    l->lists = l->start + size + 1;
    l->rail = c->split->rail;
    l->place = c->split->place;
    l->ranks = c->split->ranks;
    l->rails = c->split->rails;
    l->even = c->split->even;
    return l;
}

/* Collective, at the first tensor that can use it. Where memory cannot be had somewhere, all ranks
 * go on without it. */
static int open_levels(hd_comm *c, hd_job *j)
{
    const int ft = hd_ft_on(c->session);
    struct hd_levels *l;
    int64_t piece;
    int rc;

    if (ft && hd_making_begin(c->session))
        return hd_fail_broken(c, j);
    c->levels_asked = 1;
    l = levels_of(c);
    piece = l ? piece_of(c, l) : 0;
    hd_mpi_lock(c->session);
    rc = MPI_Allreduce(MPI_IN_PLACE, &piece, 1, MPI_INT64_T, MPI_MIN, c->mpi);
    if (!rc && piece) {
        l->piece = piece;
        rc = share(c, l);
        c->levels = l->lines ? l : NULL;
    }
    hd_mpi_unlock(c->session);
    if (ft)
        hd_making_end(c->session);
    if (c->levels)
        hd_ft_revoke_with(c, HD_RAIL, l->rail); /* whose making all have left */
    else
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

void hd_levels_free(hd_comm *c)
{
    discard(c->levels);
    c->levels = NULL;
}

int64_t hd_levels_bytes(const hd_comm *c)
{
    return c->levels && c->levels->lines ? (int64_t)c->levels->bytes : 0;
}

/* Whether a slot has room for all blocks that an operation puts there, a cache line each. */
static int takes_blocks(const hd_comm *c, const hd_job *j)
{
    const struct hd_levels *l = c->levels;
    return l->piece >= (c->size + l->nodes * l->most) * HD_LINE &&
           (l->even || j->kind != HD_ALL_GATHER || hd_has_allgatherv());
}

int hd_levels_takes(hd_comm *c, hd_job *j, int64_t n, int divided)
{
    if (!c->split || c->one_node || c->on_device || hd_ordered(c, j) ||
        n < least(c, j) / (int64_t)hd_itemsize(j->dtype) ||
        (j->redop >= 0 && !hd_reduce_kernel(j->redop, j->dtype)))
        return 0;
    if (!c->levels_asked && open_levels(c, j))
        return -1;
    if (!c->levels || (divided && !takes_blocks(c, j)))
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
