/* Calls whose data travels in letters, or is just too long for that. */
#ifndef LETTERS_H
#define LETTERS_H

#include <stdint.h>
#include <string.h>

#include "hd_ballot.h"
#include "hd_caucus.h"
#include "hd_job.h"
#include "hd_kinds.h"
#include "hd_rounds.h"
#include "hd_types.h"
#include "mail.h"
#include "sums.h"

static int ranks, each = 1; /* in all, on each node */

/* Of data on one rank; blocks are for at most so many ranks. */
enum { MOST_BYTES = HD_LETTER + 1024, FEW_RANKS = 16 };

/* As in hd_carry.c for MPICH: how many KiB a letter may have between two nodes of one rank and of several. */
static const struct form {
    int kind, in_blocks, kib, shared_kib;
} forms[] = {
    {HD_ALL_REDUCE, 0, 32, 64}, {HD_REDUCE, 0, 64, 64},  {HD_BROADCAST, 0, 8, 32}, {HD_REDUCE_SCATTER, 1, 64, 64},
    {HD_ALL_GATHER, 1, 16, 64}, {HD_SCATTER, 1, 16, 32}, {HD_GATHER, 1, 16, 64},
};
enum { FORMS = sizeof forms / sizeof *forms, WHOLE_FORMS = 3 };

typedef struct call {
    const struct form *form;
    int64_t op, own[MOST_BYTES / 8], data[MOST_BYTES / 8];
    hd_seg list[FEW_RANKS];
} call;

static int64_t longest(const struct form *f)
{
    const int64_t others = (ranks + each - 1) / each - 1;
    const int64_t kib = each > 1 ? f->shared_kib : f->kib, room = each > 1 ? (int64_t)hd_caucus_room(each) : HD_LETTER;
    int64_t most = (kib << 10) / (others > 1 ? others : 1);
    if (most < HD_SHORT_LETTER || others >= HD_ROUNDS_DIRECT)
        most = HD_SHORT_LETTER;
    return room < most ? room : most;
}

static int blocks_of(const struct form *f) { return f->in_blocks ? ranks : 1; }

/* Whether the data of this call fits into a letter. */
static int fits(const call *x, const hd_job *j)
{
    return j->count * blocks_of(x->form) * (int64_t)hd_itemsize(j->dtype) <= longest(x->form);
}

/* Of bytes: the ranks' parts share words, and where they are long, need several messages. */
static void contribute_bytes(void *to, int64_t op, int rank, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ((uint8_t *)to)[i] = (uint8_t)(part(op, rank, i) * 0x9e3779b97f4a7c15 >> 56) | 1;
}

static hd_seg at(const void *data, int64_t n) { return (hd_seg){.ptr = (char *)data, .n = n}; }

/* A list of one block of `data` for each rank. */
static hd_seg *blocks(call *x, void *data, int64_t n)
{
    for (int r = 0; r < ranks; r++)
        x->list[r] = at((char *)data + r * n, n);
    return x->list;
}

static void prepare_sum(call *x, hd_job *j)
{
    const int64_t n = j->count * blocks_of(x->form);
    const int in_place = j->kind == HD_ALL_REDUCE;
    contribute(in_place ? x->data : x->own, x->op, me, n);
    j->nin = !in_place;
    j->in1 = at(x->own, n);
    j->out1 = at(x->data, j->count);
}

static void prepare_move(call *x, hd_job *j)
{
    const int64_t n = j->count, all = n * blocks_of(x->form);
    j->in1 = at(x->own, n);
    j->out1 = at(x->data, n);
    if (j->kind == HD_BROADCAST && me == j->root)
        contribute_bytes(x->data, x->op, me, n);
    if (j->kind == HD_ALL_GATHER || j->kind == HD_GATHER) {
        contribute_bytes(x->own, x->op, me, n);
        j->nin = 1;
        j->out1.n = j->kind == HD_ALL_GATHER ? all : 0;
    }
    if (j->kind == HD_GATHER && me == j->root) {
        j->out = blocks(x, x->data, n);
        j->nout = ranks;
    }
    if (j->kind == HD_SCATTER && me == j->root) {
        contribute_bytes(x->own, x->op, me, all);
        j->in = blocks(x, x->own, n);
        j->nin = ranks;
    }
}

/* Of lengths around those of letters; the same on all ranks that make call `op`. */
static void prepare(call *x, hd_job *j, int64_t op)
{
    chance all = chance_of(7, (uint64_t)op);
    const struct form *f = &forms[draw(&all, ranks <= FEW_RANKS ? FORMS : WHOLE_FORMS)];
    const int sums = f->kind == HD_ALL_REDUCE || f->kind == HD_REDUCE || f->kind == HD_REDUCE_SCATTER;
    const int64_t each_one = (sums ? 8 : 1) * (f->in_blocks ? ranks : 1);
    const int64_t few = HD_SHORT_LETTER / each_one, many = longest(f) / each_one;
    const int64_t lengths[] = {1, 1 + (int64_t)draw(&all, (uint64_t)many), few, few + 1, many, many + 1};
    memset(x, 0, sizeof *x);
    x->op = op;
    x->form = f;
    j->kind = f->kind;
    j->root = (int)draw(&all, (uint64_t)ranks);
    j->redop = sums ? HD_SUM : -1;
    j->dtype = sums ? HD_INT64 : HD_UINT8;
    j->count = lengths[draw(&all, 6)];
    j->nin = 0;
    j->nout = 1;
    j->in = &j->in1;
    j->out = &j->out1;
    (sums ? prepare_sum : prepare_move)(x, j);
}

/* What the outputs become. */
static void result(const call *x, const hd_job *j, int64_t *want)
{
    const int64_t n = j->count, first = j->kind == HD_REDUCE_SCATTER ? me * n : 0;
    const int at_root = j->kind == HD_REDUCE || j->kind == HD_GATHER;
    int64_t all[MOST_BYTES / 8];
    if (at_root && me != j->root)
        return;
    for (int64_t i = 0; i < n && j->redop >= 0; i++)
        want[i] = total(x->op, ranks, first + i);
    if (j->kind == HD_BROADCAST)
        contribute_bytes(want, x->op, j->root, n);
    for (int r = 0; r < ranks && (j->kind == HD_ALL_GATHER || j->kind == HD_GATHER); r++)
        contribute_bytes((char *)want + r * n, x->op, r, n);
    if (j->kind == HD_SCATTER) {
        contribute_bytes(all, x->op, j->root, n * ranks);
        memcpy(want, (char *)all + me * n, (size_t)n);
    }
}

/* Whether the data is what it must be: the result, or, also after an error, still what it was; and
 * nothing else has been written. */
static int is_right(const call *x, const hd_job *j)
{
    int64_t want[MOST_BYTES / 8] = {0};
    if (j->kind == HD_ALL_REDUCE)
        contribute(want, x->op, me, j->count);
    if (j->kind == HD_BROADCAST && me == j->root)
        contribute_bytes(want, x->op, me, j->count);
    if (j->checked.carried)
        result(x, j, want);
    return memcmp(x->data, want, sizeof want) == 0;
}

#endif
