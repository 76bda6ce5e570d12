/* The members of a group, by nodes. Those that have the same place on their nodes are a *rail*, and
 * have a communicator; there are as many rails as the smallest node has members. See hd_split.c. */
#ifndef HD_SPLIT_H
#define HD_SPLIT_H

#include <mpi.h>
#include <stddef.h>

#include "hd_comm.h"

struct hd_split {
    int first;        /* of the members on this node */
    int place, ranks; /* this rank's among them */
    int rails, even;  /* even: all nodes have as many members */
    int most;         /* of a node's members */
    MPI_Comm rail; /* of the nodes in the order of their first members; MPI_COMM_NULL: this rank's
                    * place is beyond the rails */
};

/* Collective over the group, when it is made. c->split stays NULL on all ranks if no node has
 * several of them. Returns MPI's code. */
int hd_split_open(hd_comm *c);
/* Where all ranks have left the group, frees the communicator, too. */
void hd_split_free(hd_comm *c, int together);

/* Memory that the members on a node share, zero at first. *at is NULL on all ranks where one of
 * them cannot use it, or where memory or a communicator is missing. Collective over the group;
 * returns MPI's code. */
int hd_split_share(hd_comm *c, int can, size_t bytes, void **at);

#endif
