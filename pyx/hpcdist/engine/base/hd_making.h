/* Groups that are being made in a session that goes on after a death. Open MPI 5.0.11 may crash if
 * it hears of a revocation while a communicator is being made. So a recovery that knows of no death
 * revokes nothing before all threads of all ranks are outside, and none goes in meanwhile. */
#ifndef HD_MAKING_H
#define HD_MAKING_H

#include "hd_session.h"

/* Around the making of a group. hd_making_begin: HD_OK, or HD_ERR_FAILED: a rank of this node
 * recovers, and the group would be of no use. */
int hd_making_begin(hd_session *s);
void hd_making_end(hd_session *s);
/* Whether a rank of this node recovers. */
int hd_making_is_vain(const hd_session *s);
/* Whether a rank of this node that lives makes a group. */
int hd_making_goes_on(const hd_session *s);

/* This rank recovers: `how` is HD_DEATH or HD_NO_DEATH. Waits until its threads have ended what
 * they make, at most HD_MAKING_NS. */
void hd_making_stop(hd_session *s, uint32_t how);
/* It knows of no death, and breaks the session. */
void hd_making_broke(hd_session *s);

#define HD_MAKING_NS 2000000000

#endif
