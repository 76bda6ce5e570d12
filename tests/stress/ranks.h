/* Ranks as processes, which are stopped, or as threads, which ThreadSanitizer sees. */
#ifndef RANKS_H
#define RANKS_H

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

enum { RANKS = 8 };

/* Stops one or two ranks at a time, mostly for a few milliseconds, until the run is over. */
static inline void stop_ranks(const pid_t *pids, int ranks, uint64_t seed, const int *over)
{
    chance c = chance_of(seed, 99);
    while (!__atomic_load_n(over, __ATOMIC_ACQUIRE)) {
        const int many = 1 + (int)draw(&c, 2);
        pid_t stopped[2];
        for (int i = 0; i < many; i++)
            kill(stopped[i] = pids[draw(&c, (uint64_t)ranks)], SIGSTOP);
        nap_us((long)draw(&c, draw(&c, 40) ? 4000 : 200000));
        for (int i = 0; i < many; i++)
            kill(stopped[i], SIGCONT);
        nap_us((long)draw(&c, draw(&c, 4) ? 2000 : 50000));
    }
}

/* Each calls rank_main with its number. 0: all ended well. */
static inline int run_processes(int ranks, uint64_t seed, const int *over, void *(*rank_main)(void *))
{
    pid_t pids[RANKS];
    const pid_t parent = getpid();
    int bad = 0, status;
    for (int r = 0; r < ranks; r++)
        if ((pids[r] = fork()) == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* a program that is killed leaves no rank behind */
            if (getppid() != parent)
                _exit(1);
            rank_main((void *)(intptr_t)r);
            _exit(0);
        }
    stop_ranks(pids, ranks, seed, over);
    for (int r = 0; r < ranks; r++) {
        wait(&status);
        bad |= status;
    }
    return bad;
}

static inline int run_threads(int ranks, void *(*rank_main)(void *))
{
    pthread_t all[RANKS];
    for (int r = 0; r < ranks; r++)
        if (pthread_create(&all[r], NULL, rank_main, (void *)(intptr_t)r))
            return 1;
    for (int r = 0; r < ranks; r++)
        pthread_join(all[r], NULL);
    return 0;
}

#endif
