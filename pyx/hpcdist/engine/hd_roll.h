/* The roll call: the members of a group to be meet by messages, under a deadline, before they make
 * MPI calls that block until all have arrived. All members get the same verdict. */
#ifndef HD_ROLL_H
#define HD_ROLL_H

#include <mpi.h>
#include <stdint.h>

#include "hd_comm.h"

typedef struct hd_roll {
    MPI_Comm mpi;              /* of the messages; uses two of the engine's own tags, `tag` and
                                * the next */
    const hd_session *session; /* for hd_mpi_lock; NULL while only this thread uses MPI */
    int64_t *unread;           /* as hd_comm.unread; or NULL */
    const int *ranks;          /* the members, ranks of mpi: the first one leads */
    int n, rank, tag;
    uint64_t list;  /* what the members must agree on */
    int64_t until;  /* ns of hd_now() */
    char text[224]; /* the error text */
} hd_roll;

/* HD_OK on all members, or an error on all members that arrived. */
int hd_roll_call(hd_roll *r);

#endif
