/* Fault tolerance of MPI (ULFM): communicators that a rank revokes, shrinks and agrees on after
 * another one has died. Open MPI has it where the job was started by `mpirun --with-ft ulfm`.
 *
 * A session that tolerates failures is *broken* once a rank of it has died: all its operations fail
 * from then on, in all groups and on all ranks, until the ranks that are left make a new one
 * (hd_recover.h). */
#ifndef HD_FT_H
#define HD_FT_H

#include <mpi.h>

#include "hd_base.h"
#include "hd_comm.h"

/* NULL: MPI is up and goes on without a rank that dies; else why not. Static storage. */
const char *hd_ft_missing(void);
/* Sessions opened from now on tolerate failures, if MPI does. */
void hd_ft_want(int yes);
/* A new session: whether it tolerates failures. */
void hd_ft_begin(hd_session *s);

int hd_ft_on(const hd_session *s);
/* Rank of the session; the watchdog has seen it die. Breaks the session, unless it was a spare, and
 * nothing has been committed. */
void hd_ft_lose(hd_session *s, int rank);
/* From here on the death of a spare breaks the session, too; at once if one has died. */
void hd_ft_committed(hd_session *s);
/* Marks the session as broken, and lets MPI calls of its groups that wait return with an error, on
 * all ranks. May be repeated. */
void hd_ft_break(hd_session *s);
/* From now on `part` is revoked with the group; MPI_COMM_NULL: none any more. All ranks must have
 * left the call that made it. */
void hd_ft_revoke_with(hd_comm *c, enum hd_part which, MPI_Comm part);
/* A rank of this node has broken the session: one that waits for it on a page does not see what MPI
 * does. */
int hd_ft_told(const hd_session *s);
/* Looks for deaths on other nodes, as far as MPI knows of any, and whether they have broken the
 * session. */
void hd_ft_look(hd_session *s);
/* After an error of MPI, or none: whether a rank has died, or called reconfigure. Waits a moment
 * for the watchdog to see which one died. */
int hd_ft_explains(hd_session *s, int error);
/* In a job that a death ends, where MPI knows of deaths all the same. Whether the error tells of
 * one in the group; says of which ranks: "rank 3". */
int hd_ft_say_failed(const hd_comm *c, int error, hd_text *t);
/* Another rank has seen one die: breaks the session, and waits a moment as above. */
void hd_ft_hear(hd_session *s);
/* The request is still active: it could match a message of a rank that lives. */
int hd_ft_pending(int error);
/* "rank 3 of the job died", say, or that the ranks reconfigure without a death. */
void hd_ft_say_why(const hd_session *s, hd_text *t);
void hd_ft_why(const hd_session *s, char *text, size_t room);
/* All ranks that are left have met: these are the others that died. */
void hd_ft_settle(hd_session *s, const int *left, int n);
/* The number of ranks lost; the first `room` of them. */
int hd_ft_lost(const hd_session *s, int *ranks, int room);

/* Blocks until all ranks that are left have called it; a new communicator of them, on all of them
 * or on none. */
int hd_ft_shrink(MPI_Comm comm, MPI_Comm *left);
/* After a collective call over `from` that makes a communicator, on all its ranks: MPI_SUCCESS on
 * all that live, or an error on all, this rank's own or another one's. Until then no rank may
 * revoke what it has made: Open MPI 5.0.11 crashes on a rank that is still in the call. */
int hd_ft_made(MPI_Comm from, int error);
/* The same; frees the communicator if this rank has one and another one has not. */
int hd_ft_made_all(MPI_Comm from, int error, MPI_Comm *made);

/* MPI_Comm_create_group; but it ends with an error if a rank dies meanwhile. */
int hd_ft_create_group(const hd_session *s, MPI_Comm from, MPI_Group group, int tag,
                       MPI_Comm *made);

/* While the ranks that are left make a new session: a communicator on which they wait for each
 * other, and that all of them have: hd_ft_made(). It is revoked if a rank has died since they began
 * to shrink the old one. */
void hd_ft_guard(MPI_Comm comm);
void hd_ft_unguard(MPI_Comm comm);

#endif
