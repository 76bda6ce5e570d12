/* Spares: processes of the job that wait until a rank dies, and then take its number.
 *
 * A session's first `active` ranks are the default group's, the others are spares. All of them take
 * part in the agreement of the session's control communicator with which a recovery begins: a spare
 * begins it when the session opens, and an active rank when it recovers, or when it ends. So all
 * processes decide alike whether the job goes on.
 *
 * Before the first commit the active ranks have nothing to return to, and cannot recover. So the
 * death of a spare then breaks their session only at that commit: see hd_ft_committed(). */
#ifndef HD_SPARES_H
#define HD_SPARES_H

#include <mpi.h>

#include "hd_accord.h"
#include "hd_comm.h"

/* What a process gives to that agreement. One that goes on also says whether the groups are to be
 * made again; a spare says both. It says so by many bits: no word that is lost is taken for an end.
 */
enum { HD_ENDS = 0, HD_REBUILDS = 1, HD_LOSES = 2, HD_GOES_ON = (1 << HD_ACCORD_BITS) - 4 };

/* How many the job is to have: the same on all processes, which compare it. */
void hd_spares_want(int n);
int hd_spares_wanted(void);

int hd_spares_has(const hd_session *s); /* the session has any */
int hd_spares_is(const hd_session *s);  /* this process is one */

/* Who goes on as which rank. The lowest numbers of the dead are given to the spares, in order; then
 * the ranks close up.
 *   came_from: by rank of the n processes that are left, their former rank, in order
 *   active: of the former session
 *   who: by new rank, the process; by its rank among those that are left
 *   place: by new rank, whose number it has: its own former one, or that of a dead rank
 * Both have room for n. Returns how many ranks are active now; 0: none is left that was. */
int hd_spares_assign(const int *came_from, int n, int active, int *who, int *place);

/* This active rank ends. Waits up to that many seconds for the others, so that the spares end, too;
 * they do so later if not all have come by then. */
void hd_spares_farewell(hd_session *s, double seconds);

#endif
