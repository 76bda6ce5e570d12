/* How the votes and letters of a check become one: see hd_ballot.h. */
#include <stddef.h>
#include <string.h>

#include "hd_ballot.h"
#include "hd_float_mode.h"
#include "hd_kernels.h"
#include "hd_types.h"

static void combine_votes(const uint64_t *in, uint64_t *inout)
{
    for (int i = 0; i < VOTE; i++)
        if (in[i] > inout[i])
            inout[i] = in[i];
}

/* Puts together what two ranks bring. Between their parts may be those of other ranks, and two
 * ranks' parts may share a word. */
static void join(const hd_letter *in, hd_letter *inout)
{
    const size_t had = inout->till - inout->from, more = in->till - in->from;
    uint32_t from, till;
    uint64_t word, other;

    if (!more)
        return;
    from = had && inout->from < in->from ? inout->from : in->from;
    till = inout->till > in->till ? inout->till : in->till;
    if (!had) {
        memset(inout->data, 0, till - from);
    } else {
        memmove(inout->data + (inout->from - from), inout->data, had);
        memset(inout->data, 0, inout->from - from);
        memset(inout->data + (inout->till - from), 0, till - inout->till);
    }
    for (size_t at = 0; at < more; at += sizeof word) {
        char *to = inout->data + (in->from - from) + at;
        memcpy(&word, to, sizeof word);
        memcpy(&other, in->data + at, sizeof other);
        word |= other;
        memcpy(to, &word, sizeof word);
    }
    inout->from = from;
    inout->till = till;
}

/* The letters of ranks that make the same call agree in all but the part that they have. */
static void combine_letters(const hd_letter *in, hd_letter *inout)
{
    hd_float_mode mode;
    int64_t n;
    if (memcmp(in, inout, offsetof(hd_letter, from)) != 0) {
        memset(inout, 0, offsetof(hd_letter, data));
        return;
    }
    switch (inout->kind) {
    case HD_JOINED_LETTER: join(in, inout); return;
    case HD_REDUCED_LETTER:
        n = inout->bytes / (int64_t)hd_itemsize(inout->dtype);
        mode = hd_float_mode_plain(); /* whatever the program has set in this thread */
        hd_reduce_kernel(inout->redop, inout->dtype)(in->data, inout->data, n);
        if (mode)
            hd_float_mode_restore(mode);
        return;
    default: return;
    }
}

size_t hd_ballot_bytes(const hd_first *f)
{
    return offsetof(hd_first, letter.data) + (f->letter.till - f->letter.from);
}

void hd_ballot_copy(hd_first *to, const hd_first *from) { memcpy(to, from, hd_ballot_bytes(from)); }

void hd_ballot_no_letter(hd_first *f) { memset(&f->letter, 0, offsetof(hd_letter, data)); }

int hd_ballot_has_letter(const hd_first *f)
{
    const hd_letter *l = &f->letter;
    return l->kind != HD_NO_LETTER && l->from == 0 && l->till == HD_LETTER_WORDS(l->bytes);
}

void hd_ballot_combine(const hd_first *in, hd_first *inout)
{
    combine_votes(in->vote, inout->vote);
    combine_letters(&in->letter, &inout->letter);
}
