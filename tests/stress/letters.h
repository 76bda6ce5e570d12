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

/* Bytes of sums and gathers; a gather has some of each of at most so many ranks. */
enum { MOST_BYTES = HD_LETTER + 64, FEW_RANKS = 16 };

typedef struct call {
    int gathers;
    int64_t op, own[MOST_BYTES / 8], data[MOST_BYTES / 8];
} call;

/* Bytes of a letter of all_reduce or all_gather: see hd_carry.c. */
static int64_t longest(int gathers)
{
    const int64_t others = (ranks + each - 1) / each - 1;
    const int64_t kib = each > 1 ? 32 : gathers ? 8 : 16, room = each > 1 ? (int64_t)hd_caucus_room(each) : HD_LETTER;
    int64_t most = (kib << 10) / (others > 1 ? others : 1);
    if (most < HD_SHORT_LETTER || others >= HD_ROUNDS_DIRECT)
        most = HD_SHORT_LETTER;
    return room < most ? room : most;
}

/* Whether the data of this call fits into a letter. */
static int fits(const call *x, const hd_job *j)
{
    return j->out1.n * (int64_t)hd_itemsize(j->dtype) <= longest(x->gathers);
}

/* What a rank brings to a gather. */
static void contribute_bytes(int64_t *to, int64_t op, int rank, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ((uint8_t *)to)[i] = (uint8_t)(part(op, rank, i) * 0x9e3779b97f4a7c15 >> 56) | 1;
}

/* Of bytes: the ranks' parts share words, and where they are long, need several messages. */
static void prepare_gather(call *x, hd_job *j)
{
    const int64_t most = longest(1) / ranks;
    chance luck_of_all = chance_of(7, (uint64_t)x->op);
    const int64_t lengths[] = {1, 1 + (int64_t)draw(&luck_of_all, (uint64_t)most), most, most + 1};
    j->kind = HD_ALL_GATHER;
    j->redop = -1;
    j->dtype = HD_UINT8;
    j->count = lengths[draw(&luck_of_all, 4)];
    j->nin = 1;
    j->in1 = (hd_seg){.ptr = (char *)x->own, .n = j->count};
    contribute_bytes(x->own, x->op, me, j->count);
}

static void prepare_sum(call *x, hd_job *j)
{
    const int64_t few = HD_SHORT_LETTER / 8, many = longest(0) / 8;
    const int64_t lengths[] = {1, few, few + 1, many, many + 1};
    j->kind = HD_ALL_REDUCE;
    j->redop = HD_SUM;
    j->dtype = HD_INT64;
    j->count = lengths[x->op % 5];
    j->nin = 0;
    contribute(x->data, x->op, me, j->count);
}

/* Sums of lengths around those of letters, and gathers; the same on all ranks that make call `op`. */
static void prepare(call *x, hd_job *j, int64_t op)
{
    memset(x->data, 0, sizeof x->data);
    x->op = op;
    x->gathers = ranks <= FEW_RANKS && op % 4 == 3;
    (x->gathers ? prepare_gather : prepare_sum)(x, j);
    j->nout = 1;
    j->out1 = (hd_seg){.ptr = (char *)x->data, .n = x->gathers ? j->count * ranks : j->count};
}

/* Whether the data is what it must be: the result, or, also after an error, still what it was. */
static int is_right(const call *x, const hd_job *j)
{
    static const int64_t nothing[MOST_BYTES / 8];
    int64_t want[MOST_BYTES / 8];
    if (!x->gathers && j->checked.carried)
        return right(x->data, x->op, ranks, j->count);
    if (!x->gathers) {
        contribute(want, x->op, me, j->count);
        return memcmp(x->data, want, (size_t)j->count * 8) == 0;
    }
    if (!j->checked.carried)
        return memcmp(x->data, nothing, (size_t)j->out1.n) == 0;
    for (int r = 0; r < ranks; r++) {
        contribute_bytes(want, x->op, r, j->count);
        if (memcmp((const char *)x->data + r * j->count, want, (size_t)j->count))
            return 0;
    }
    return 1;
}

#endif
