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

/* The letters of ranks that make the same call have the same head. */
static void combine_letters(const hd_letter *in, hd_letter *inout)
{
    hd_float_mode mode;
    int64_t n;
    if (memcmp(in, inout, offsetof(hd_letter, data)) != 0) {
        memset(inout, 0, offsetof(hd_letter, data));
        return;
    }
    switch (inout->kind) {
    case HD_JOINED_LETTER:
        for (uint32_t i = 0; i < inout->bytes; i++)
            inout->data[i] |= in->data[i];
        return;
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
    return offsetof(hd_first, letter.data) + HD_LETTER_WORDS(f->letter.bytes);
}

void hd_ballot_copy(hd_first *to, const hd_first *from) { memcpy(to, from, hd_ballot_bytes(from)); }

void hd_ballot_combine(const hd_first *in, hd_first *inout)
{
    combine_votes(in->vote, inout->vote);
    combine_letters(&in->letter, &inout->letter);
}
