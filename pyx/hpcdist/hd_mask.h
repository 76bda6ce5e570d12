/* Which signals hpcdist's own threads take: whatever makes one of them includes this. */
#ifndef HD_MASK_H
#define HD_MASK_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

/* Blocks the signals in this thread, and so in those that it makes, until it sets *before again:
 * they are for the program's threads, Python's main thread above all. A fault is not. Blocked, it
 * would end the process silently, even where faulthandler would tell of it. */
static inline void hd_mask_signals(sigset_t *before)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    sigset_t others;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, before);
}

#endif
