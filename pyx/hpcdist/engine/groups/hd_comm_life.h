/* Communicators are created, drained and freed. */
#ifndef HD_COMM_LIFE_H
#define HD_COMM_LIFE_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

#include "hd_comm.h"
#include "hd_page_life.h"
#include "hd_poller.h"

/* Of a duplicate of `from`. */
int hd_comm_open(MPI_Comm from, hd_session *s, const char *name, double timeout, int check,
                 hd_comm **out, char *text, size_t room);
/* Of members of `parent`, in that order: takes the communicator of MPI that they have made. */
int hd_comm_open_part(hd_comm *parent, MPI_Comm made, const int *ranks, const char *name,
                      double timeout, int check, hd_comm **out, char *text, size_t room);
/* *met: all members have agreed to make the group, also where an error follows. */
int hd_comm_create_group(hd_comm *parent, const int *ranks, int n, int tag, const char *name,
                         double timeout, int check, int *met, hd_comm **out, char *text,
                         size_t room);
void hd_comm_release(hd_comm *c); /* the last Python owner has gone */
int hd_comm_free(hd_comm *c, int drained, enum hd_parting how);
/* 1: nothing is in flight; 0 also if MPI is not up. */
int hd_comm_drain(hd_comm *c, double seconds);
int64_t hd_comm_unread(hd_comm *c); /* of this rank: see hd_comm.unread */

/* Brackets every use of a group's session or MPI outside its lane. 0: the group is being destroyed,
 * and must not be used. The counter goes up first: hd_comm_free sets `closing` and then waits for
 * it. */
static inline void hd_comm_exit(hd_comm *c)
{
    __atomic_sub_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&hd_callers, 1, __ATOMIC_SEQ_CST);
}
static inline int hd_comm_enter(hd_comm *c, int begins)
{
    __atomic_add_fetch(&hd_callers, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&c->closing, __ATOMIC_SEQ_CST) <
        (begins ? HD_COMM_CLOSING : HD_COMM_CLOSED))
        return 1;
    hd_comm_exit(c);
    return 0;
}
void hd_comm_close(hd_comm *c, enum hd_closing how);

#endif
