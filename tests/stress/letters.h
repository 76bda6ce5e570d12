/* Calls whose data travels in letters, or is just too long for that. */
#ifndef LETTERS_H
#define LETTERS_H

#include <stdint.h>
#include <string.h>

#include "hd_ballot.h"
#include "hd_job.h"
#include "hd_kinds.h"
#include "hd_types.h"
#include "mail.h"
#include "sums.h"

static int ranks, each = 1; /* in all, on each node */

/* Elements, and the ranks whose gathers fit into a letter. */
enum { MOST_SUMMED = HD_LETTER / 8 + 1, GATHERED = 1, FEW_RANKS = 16 };

typedef struct call {
    int gathers;
    int64_t op, own[GATHERED], data[MOST_SUMMED + GATHERED * FEW_RANKS];
} call;

/* Bytes of an all_reduce's letter: see hd_carry.c. */
static int64_t longest(void)
{
    const int64_t most = (each > 1 ? 32 << 10 : 16 << 10) / ((ranks + each - 1) / each - 1);
    return most > HD_SHORT_LETTER ? most / 8 * 8 : HD_SHORT_LETTER;
}

/* Sums of lengths around those of letters, and gathers; the same on all ranks that make call `op`. */
static void prepare(call *x, hd_job *j, int64_t op)
{
    const int64_t few = HD_SHORT_LETTER / 8, many = longest() / 8;
    const int64_t lengths[] = {1, few, few + 1, many, many + 1};
    memset(x->data, 0, sizeof x->data);
    x->op = op;
    x->gathers = ranks <= FEW_RANKS && op % 7 == 6;
    j->kind = x->gathers ? HD_ALL_GATHER : HD_ALL_REDUCE;
    j->redop = x->gathers ? -1 : HD_SUM;
    j->count = x->gathers ? GATHERED : lengths[op % 5];
    j->nin = x->gathers;
    j->nout = 1;
    j->in1 = (hd_seg){.ptr = (char *)x->own, .n = GATHERED};
    j->out1 = (hd_seg){.ptr = (char *)x->data, .n = x->gathers ? GATHERED * ranks : j->count};
    contribute(x->gathers ? x->own : x->data, op, me, j->count);
}

/* Whether the data is what it must be: the result, or, also after an error, still this rank's own. */
static int is_right(const call *x, const hd_job *j)
{
    int64_t want[MOST_SUMMED];
    if (!j->checked.carried) {
        contribute(want, x->op, me, j->count);
        memset(want, 0, x->gathers ? sizeof want : 0);
        return memcmp(x->data, want, (size_t)j->count * 8) == 0;
    }
    if (!x->gathers)
        return right(x->data, x->op, ranks, j->count);
    for (int r = 0; r < ranks; r++) {
        contribute(want, x->op, r, GATHERED);
        if (memcmp(x->data + GATHERED * r, want, GATHERED * 8))
            return 0;
    }
    return 1;
}

#endif
