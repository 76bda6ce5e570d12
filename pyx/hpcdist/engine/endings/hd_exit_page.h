/* The status page at the end of the process: it outlives its session, because the exit handler
 * looks at it. */
#ifndef HD_EXIT_PAGE_H
#define HD_EXIT_PAGE_H

#include "hd_comm.h"

/* The exit handler will look at this session's page ... */
void hd_exit_follow(hd_session *s);
/* ... and keeps the page, or frees it if it is another session's. */
void hd_exit_unfollow(hd_session *s);
int hd_exit_rank(void);             /* as the page shows this rank; -1: there is no page */
int hd_exit_others_run(void);       /* whether any other rank may still be running */
void hd_exit_set_finalizing(void);  /* this rank begins MPI_Finalize */
int hd_exit_others_work(void);      /* whether another process of the node lives, and has not */
void hd_exit_set_aborted(void);     /* without a launcher the others' watchdogs end them */
void hd_exit_unlink_segments(void); /* names of shared memory that the node's ranks left behind */
/* Without a launcher: this process waits, at its end, for the others ... */
void hd_exit_watch_begin(void);
/* ... and is ended here if it waits for a dead one. */
void hd_exit_watch(void);

#endif
