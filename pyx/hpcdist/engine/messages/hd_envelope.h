/* How one message travels: begun, and tested until it is done. With the lock of MPI held. */
#ifndef HD_ENVELOPE_H
#define HD_ENVELOPE_H

#include <mpi.h>

#include "hd_job.h"
#include "hd_types.h"

/* The element type, or one of the engine's own; 31 is not for messages. */
#define TAG(user, kind) ((user) * 32 + (kind))
#define TAG_LONG 30 /* the rest of a long message, by its number */

_Static_assert((int)HD_NDTYPES <= (int)HD_WINDOW_REQUEST,
               "the dtype code has five bits of the tag");

static inline int hd_tag(const hd_job *j)
{
    return TAG(j->message.tag, j->message.tag_kind ? j->message.tag_kind : j->dtype);
}

int hd_message_begin(hd_comm *c, hd_job *j);
/* A receive that is done has its bytes in j->message.got, and its sender in st. */
int hd_message_test(hd_job *j, int *done, MPI_Status *st);
/* The request of a receive is done: what arrived? */
int hd_message_arrived(hd_job *j, int *done, MPI_Status *st);
/* A receive whose message is on its way: it cannot be cancelled. */
int hd_message_matched(const hd_job *j);
/* A receive of a message whose rest is only on its way once the receive has been tested. */
int hd_message_in_two(const hd_job *j);
void hd_message_free(hd_job *j); /* when MPI is done with it */
/* MPI may still touch the tensor of a job that has ended. */
int hd_p2p_unfinished(const hd_job *j);

#endif
