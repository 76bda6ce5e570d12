/* The engine's own messages that no thread waits for: their text stays until MPI is done with
 * it. */
#ifndef HD_OUTBOX_H
#define HD_OUTBOX_H

#include <limits.h>
#include <mpi.h>
#include <stddef.h>

#define HD_OUTBOX_WHOLE INT_MAX /* bytes: one message */

typedef struct hd_outbox {
    struct hd_parcel *first, *last; /* those that MPI has not sent, in the order of their sends */
    int failed;                     /* those of which a send has failed: they are kept for ever */
} hd_outbox;

/* Both are called where MPI may be: under hd_mpi_lock.
 * Sends to n ranks, in messages of at most so many bytes. Returns the number of sends begun. *rc:
 * MPI_SUCCESS, or the error of the send that failed, after which no more are begun. */
int hd_outbox_send(hd_outbox *box, MPI_Comm comm, const void *text, size_t bytes, size_t most,
                   const int *to, int n, int tag, int *rc);
/* Frees messages that have gone, the earlier ones first. 1: all have. */
int hd_outbox_tidy(hd_outbox *box);
/* The same; 1: some have not, and may yet go. */
int hd_outbox_unsent(hd_outbox *box);

#endif
