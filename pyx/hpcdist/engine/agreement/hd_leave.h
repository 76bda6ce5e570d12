/* How a rank leaves an entry check between nodes without an outcome: it says no in the second
 * round, tells the others why in a note, and does not wait. See hd_check_mpi.c. */
#ifndef HD_LEAVE_H
#define HD_LEAVE_H

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_post.h"
#include "hd_status.h"

/* Whether this rank may still give up. Otherwise the speaker of its node has said yes. */
int hd_leave_allowed(const hd_post *p);

/* Says no in the second round, unless this rank has already voted there. The others below do so,
 * too. */
void hd_leave_behind(hd_comm *c);
void hd_leave_early(hd_comm *c, hd_job *j, int what, double after); /* what: of the note */
/* A rank has gone without coming to this check: ranks of other nodes do not see that. */
int hd_leave_lost(hd_comm *c, hd_job *j, int rank, enum hd_gone how, double after);
/* A rank has destroyed the group, and comes to no check any more. */
int hd_leave_closed(hd_comm *c, hd_job *j, int rank, double after);
int hd_leave_refusing(hd_comm *c, const hd_job *j);
int hd_leave_late(hd_comm *c, hd_job *j, const hd_waiter *w); /* the time is over */
/* All ranks see that the ranks are apart: that one gave up the check before (-1: an earlier one),
 * from which others have gone on. */
void hd_leave_together(hd_comm *c, int rank);
int hd_leave_apart(hd_comm *c, hd_job *j); /* the ranks are apart, see hd_post_part() */
/* Another rank has abandoned the check: reports which, as far as that is known. */
int hd_leave_following(hd_comm *c, hd_job *j);
/* Waits so long for a note that says why; NULL: there is none. */
const hd_post_heard *hd_leave_reason(hd_comm *c, double seconds);

#endif
