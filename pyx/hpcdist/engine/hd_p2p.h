/* Internals of point to point: shared by hd_p2p.c, hd_poller.c and hd_envelope.c only. */
#ifndef HD_P2P_H
#define HD_P2P_H

#include "hd_engine.h"

#define TAG(user, kind) ((user) * 32 + (kind)) /* the element type, or one of the engine's own; 31 is not for messages */
#define TAG_LONG 30                            /* the rest of a long message, by its number */

_Static_assert((int)HD_NDTYPES <= (int)HD_ANNOUNCEMENT, "the dtype code has five bits of the tag");

static inline int hd_tag(const hd_job *j) { return TAG(j->tag, j->tag_kind ? j->tag_kind : j->dtype); }

/* One message, as hd_p2p.c sees it: begun, and tested until it is done. With the lock of MPI held.
 * A receive that is done has its bytes in j->got, and its sender in st. */
int hd_message_begin(hd_comm *c, hd_job *j);
int hd_message_test(hd_job *j, int *done, MPI_Status *st);
/* The request of a receive is done: what arrived? */
int hd_message_arrived(hd_job *j, int *done, MPI_Status *st);
/* A receive whose message is on its way: it cannot be cancelled. */
int hd_message_matched(const hd_job *j);
void hd_message_free(hd_job *j);         /* when MPI is done with it */

/* A job that no thread waits for: 1 if it has ended, in time or not. */
int hd_p2p_look_after(hd_job *j);
void hd_p2p_end(hd_job *j);       /* its group is being destroyed */

#endif
