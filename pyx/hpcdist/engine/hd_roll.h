/* The roll call: the members of a group to be meet by messages, under a deadline, before they make calls of MPI's
 * that block until all have come. All hear the same verdict. */
#ifndef HD_ROLL_H
#define HD_ROLL_H

#include "hd_engine.h"

typedef struct hd_roll {
    MPI_Comm mpi;              /* where the messages go, with two of the engine's own tags, `tag` and the next */
    const hd_session *session; /* for hd_mpi_lock; NULL where MPI is still this thread's alone */
    int64_t *unread;           /* as hd_comm.unread; or NULL */
    const int *ranks;          /* the members, ranks of mpi: the first one leads */
    int n, rank, tag;
    uint64_t list;             /* what the members must agree on */
    int64_t until;             /* ns of hd_now() */
    char text[224];            /* why not */
} hd_roll;

/* HD_OK on all members, or an error on all of them that came. */
int hd_roll_call(hd_roll *r);

#endif
