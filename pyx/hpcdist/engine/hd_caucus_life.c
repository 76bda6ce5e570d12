/* A group's caucus, from the meeting of each node's ranks to the group's end. */
#include <stdlib.h>
#include <sys/mman.h>

#include "hd_caucus.h"
#include "hd_caucus_life.h"
#include "hd_comm.h"
#include "hd_shared.h"

/* Whether some node has several of the members; each knows those of its own. */
static int has_several(const hd_comm *c, const hd_caucus *k, int *rc)
{
    int sides[2] = {0, 0}; /* the least, as the most of the negative; and the most */
    for (int r = 0; k && r < c->size; r++)
        sides[1] += c->node_slot[r] >= 0;
    sides[0] = -sides[1];
    *rc = MPI_Allreduce(MPI_IN_PLACE, sides, 2, MPI_INT, MPI_MAX, c->mpi);
    /* 0: without memory for the list, or on a node without a status page. */
    return !*rc && sides[0] < 0 && sides[1] > 1;
}

/* The node's memory, on all nodes or on none. Failing calls leave what others wait for undone: only
 * the first one that fails is reported. */
static int share(const hd_comm *c, hd_caucus *k)
{
    MPI_Comm node = MPI_COMM_NULL;
    void *at = NULL;
    int first = 0, ok, rc;

    while (c->node_slot[first] < 0)
        first++;
    if ((rc = MPI_Comm_split(c->mpi, first, c->rank, &node)))
        return rc;
    MPI_Comm_rank(node, &k->place);
    MPI_Comm_size(node, &k->ranks);
    k->bytes = hd_caucus_bytes(k->ranks);
    rc = hd_share(node, k->bytes, &at);
    MPI_Comm_free(&node);
    k->at = at;
    ok = at != NULL && !rc;
    if (!(rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, c->mpi)) && ok)
        madvise(at, k->bytes, MADV_DONTFORK); /* a child that outlives the group would keep it */
    else
        hd_caucus_close(k);
    return rc;
}

int hd_caucus_open(const hd_comm *c, hd_caucus **out)
{
    hd_caucus *k = calloc(1, sizeof *k);
    int rc;
    *out = NULL;
    if (has_several(c, k, &rc)) {
        k->speakers = MPI_COMM_NULL;
        if (!(rc = share(c, k)) && k->at)
            rc = MPI_Comm_split(c->mpi, k->place ? MPI_UNDEFINED : 0, c->rank, &k->speakers);
        if (!rc && k->at && k->speakers != MPI_COMM_NULL)
            rc = MPI_Comm_set_errhandler(k->speakers, MPI_ERRORS_RETURN);
        if (!rc && k->at) {
            *out = k;
            return rc;
        }
        hd_caucus_close(k);
    }
    free(k);
    return rc;
}

void hd_caucus_close(hd_caucus *k)
{
    if (k->at)
        munmap(k->at, k->bytes);
    k->at = NULL;
}

void hd_caucus_free(hd_caucus *k, int together)
{
    hd_caucus_close(k);
    if (together && k->speakers != MPI_COMM_NULL)
        MPI_Comm_free(&k->speakers);
    free(k);
}
