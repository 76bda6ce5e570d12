/* How the votes and letters of a check become one: see hd_ballot.h. */
#include <stddef.h>
#include <string.h>

#include "hd_ballot.h"
#include "hd_float_mode.h"
#include "hd_kernels.h"
#include "hd_types.h"

static void combine_votes(const uint64_t *in, uint64_t *inout)
{
    for (int i = 0; i < WENT; i++)
        if (in[i] > inout[i])
            inout[i] = in[i];
    inout[WENT] |= in[WENT];
    inout[STAYED] |= in[STAYED];
}

/* Writes a rank's part to where it belongs. Words that others `had` written there have parts of
 * both. */
static void overlay(const hd_letter *in, hd_span had, char *to)
{
    for (uint32_t at = in->from; at < in->till; at += sizeof(uint64_t)) {
        const size_t i = at - in->from;
        uint64_t word = 0, other;
        if (at >= had.from && at < had.till)
            memcpy(&word, to + i, sizeof word);
        memcpy(&other, in->data + i, sizeof other);
        word |= other;
        memcpy(to + i, &word, sizeof word);
    }
}

/* Puts together what two ranks bring. Between their parts may be those of other ranks, and two
 * ranks' parts may share a word. */
static void join(const hd_letter *in, hd_letter *inout)
{
    const size_t had = inout->till - inout->from, more = in->till - in->from;
    uint32_t from, till;
    char *to;

    if (!more)
        return;
    from = had && inout->from < in->from ? inout->from : in->from;
    till = inout->till > in->till ? inout->till : in->till;
    to = inout->data + (in->from - from);
    if (had && inout->from > from)
        memmove(inout->data + (inout->from - from), inout->data, had);
    if (!had) {
        memcpy(to, in->data, more);
    } else if (in->from >= inout->till) {
        memset(inout->data + (inout->till - from), 0, in->from - inout->till);
        memcpy(to, in->data, more);
    } else if (in->till <= inout->from) {
        memset(inout->data + (in->till - from), 0, inout->from - in->till);
        memcpy(to, in->data, more);
    } else {
        overlay(in, (hd_span){inout->from, inout->till}, to);
    }
    inout->from = from;
    inout->till = till;
}

/* Combines the part that both have; a rank brings more than is needed here. */
static void reduce(const hd_letter *in, hd_letter *inout)
{
    const uint32_t from = in->from > inout->from ? in->from : inout->from;
    uint32_t till = in->till < inout->till ? in->till : inout->till, ends;
    hd_float_mode mode;
    if (from >= till) {
        inout->from = inout->till = 0;
        return;
    }
    ends = till < inout->bytes ? till : inout->bytes; /* before what fills the last word */
    if (from > inout->from)
        memmove(inout->data, inout->data + (from - inout->from), till - from);
    inout->from = from;
    inout->till = till;
    if (ends <= from)
        return;
    mode = hd_float_mode_plain(); /* whatever the program has set in this thread */
    hd_reduce_kernel(inout->redop,
                     inout->dtype)(in->data + (from - in->from), inout->data, inout->data,
                                   (ends - from) / (int64_t)hd_itemsize(inout->dtype));
    if (mode)
        hd_float_mode_restore(mode);
}

/* The letters of ranks that make the same call agree in all but the part that they have. */
static void combine_letters(const hd_letter *in, hd_letter *inout)
{
    if (memcmp(in, inout, offsetof(hd_letter, from)) != 0) {
        memset(inout, 0, offsetof(hd_letter, data));
        return;
    }
    switch (inout->kind) {
    case HD_JOINED_LETTER: join(in, inout); return;
    case HD_REDUCED_LETTER: reduce(in, inout); return;
    default: return;
    }
}

size_t hd_ballot_bytes(const hd_first *f)
{
    return offsetof(hd_first, letter.data) + (f->letter.till - f->letter.from);
}

void hd_ballot_copy(hd_first *to, const hd_first *from) { memcpy(to, from, hd_ballot_bytes(from)); }

void hd_ballot_copy_part(hd_first *to, const hd_first *from, hd_span part)
{
    const hd_letter *l = &from->letter;
    const uint32_t begin = part.from > l->from ? part.from : l->from;
    const uint32_t end = part.till < l->till ? part.till : l->till;
    memcpy(to, from, offsetof(hd_first, letter.data));
    to->letter.from = begin < end ? begin : 0;
    to->letter.till = begin < end ? end : 0;
    memcpy(to->letter.data, l->data + (begin < end ? begin - l->from : 0),
           to->letter.till - to->letter.from);
}

void hd_ballot_no_letter(hd_first *f) { memset(&f->letter, 0, offsetof(hd_letter, data)); }

void hd_ballot_combine(const hd_first *in, hd_first *inout)
{
    combine_votes(in->vote, inout->vote);
    combine_letters(&in->letter, &inout->letter);
}
