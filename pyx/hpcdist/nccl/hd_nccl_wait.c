/* Waiting for a communicator that was made with blocking=0. */
#include "hd_nccl.h"

#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int hd_nccl_settle(const hd_nccl *table, ncclComm_t comm, double seconds)
{
    double end = now() + seconds;
    struct timespec nap = {0, 2000};
    int state = HD_NCCL_SUCCESS, rc;

    for (;;) {
        rc = table->async_error(comm, &state);
        if (rc != HD_NCCL_SUCCESS)
            return rc;
        if (state != HD_NCCL_IN_PROGRESS || now() > end)
            return state;
        nanosleep(&nap, NULL);
        if (nap.tv_nsec < 1000000)
            nap.tv_nsec *= 2;
    }
}
