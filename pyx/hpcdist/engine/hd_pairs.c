#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_pairs.h"
#include "hd_report.h"
#include "hd_threads.h"

/* What one rank tells another about a tensor that travels between them. */
typedef struct part {
    int64_t n;
    uint64_t form;
} part;

_Static_assert(sizeof(part) == 2 * sizeof(int64_t), "a part travels as two integers");

int64_t hd_agreed(const hd_job *j)
{
    const hd_seg *own = j->kind == HD_SCATTER ? j->out : j->in;
    return j->pairwise ? (int64_t)hd_mix((uint64_t)j->count, own->form) : j->count;
}

static int fits(const part *told, const hd_seg *own)
{
    return told->n == own->n && (told->form == own->form || !told->form || !own->form);
}

/* Sizes that differ from rank to rank cannot be compared by a fingerprint: each sender tells each
 * receiver what it will send, and all ranks learn whether every pair agrees. */
int hd_verify_pairs(hd_comm *c, hd_job *j)
{
    static const char form[] = "the same number of elements in another shape or other strides";
    const int n = c->size;
    part *told = malloc(2 * (size_t)n * sizeof *told), *mine = told ? told + n : NULL;
    int rc = 0, ok = 1;
    char note[160] = "";

    if (!told) {
        hd_fail(j, HD_ERR_MEMORY, "no memory for %d counts", n);
        return j->code;
    }
    hd_mpi_lock(c->session);
    if (j->kind == HD_ALL_TO_ALL) {
        for (int r = 0; r < n; r++)
            mine[r] = (part){j->in[r].n, j->in[r].form};
        rc = MPI_Alltoall(mine, 2, MPI_INT64_T, told, 2, MPI_INT64_T, c->mpi);
        for (int r = 0; r < n && ok && !rc; r++) {
            if (fits(&told[r], &j->out[r]))
                continue;
            ok = 0;
            if (told[r].n == j->out[r].n)
                snprintf(note, sizeof note, "rank %d sends rank %d %s", r, c->rank, form);
            else
                snprintf(note, sizeof note, "rank %d sends %lld elements where rank %d expects %lld", r,
                         (long long)told[r].n, c->rank, (long long)j->out[r].n);
        }
    } else { /* gather and scatter: the root's list against each rank's own tensor */
        const hd_seg *own = j->kind == HD_GATHER ? &j->in[0] : &j->out[0];
        if (c->rank == j->root) {
            const hd_seg *list = j->kind == HD_GATHER ? j->out : j->in;
            for (int r = 0; r < n; r++)
                mine[r] = (part){list[r].n, list[r].form};
        }
        rc = MPI_Scatter(mine, 2, MPI_INT64_T, told, 2, MPI_INT64_T, j->root, c->mpi);
        if (!rc && !fits(&told[0], own)) {
            ok = 0;
            if (told[0].n == own->n)
                snprintf(note, sizeof note, "rank %d's list has for rank %d %s", j->root, c->rank, form);
            else
                snprintf(note, sizeof note, "rank %d's list has %lld elements for rank %d, whose tensor has %lld",
                         j->root, (long long)told[0].n, c->rank, (long long)own->n);
        }
    }
    free(told);
    if (!rc)
        rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, c->mpi);
    hd_mpi_unlock(c->session);
    if (hd_mpi_failed(j, rc, "exchange of counts"))
        return j->code;
    if (!ok) {
        char *texts = calloc((size_t)n + 1, HD_DESC), *me;
        hd_text t;
        if (!texts) {
            hd_fail(j, HD_ERR_MISMATCH, "sizes differ in %s", j->api);
            return j->code;
        }
        me = texts + (size_t)n * HD_DESC;
        hd_describe_here(me, j);
        t.at = me, t.room = HD_DESC, t.used = strlen(me);
        if (note[0])
            hd_say(&t, " (%s)", note);
        hd_mpi_lock(c->session);
        rc = MPI_Allgather(me, HD_DESC, MPI_CHAR, texts, HD_DESC, MPI_CHAR, c->mpi);
        hd_mpi_unlock(c->session);
        if (!hd_mpi_failed(j, rc, "MPI_Allgather"))
            hd_fail_mismatch(c, j, texts, HD_DESC);
        free(texts);
        return j->code;
    }
    return HD_OK;
}
