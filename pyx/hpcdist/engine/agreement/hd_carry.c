/* Collectives of a few bytes per rank. On a node each rank puts its contribution, in order of
 * destination, beside its fingerprint; when all ranks have joined the check, each takes what is for
 * it, and combines in the order of the ranks where it reduces, so that all get the same bits.
 * Between nodes the contributions lie in a letter, which the rounds of the check combine
 * (hd_ballot.c).
 *
 * A contribution is complete before the first output is written, so an input may lie in any
 * output. */
#include <string.h>

#include "hd_base.h"
#include "hd_carry.h"
#include "hd_comm.h"
#include "hd_kernels.h"
#include "hd_order.h"
#include "hd_page.h"
#include "hd_page_pairs.h"
#include "hd_post.h"
#include "hd_scale.h"
#include "hd_types.h"

static size_t bytes_of(const hd_job *j, hd_seg s) { return (size_t)s.n * hd_itemsize(j->dtype); }

static int64_t sum_of(const hd_job *j, const hd_seg *list, int n)
{
    int64_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += (int64_t)bytes_of(j, list[i]);
    return sum;
}

/* Copies; an empty tensor may have no address. Returns the end of the source or destination in the
 * page. */
static char *put(const hd_job *j, char *to, hd_seg from)
{
    if (from.n)
        memcpy(to, from.ptr, bytes_of(j, from));
    return to + bytes_of(j, from);
}

static const char *get(const hd_job *j, hd_seg to, const char *from)
{
    if (to.n)
        memcpy(to.ptr, from, bytes_of(j, to));
    return from + bytes_of(j, to);
}

/* ---- contributions ---- */

static char *give_to_sum(const hd_comm *c, const hd_job *j, char *to)
{
    const int inputs = j->kind != HD_ALL_REDUCE || j->nin, n = inputs ? j->nin : j->nout;
    const hd_seg *list = inputs ? j->in : j->out;
    for (int i = 0; i < n; i++) {
        hd_scale_before(c, j, to, list[i].ptr, list[i].n);
        to += bytes_of(j, list[i]);
    }
    return to;
}

static char *give_inputs(const hd_comm *c, const hd_job *j, char *to)
{
    (void)c;
    for (int i = 0; i < j->nin; i++)
        to = put(j, to, j->in[i]);
    return to;
}

static char *give_root(const hd_comm *c, const hd_job *j, char *to)
{
    return c->rank == j->root ? put(j, to, j->out[0]) : to;
}

/* ---- results ---- */

/* What lies `at` bytes into a rank's contribution. */
static const char *of(const hd_given *from, int rank, size_t at)
{
    return from->at + ((size_t)rank * from->apart + at - from->skipped);
}

/* Combines what lies `at` bytes into each contribution. */
static void combine(const hd_comm *c, const hd_job *j, const hd_given *from, size_t at, hd_seg to)
{
    const hd_reduce_fn reduce = hd_reduce_kernel(j->redop, j->dtype);
    if (!to.n)
        return;
    memcpy(to.ptr, of(from, 0, at), bytes_of(j, to));
    for (int r = 1; r < from->n; r++)
        reduce(of(from, r, at), to.ptr, to.ptr, to.n);
    hd_scale_after(c, j, to.ptr, to.n);
}

static void take_sums(const hd_comm *c, const hd_job *j, const hd_given *from)
{
    size_t at = 0;
    if (j->kind == HD_REDUCE && c->rank != j->root)
        return;
    for (int i = 0; i < j->nout; i++) {
        combine(c, j, from, at, j->out[i]);
        at += bytes_of(j, j->out[i]);
    }
}

/* Where the block for a rank lies in the contribution of a root, or of a rank whose blocks are
 * added up. */
static size_t block_at(const hd_job *j, int rank)
{
    return j->kind == HD_REDUCE_SCATTER && j->listed ? (size_t)sum_of(j, j->in, rank)
                                                     : (size_t)rank * bytes_of(j, j->out[0]);
}

static void take_own_sum(const hd_comm *c, const hd_job *j, const hd_given *from)
{
    combine(c, j, from, block_at(j, c->rank), j->out[0]);
}

static void take_from_root(const hd_comm *c, const hd_job *j, const hd_given *from)
{
    if (c->rank != j->root)
        get(j, j->out[0], of(from, j->root, 0));
}

static void take_all(const hd_comm *c, const hd_job *j, const hd_given *from)
{
    for (int r = 0; r < c->size; r++) {
        const char *at = of(from, r, 0);
        if (j->listed)
            for (int i = 0; i < j->nin; i++)
                at = get(j, j->out[(int64_t)i * c->size + r], at);
        else
            get(j, (hd_seg){.ptr = j->out[0].ptr + r * bytes_of(j, j->in[0]), .n = j->in[0].n}, at);
    }
}

static void take_at_root(const hd_comm *c, const hd_job *j, const hd_given *from)
{
    for (int r = 0; r < c->size && c->rank == j->root; r++)
        get(j, j->out[r], of(from, r, 0));
}

/* This rank's block of what rank r contributed for all ranks. */
static void take_block(const hd_comm *c, const hd_job *j, hd_seg to, const hd_given *from, int r)
{
    const int64_t before =
        j->uneven ? hd_page_pairs_before(c, from->parity, r, c->rank) : c->rank * to.n;
    get(j, to, of(from, r, (size_t)before * hd_itemsize(j->dtype)));
}

static void take_scattered(const hd_comm *c, const hd_job *j, const hd_given *from)
{
    take_block(c, j, j->out[0], from, j->root);
}

static void take_exchanged(const hd_comm *c, const hd_job *j, const hd_given *from)
{
    for (int r = 0; r < c->size; r++)
        take_block(c, j, j->out[r], from, r);
}

/* ---- which calls ---- */

/* Bytes of the longest contribution of an all_gather. */
static int64_t longest(const hd_comm *c, const hd_job *j)
{
    int64_t most = 0;
    for (int r = 0; r < c->size; r++) {
        int64_t sum = 0;
        for (int i = 0; i < j->nin; i++)
            sum += (int64_t)bytes_of(j, j->out[(int64_t)i * c->size + r]);
        most = sum > most ? sum : most;
    }
    return most;
}

/* Which nodes need which part of a letter. */
enum need { ALL_OF_IT, ALL_AT_ROOT, THEIR_BLOCKS };

/* By the MPI: Open MPI's calls read the peer's memory, and are faster than letters from fewer bytes
 * on. */
#ifdef HD_MAYBE_OPEN_MPI
#define KIB(kib, shared_kib, mpich, mpich_shared) kib, shared_kib
#else
#define KIB(open_mpi, open_mpi_shared, kib, shared_kib) kib, shared_kib
#endif

static const struct form {
    char *(*give)(const hd_comm *, const hd_job *, char *);
    void (*take)(const hd_comm *, const hd_job *, const hd_given *);
    int apart; /* in the letter of all each rank has a place of its own */
    enum need need;
    /* KiB of data for which a letter took no longer than MPI's call after the check, between two
     * nodes of one rank and of several: docs/performance.md. */
    int kib, shared_kib;
} forms[] = {
    [HD_ALL_REDUCE] = {give_to_sum, take_sums, 0, ALL_OF_IT, KIB(16, 32, 32, 64)},
    [HD_REDUCE] = {give_to_sum, take_sums, 0, ALL_AT_ROOT, KIB(4, 16, 64, 64)},
    [HD_REDUCE_SCATTER] = {give_to_sum, take_own_sum, 0, THEIR_BLOCKS, KIB(16, 32, 64, 64)},
    [HD_BROADCAST] = {give_root, take_from_root, 0, ALL_OF_IT, KIB(4, 8, 8, 32)},
    [HD_ALL_GATHER] = {give_inputs, take_all, 1, ALL_OF_IT, KIB(16, 32, 16, 64)},
    [HD_GATHER] = {give_inputs, take_at_root, 1, ALL_AT_ROOT, KIB(8, 32, 16, 64)},
    [HD_SCATTER] = {give_inputs, take_scattered, 0, THEIR_BLOCKS, KIB(8, 32, 16, 32)},
    [HD_ALL_TO_ALL] = {give_inputs, take_exchanged, 1, ALL_OF_IT, KIB(4, 32, 16, 32)},
};

/* Whether data of this call can lie in host memory beside a fingerprint, and be combined there. */
static int may_travel(const hd_comm *c, const hd_job *j)
{
    return j->kind != HD_BARRIER && !c->on_device &&
           (j->redop < 0 || hd_reduce_kernel(j->redop, j->dtype));
}

/* Bytes of this rank's contribution; where all ranks know the lengths of all, the longest. */
static int64_t contribution(const hd_comm *c, const hd_job *j)
{
    switch (j->kind) {
    case HD_ALL_REDUCE:
    case HD_BROADCAST: return sum_of(j, j->out, j->nout);
    case HD_ALL_GATHER: return j->listed ? longest(c, j) : (int64_t)bytes_of(j, j->in[0]);
    default: return sum_of(j, j->in, j->nin);
    }
}

int hd_carries(const hd_comm *c, const hd_job *j, hd_carry *out)
{
    int64_t bytes;
    if (!c->page || c->size == 1 || c->size > HD_CARRY_RANKS || (j->pairwise && !c->check) ||
        !may_travel(c, j))
        return 0;
    bytes = contribution(c, j);
    if (bytes > HD_CARRIED || (!j->pairwise && !bytes))
        return 0;
    out->small = !j->pairwise && bytes <= HD_SMALL;
    out->give = forms[j->kind].give;
    out->take = forms[j->kind].take;
    return 1;
}

/* ---- between nodes: letters ---- */

/* Whether each rank's contribution has a place of its own in the letter of all. Where the ranks'
 * order counts, those that are combined do as well, and each rank combines them itself. */
static int is_apart(const hd_comm *c, const hd_job *j)
{
    return forms[j->kind].apart || hd_ordered(c, j);
}

/* Bytes of a letter with the data of all ranks; 0: it cannot travel so. */
static int64_t bytes_of_all(const hd_comm *c, const hd_job *j)
{
    if (j->refusal.why || j->uneven || j->checked.checksum || !may_travel(c, j))
        return 0;
    if (is_apart(c, j))
        return c->size > HD_LETTER ? 0 : contribution(c, j) * c->size;
    if (j->kind == HD_SCATTER) /* only the root has inputs */
        return (int64_t)bytes_of(j, j->out[0]) * c->size;
    return contribution(c, j);
}

/* Each rank is a node of its own where none has several. */
static int nodes_of(const hd_comm *c) { return c->post->caucus ? c->post->caucus->nodes : c->size; }

static int node_of(const hd_comm *c, int rank)
{
    return c->post->caucus ? c->post->caucus->node_of[rank] : rank;
}

/* The blocks of that node's ranks, and those between them. */
static hd_span blocks_of(const hd_comm *c, const hd_job *j, int node)
{
    const hd_stretch s =
        c->post->caucus ? c->post->caucus->stretch[node] : (hd_stretch){node, node};
    return (hd_span){.from = (uint32_t)block_at(j, s.first) & ~7u,
                     .till = (uint32_t)HD_LETTER_WORDS(block_at(j, s.last + 1))};
}

/* Whether each node writes to all others. If not, nodes hand on what others need, in steps of
 * doubling. */
static int writes_to_all(const hd_comm *c) { return nodes_of(c) <= HD_ROUNDS_DIRECT; }

static hd_span needed(const hd_comm *c, const hd_job *j, const hd_letter *l, int node)
{
    const hd_span all = {0, (uint32_t)HD_LETTER_WORDS(l->bytes)}, nothing = {0, 0};
    const int whole = !writes_to_all(c) || (hd_ordered(c, j) && j->kind == HD_REDUCE_SCATTER);
    switch (whole ? ALL_OF_IT : forms[j->kind].need) {
    case THEIR_BLOCKS: return blocks_of(c, j, node);
    case ALL_AT_ROOT: return node_of(c, j->root) == node ? all : nothing;
    default: return all;
    }
}

/* Bytes of this call's letter, at most; the same on all ranks. Each node writes to all others, so
 * among more nodes letters are shorter; where it writes to some, in steps, they are short. */
static size_t most(const hd_comm *c, const hd_job *j)
{
    const hd_caucus *k = c->post->caucus;
    const struct form *f = &forms[j->kind];
    const size_t kib = (size_t)(k ? f->shared_kib : f->kib);
    const int others = nodes_of(c) - 1;
    size_t bytes = (kib << 10) / (size_t)(others > 1 ? others : 1);
    if (bytes < HD_SHORT_LETTER || !writes_to_all(c))
        bytes = HD_SHORT_LETTER;
    return k && k->room < bytes ? k->room : bytes;
}

/* Which part of the letter of all this rank brings. */
static void take_part(const hd_comm *c, const hd_job *j, size_t each, hd_letter *to)
{
    const size_t at = (size_t)c->rank * each;
    const int all = to->kind == HD_REDUCED_LETTER || (!each && c->rank == j->root);
    if (each || all) {
        to->from = (uint32_t)at & ~7u;
        to->till = (uint32_t)HD_LETTER_WORDS(at + (each ? each : to->bytes));
    }
}

/* Contributions that are combined on the way lie on each other, and so does a root's, which alone
 * gives something. */
static size_t apart(const hd_comm *c, const hd_job *j)
{
    return is_apart(c, j) ? (size_t)contribution(c, j) : 0;
}

void hd_letter_write(const hd_comm *c, const hd_job *j, hd_letter *to, hd_span *needs)
{
    const int64_t bytes = bytes_of_all(c, j);
    size_t each;
    char *end;
    memset(to, 0, offsetof(hd_letter, data));
    memset(needs, 0, HD_ROUNDS_DIRECT * sizeof *needs);
    if (!bytes || bytes > (int64_t)most(c, j))
        return;
    to->kind = j->redop >= 0 && !hd_ordered(c, j) ? HD_REDUCED_LETTER : HD_JOINED_LETTER;
    to->dtype = (uint8_t)j->dtype;
    to->redop = j->redop >= 0 ? (uint8_t)j->redop : 0;
    to->bytes = (uint32_t)bytes;
    for (int node = 0; writes_to_all(c) && node < nodes_of(c); node++)
        needs[node] = needed(c, j, to, node);
    each = apart(c, j);
    take_part(c, j, each, to);
    if (to->till == to->from)
        return;
    memset(to->data, 0, sizeof(uint64_t));
    end = forms[j->kind].give(c, j, to->data + ((size_t)c->rank * each - to->from));
    memset(end, 0, (size_t)(to->data + (to->till - to->from) - end));
}

int hd_letter_read(const hd_comm *c, const hd_job *j, const hd_letter *from)
{
    const hd_given all = {.at = from->data,
                          .apart = apart(c, j),
                          .skipped = from->from,
                          .n = hd_ordered(c, j) ? c->size : 1};
    if (from->kind == HD_NO_LETTER)
        return 0;
    forms[j->kind].take(c, j, &all);
    return 1;
}
