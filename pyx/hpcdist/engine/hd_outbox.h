/* Messages of the engine's own that nobody waits for: their text stays until MPI is done with it. */
#ifndef HD_OUTBOX_H
#define HD_OUTBOX_H

#include <mpi.h>
#include <stddef.h>

typedef struct hd_outbox {
    struct hd_parcel *first;
} hd_outbox;

/* Both are called where MPI may be: under hd_mpi_lock.
 * Sends to n ranks. How many sends were begun; *rc: of the one that failed, then none follow, or MPI_SUCCESS. */
int hd_outbox_send(hd_outbox *box, MPI_Comm comm, const void *text, size_t bytes, const int *to, int n, int tag, int *rc);
/* Frees what has gone. 1: all has. */
int hd_outbox_tidy(hd_outbox *box);

#endif
