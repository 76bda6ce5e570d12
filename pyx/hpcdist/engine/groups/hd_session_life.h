/* A session opens and closes; the groups in it. */
#ifndef HD_SESSION_LIFE_H
#define HD_SESSION_LIFE_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

#include "hd_comm.h"
#include "hd_cpus.h"

/* Collective over all ranks of a communicator; they have `timeout` seconds to arrive. */
int hd_session_open(MPI_Comm from, double timeout, hd_quota quota, hd_session **out, char *text,
                    size_t room);
/* 1: from the arrival of all ranks to hd_session_opened(), which the caller of hd_session_open()
 * calls when it has made its group too. The calls in between block, and cannot time out. */
int hd_session_opening(void);
void hd_session_opened(void);
/* The same of ranks that are all here, on a communicator that the session then owns. */
int hd_session_reopen(MPI_Comm ctl, hd_quota quota, hd_session **out, char *text, size_t room);
void hd_session_ref(hd_session *s);
void hd_session_unref(hd_session *s);
int hd_session_is_last(const hd_session *s); /* the next hd_session_unref closes it */
int hd_session_rank(const hd_session *s);
int hd_session_size(const hd_session *s);
int hd_session_active(const hd_session *s); /* ranks of the default group; the others are spares */
/* Identity of this node, and this rank's slot. */
uint64_t hd_session_node(const hd_session *s, int *slot);
int hd_session_machine(const hd_session *s); /* ranks on this machine */
void hd_session_cpus(const hd_session *s, int *own, int *node);
void hd_session_adopt(hd_session *s, hd_comm *c); /* the watchdog watches c from now on */
void hd_session_forget(hd_session *s, hd_comm *c);

#endif
