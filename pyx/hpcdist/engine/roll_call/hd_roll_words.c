/* What the members of a roll call say to each other: see hd_roll_words.h. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_outbox.h"
#include "hd_roll_words.h"
#include "hd_threads.h"

#define FLUSH_S 1.0 /* seconds for the last words to be gone */

/* Words that MPI had not taken when their roll call was over. */
static hd_outbox left;
static pthread_mutex_t left_mu = PTHREAD_MUTEX_INITIALIZER;

static void lock(const hd_roll *r)
{
    if (r->session)
        hd_mpi_lock(r->session);
}

static void unlock(const hd_roll *r)
{
    if (r->session)
        hd_mpi_unlock(r->session);
}

static void count(const hd_roll *r, int64_t n)
{
    if (r->unread)
        __atomic_add_fetch(r->unread, n, __ATOMIC_RELAXED);
}

static int fail_mpi(hd_roll *r, int rc, const char *call)
{
    hd_text t;
    hd_text_init(&t, r->text, sizeof r->text);
    hd_say(&t, "%s failed (error %d)", call, rc);
    r->mpi_error = rc;
    return HD_ERR_BACKEND;
}

int hd_roll_say(hd_roll *r, int to, int tag, const hd_word *w)
{
    int rc;
    pthread_mutex_lock(&left_mu);
    lock(r);
    count(r, hd_outbox_send(&left, r->mpi, w, sizeof *w, HD_OUTBOX_WHOLE, &to, 1, tag, &rc));
    unlock(r);
    pthread_mutex_unlock(&left_mu);
    return rc ? fail_mpi(r, rc, "MPI_Isend") : HD_OK;
}

int hd_roll_hear(hd_roll *r, int from, int tag, hd_word *w, int *there)
{
    MPI_Message message;
    MPI_Status st;
    int rc;
    lock(r);
    rc = MPI_Improbe(from, tag, r->mpi, there, &message, &st);
    if (!rc && *there)
        rc = MPI_Mrecv(w, (int)sizeof *w, MPI_BYTE, &message, MPI_STATUS_IGNORE);
    unlock(r);
    if (rc)
        return fail_mpi(r, rc, "MPI_Improbe");
    if (*there)
        count(r, -1);
    return HD_OK;
}

int64_t hd_roll_sweep(MPI_Comm mpi, int tag)
{
    int64_t n = 0;
    for (int up = 0; up < 2; up++, tag += 32) {
        MPI_Message message;
        MPI_Status st;
        hd_word w;
        int there = 0;
        while (!MPI_Improbe(MPI_ANY_SOURCE, tag, mpi, &there, &message, &st) && there &&
               !MPI_Mrecv(&w, (int)sizeof w, MPI_BYTE, &message, MPI_STATUS_IGNORE))
            n++;
    }
    return n;
}

void hd_roll_flush(const hd_roll *r)
{
    const int64_t until = hd_until(FLUSH_S);
    for (;;) {
        const struct timespec nap = {0, 50000};
        int gone;
        pthread_mutex_lock(&left_mu);
        lock(r);
        gone = !hd_outbox_unsent(&left); /* what has failed is never gone */
        unlock(r);
        pthread_mutex_unlock(&left_mu);
        if (gone || hd_now() > until)
            return;
        nanosleep(&nap, NULL);
    }
}

void hd_roll_name(hd_reason *reason, int32_t member)
{
    if (reason->missing < HD_ROLL_NAMED)
        reason->named[reason->missing] = member;
    reason->missing++;
}

static int by_number(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

void hd_roll_sort(hd_reason *reason)
{
    const int n = reason->missing < HD_ROLL_NAMED ? reason->missing : HD_ROLL_NAMED;
    qsort(reason->named, (size_t)n, sizeof *reason->named, by_number);
}

void hd_roll_explain(const hd_reason *reason, char *text, size_t room)
{
    const char *before = "no word from rank ";
    hd_text t;
    hd_text_init(&t, text, room);
    switch (reason->why) {
    case HD_ROLL_ALONE:
        hd_say(&t, "no word from rank %d, the group's first member", reason->who);
        before = ", and from rank ";
        break;
    case HD_ROLL_GAVE_UP:
        hd_say(&t, "rank %d gave up before all had arrived", reason->who);
        before = ": no word from rank ";
        break;
    case HD_ROLL_INTERRUPTED: hd_say(&t, "rank %d was interrupted", reason->who); return;
    case HD_ROLL_VAIN: hd_say(&t, "the default group is being reconfigured"); return;
    case HD_ROLL_CLOSED: hd_say(&t, "rank %d destroys that group", reason->who); return;
    case HD_ROLL_LISTS:
        hd_say(&t, "rank %d names other members, or another order, than rank %d", reason->who,
               reason->than);
        return;
    case HD_ROLL_LEVELS:
        hd_say(&t,
               "rank %d has entry check level %s, rank %d has %s; give HPCDIST_CHECK, or "
               "MPIOptions(check=...), the same value on all ranks",
               reason->than, hd_level_name((uint64_t)reason->levels[0]), reason->who,
               hd_level_name((uint64_t)reason->levels[1]));
        return;
    }
    for (int i = 0; i < reason->missing && i < HD_ROLL_NAMED; i++) {
        hd_say(&t, "%s%d", before, reason->named[i]);
        before = ", ";
    }
    if (reason->missing > HD_ROLL_NAMED)
        hd_say(&t, " and %d more", reason->missing - HD_ROLL_NAMED);
}
