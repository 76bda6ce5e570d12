/* Which ranks of a group that spans nodes are in a check. A rank tells what it knows to the ranks
 * that its post writes to: to all in a small group, at once and once; in a large one to two of them
 * every 50 ms, in turn, until a whole turn has brought nothing new. */
#ifndef HD_HERE_H
#define HD_HERE_H

#include <mpi.h>
#include <stdint.h>

#include "hd_outbox.h"

/* Also the message. */
typedef struct hd_list {
    uint64_t check;
    uint64_t bits[]; /* of the ranks that are in it */
} hd_list;

typedef struct hd_here {
    MPI_Comm mpi;
    hd_outbox sent;
    const int *to; /* the ranks that this one writes to */
    int n_to, in_turn;
    hd_list *known, *heard; /* heard: memory for a message */
    int words;              /* of `bits` */
    int announced;          /* in the present check */
    int64_t told, until;    /* messages sent, and how many there will be if nothing new comes */
} hd_here;

/* HD_OK or HD_ERR_MEMORY; the caller sets mpi, to, n_to and in_turn. */
int hd_here_open(hd_here *h, int ranks);
void hd_here_close(hd_here *h);

/* `now` is the check that this rank is in. */
void hd_here_announce(hd_here *h, uint64_t now, int rank); /* this rank is in it */
/* Sends what is due: returns the number of sends begun; under hd_mpi_lock. */
int hd_here_tell(hd_here *h, uint64_t now);
int hd_here_read(hd_here *h); /* one message, under hd_mpi_lock; 0: there is none */
int hd_here_has(const hd_here *h, uint64_t now, int rank);
int hd_here_any(const hd_here *h, uint64_t now);
int hd_here_later(const hd_here *h, uint64_t now); /* some rank is in a later check */

#endif
