/* The end of the job: a rank that leaves with an error must not leave the others waiting. */
#define _GNU_SOURCE
#include <mpi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "hd_abort.h"
#include "hd_early.h"
#include "hd_exit_page.h"
#include "hd_last_words.h"
#include "hd_pmi.h"
#include "hd_recorder_file.h"

#define TICKS 30    /* of 0.1 s: that long the process may still end by itself */
#define WAITS 0x100 /* beside a status: they count only while no other process works */

static void end_process(int code)
{
    if (!code)
        hd_rec_remove();
    _exit(code);
}

static void *end_later(void *how)
{
    const struct timespec tick = {0, 100000000};
    const int status = (int)(intptr_t)how, waits = status & WAITS;
    for (int alone = 0; alone < TICKS; alone = waits && hd_exit_others_work() ? 0 : alone + 1)
        nanosleep(&tick, NULL);
    end_process(status & ~WAITS);
    return NULL;
}

static void begin(int how)
{
    pthread_t t;
    if (pthread_create(&t, NULL, end_later, (void *)(intptr_t)how) == 0)
        pthread_detach(t);
}

void hd_end_process_soon(int code) { begin(code); }
void hd_end_process_after_others(int code) { begin(code | WAITS); }

void hd_abort(int code, const char *why)
{
    int up = 0, down = 0;
    if (code <= 0 || code > 255)
        code = 1;
    /* First, because what follows may wait for a reader of stdout, and MPI_Abort itself can
     * hang. */
    hd_end_process_soon(code);
    hd_exit_unlink_segments();
    hd_rec_dump();
    hd_last_words(why);
    hd_until_read();
    if (hd_pmi_active())
        hd_exit_set_aborted();
    MPI_Initialized(&up);
    MPI_Finalized(&down);
    if (up && !down)
        MPI_Abort(MPI_COMM_WORLD, code);
    else if (!up)
        hd_end_job_early(code);
    _exit(code);
}

static void *failing_main(void *arg)
{
    int64_t ns = (int64_t)(intptr_t)arg;
    struct timespec ts = {ns / 1000000000, ns % 1000000000};
    nanosleep(&ts, NULL);
    hd_abort(1, "[hpcdist] the process did not end after its error: aborting the job");
    return NULL;
}

void hd_failing(double grace_s)
{
    pthread_t t;
    if (pthread_create(&t, NULL, failing_main, (void *)(intptr_t)(int64_t)(grace_s * 1e9)) == 0)
        pthread_detach(t);
}
