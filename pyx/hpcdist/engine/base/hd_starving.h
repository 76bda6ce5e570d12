/* How long a thread that wants to run has waited for a core. On a machine with too few of them, or
 * beyond its container's share, a rank is silent though neither it nor the network has failed.
 * Source: man 5 proc_pid_schedstat; Linux counts a wait when it is over, so one that lasts is seen
 * by the thread's state and processor time. */
#ifndef HD_STARVING_H
#define HD_STARVING_H

#include <stdint.h>

typedef struct hd_starving {
    int tid;       /* 0: no look yet */
    int64_t begun; /* ns of the first look, and of the last one: */
    int64_t at;
    int64_t ran;                     /* ns of processor time */
    int64_t waited, waited_at_begin; /* ns, by the kernel's count */
    int64_t waits;                   /* ns of a wait that lasts */
} hd_starving;

/* The calling thread, as Linux numbers it. */
int hd_tid(void);

/* To be called several times a second. ns that this thread of the process has waited since the
 * first look, or since the look that found another thread here; 0 where the kernel does not tell.
 */
int64_t hd_starving_look(hd_starving *w, int tid);

#endif
