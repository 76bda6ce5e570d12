/* The members of a group, by nodes: what the entry check and the operations between nodes have in
 * common. The communicator of the first rail is that of the ranks which speak for their nodes in
 * the check: MPI's communicators are few. That of a node's ranks lives as long as memory is shared
 * out. */
#include <stdlib.h>
#include <sys/mman.h>

#include "hd_comm.h"
#include "hd_ft.h"
#include "hd_shared.h"
#include "hd_split.h"

static void count(const hd_comm *c, hd_split *s)
{
    while (s->first < c->rank && c->node_slot[s->first] < 0)
        s->first++;
    for (int r = s->first; r < c->size; r++) {
        s->ranks += c->node_slot[r] >= 0;
        s->place += c->node_slot[r] >= 0 && r < c->rank;
    }
}

int hd_split_open(hd_comm *c)
{
    hd_split *s = calloc(1, sizeof *s);
    int sides[2] = {0, 0}, rc; /* of all nodes' members, the least, as the most of the negative; and
                                * the most */
    if (s) {
        s->rail = MPI_COMM_NULL;
        count(c, s);
        sides[1] = s->ranks;
        sides[0] = -sides[1];
    }
    rc = MPI_Allreduce(MPI_IN_PLACE, sides, 2, MPI_INT, MPI_MAX, c->mpi);
    /* 0: without memory for the struct, or on a node without a status page. */
    if (!rc && sides[0] < 0 && sides[1] > 1) {
        s->rails = -sides[0];
        s->most = sides[1];
        s->even = s->rails == s->most;
        /* Not by c->rank: with nodes {0, 3} and {1, 2} the second rail would be the other way
         * round. */
        rc = MPI_Comm_split(c->mpi, s->place < s->rails ? s->place : MPI_UNDEFINED, s->first,
                            &s->rail);
        if (!rc && s->rail != MPI_COMM_NULL)
            rc = MPI_Comm_set_errhandler(s->rail, MPI_ERRORS_RETURN);
        c->split = s;
        return rc;
    }
    free(s);
    return rc;
}

void hd_split_free(hd_comm *c, int together)
{
    hd_split *s = c->split;
    c->split = NULL;
    if (s && together && s->rail != MPI_COMM_NULL)
        MPI_Comm_free(&s->rail);
    free(s);
}

/* Whether it is so on all ranks. */
static int everywhere(const hd_comm *c, int ok, int *rc)
{
    *rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, c->mpi);
    return !*rc && ok;
}

int hd_split_share(hd_comm *c, int can, size_t bytes, void **at)
{
    MPI_Comm node = MPI_COMM_NULL;
    int rc = MPI_Comm_split(c->mpi, c->split->first, c->rank, &node), ok = can && !rc;

    *at = NULL;
    if (everywhere(c, ok, &rc)) {
        MPI_Comm_set_errhandler(node, MPI_ERRORS_RETURN);
        hd_ft_revoke_with(c, HD_NODE, node);
        ok = hd_share(node, bytes, at) == MPI_SUCCESS && *at;
        hd_ft_revoke_with(c, HD_NODE, MPI_COMM_NULL);
        ok = everywhere(c, ok, &rc);
        if (*at && ok) {
            madvise(*at, bytes, MADV_DONTFORK); /* a child that outlives the group would keep it */
        } else if (*at) {
            munmap(*at, bytes);
            *at = NULL;
        }
    }
    if (node != MPI_COMM_NULL)
        MPI_Comm_free(&node);
    return rc;
}
