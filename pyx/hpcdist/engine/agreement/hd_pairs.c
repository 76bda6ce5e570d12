/* Sizes that may differ from rank to rank, compared pair by pair. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_page.h"
#include "hd_pairs.h"
#include "hd_report.h"
#include "hd_threads.h"

_Static_assert(sizeof(hd_extent) == 2 * sizeof(int64_t), "an extent travels as two integers");

typedef struct comparison {
    hd_comm *c;
    hd_job *j;
    hd_extent *theirs, *mine; /* by rank */
    char note[160];           /* the first difference that this rank sees, or "" */
} comparison;

static const char FORM[] = "the same number of elements in another shape or other strides";

int64_t hd_agreed(const hd_job *j)
{
    const hd_seg *own = j->kind == HD_SCATTER ? j->out : j->in;
    return j->pairwise ? (int64_t)hd_mix((uint64_t)j->count, own->form) : j->count;
}

static int matches(const hd_extent *theirs, const hd_seg *own)
{
    return theirs->n == own->n && (theirs->form == own->form || !theirs->form || !own->form);
}

/* all_to_all: each rank tells each other one. Returns MPI's code. */
static int compare_all(comparison *x)
{
    const hd_job *j = x->j;
    const int me = x->c->rank;
    int rc;
    for (int r = 0; r < x->c->size; r++)
        x->mine[r] = (hd_extent){j->in[r].n, j->in[r].form};
    rc = MPI_Alltoall(x->mine, 2, MPI_INT64_T, x->theirs, 2, MPI_INT64_T, x->c->mpi);
    for (int r = 0; r < x->c->size && !x->note[0] && !rc; r++) {
        if (matches(&x->theirs[r], &j->out[r]))
            continue;
        if (x->theirs[r].n == j->out[r].n)
            snprintf(x->note, sizeof x->note, "rank %d sends rank %d %s", r, me, FORM);
        else
            snprintf(x->note, sizeof x->note,
                     "rank %d sends %lld elements where rank %d expects %lld", r,
                     (long long)x->theirs[r].n, me, (long long)j->out[r].n);
    }
    return rc;
}

/* gather and scatter: the root's list against each rank's own tensor. Returns MPI's code. */
static int compare_with_root(comparison *x)
{
    const hd_job *j = x->j;
    const int me = x->c->rank;
    const hd_seg *own = j->kind == HD_GATHER ? &j->in[0] : &j->out[0];
    int rc;
    if (me == j->root) {
        const hd_seg *list = j->kind == HD_GATHER ? j->out : j->in;
        for (int r = 0; r < x->c->size; r++)
            x->mine[r] = (hd_extent){list[r].n, list[r].form};
    }
    rc = MPI_Scatter(x->mine, 2, MPI_INT64_T, x->theirs, 2, MPI_INT64_T, j->root, x->c->mpi);
    if (rc || matches(&x->theirs[0], own))
        return rc;
    if (x->theirs[0].n == own->n)
        snprintf(x->note, sizeof x->note, "rank %d's list has for rank %d %s", j->root, me, FORM);
    else
        snprintf(x->note, sizeof x->note,
                 "rank %d's list has %lld elements for rank %d, whose tensor has %lld", j->root,
                 (long long)x->theirs[0].n, me, (long long)own->n);
    return rc;
}

/* Some pair differs: each rank tells all others what it called, and what it has seen. */
static int quote_all(const comparison *x)
{
    hd_comm *c = x->c;
    hd_job *j = x->j;
    hd_description *said = calloc((size_t)c->size + 1, sizeof *said), *mine;
    hd_text t;
    int rc;
    if (!said) {
        hd_fail(j, HD_ERR_MISMATCH, "sizes differ in %s", j->api);
        return j->code;
    }
    mine = said + c->size;
    hd_describe_call(mine, j);
    t = (hd_text){.at = mine->text, .room = HD_DESC, .used = strlen(mine->text)};
    if (x->note[0])
        hd_say(&t, " (%s)", x->note);
    hd_mpi_lock(c->session);
    rc = MPI_Allgather(mine, sizeof *mine, MPI_CHAR, said, sizeof *said, MPI_CHAR, c->mpi);
    hd_mpi_unlock(c->session);
    if (!hd_mpi_failed(j, rc, "MPI_Allgather"))
        hd_fail_mismatch(c, j, said);
    free(said);
    return j->code;
}

/* Sizes that differ from rank to rank cannot be compared by a fingerprint: each sender tells each
 * receiver what it will send, and all ranks learn whether every pair agrees. */
int hd_verify_pairs(hd_comm *c, hd_job *j)
{
    comparison x = {.c = c, .j = j};
    int rc, agree;

    const int many = j->kind == HD_ALL_TO_ALL, lists = many || c->rank == j->root ? c->size : 0;
    x.theirs = malloc((size_t)(lists + (many ? c->size : 1)) * sizeof *x.theirs);
    if (!x.theirs) {
        hd_fail(j, HD_ERR_MEMORY, "no memory for %d counts", c->size);
        return j->code;
    }
    x.mine = x.theirs + (many ? c->size : 1);
    hd_mpi_lock(c->session);
    rc = j->kind == HD_ALL_TO_ALL ? compare_all(&x) : compare_with_root(&x);
    agree = !x.note[0];
    if (!rc)
        rc = MPI_Allreduce(MPI_IN_PLACE, &agree, 1, MPI_INT, MPI_MIN, c->mpi);
    hd_mpi_unlock(c->session);
    free(x.theirs);
    if (hd_mpi_failed(j, rc, "exchange of counts"))
        return j->code;
    return agree ? HD_OK : quote_all(&x);
}
