/* The memory of a check's rounds, and the operation of the first one: see hd_ballot.h. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "hd_ballot.h"
#include "hd_float_mode.h"
#include "hd_kernels.h"
#include "hd_types.h"

_Static_assert(offsetof(hd_first, letter.data) % sizeof(uint64_t) == 0, "whole words");
_Static_assert(sizeof(hd_first) % sizeof(uint64_t) == 0, "whole words");

static MPI_Datatype type;
static MPI_Op op;
static int ready;

hd_ballot *hd_ballot_new(void)
{
    hd_ballot *b = calloc(1, sizeof *b);
    if (b)
        b->req[0] = b->req[1] = MPI_REQUEST_NULL;
    return b;
}

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
        mode = hd_float_mode_plain(); /* of whichever thread MPI calls this in */
        hd_reduce_kernel(inout->redop, inout->dtype)(in->data, inout->data, n);
        if (mode)
            hd_float_mode_restore(mode);
        return;
    default: return;
    }
}

void hd_ballot_combine(const hd_first *in, hd_first *inout)
{
    combine_votes(in->vote, inout->vote);
    combine_letters(&in->letter, &inout->letter);
}

/* One element of MPI's is a whole round. */
static void combine(void *in, void *inout, int *n, MPI_Datatype *of)
{
    (void)of;
    for (int i = 0; i < *n; i++)
        hd_ballot_combine((const hd_first *)in + i, (hd_first *)inout + i);
}

int hd_ballots_init(void)
{
    int rc = MPI_SUCCESS;
    if (ready ||
        (rc = MPI_Type_contiguous(sizeof(hd_first) / sizeof(uint64_t), MPI_UINT64_T, &type)))
        return rc;
    if ((rc = MPI_Type_commit(&type)) || (rc = MPI_Op_create(combine, 1, &op)))
        MPI_Type_free(&type);
    ready = !rc;
    return rc;
}

void hd_ballots_free(void)
{
    int down = 0;
    if (!ready)
        return;
    ready = 0;
    MPI_Finalized(&down);
    if (down)
        return;
    MPI_Op_free(&op);
    MPI_Type_free(&type);
}

int hd_ballot_begin(hd_ballot *b, MPI_Comm mpi)
{
    b->begun = 1;
    return MPI_Iallreduce(MPI_IN_PLACE, &b->first, 1, type, op, mpi, &b->req[0]);
}
