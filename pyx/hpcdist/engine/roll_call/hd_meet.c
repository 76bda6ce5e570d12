/* MPI_Comm_idup does not block, but a rank that has called it cannot take that back: a duplicate
 * that waits for a missing rank is completed when that rank arrives. So each rank keeps the
 * duplicate, and a later attempt goes on with it. A rank that arrives late may then find it
 * complete while others have given up. A roll call over the duplicate decides. */
#include <stdio.h>
#include <stdlib.h>

#include "hd_base.h"
#include "hd_job.h"
#include "hd_meet.h"
#include "hd_roll.h"

typedef struct attempt {
    struct attempt *next;
    MPI_Comm from, made;
    MPI_Request req;
} attempt;

static attempt *attempts; /* a group of all ranks is started by one thread at a time: it holds
                           * the GIL in between */

static attempt *attempt_of(MPI_Comm from)
{
    attempt *a = attempts;
    while (a && a->from != from)
        a = a->next;
    if (!a && (a = calloc(1, sizeof *a))) {
        *a = (attempt){.next = attempts,
                       .from = from,
                       .made = MPI_COMM_NULL,
                       .req = MPI_REQUEST_NULL};
        if (MPI_Comm_idup(from, &a->made, &a->req)) {
            free(a);
            return NULL;
        }
        attempts = a;
    }
    return a;
}

static void forget(attempt *gone)
{
    attempt **a = &attempts;
    while (*a != gone)
        a = &(*a)->next;
    *a = gone->next;
    free(gone);
}

static int await(MPI_Request *req, int64_t until)
{
    hd_waiter w;
    hd_waiter_init(&w, 0, -1);
    for (;;) {
        int done = 0, ev;
        if (MPI_Test(req, &done, MPI_STATUS_IGNORE))
            return HD_ERR_BACKEND;
        if (done)
            return HD_OK;
        ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(NULL))
            return HD_ERR_INTERRUPT;
        if ((ev & HD_WAIT_CLOCK) && hd_now() >= until)
            return HD_ERR_TIMEOUT;
    }
}

static int call_roll(attempt *a, int64_t until, char *text, size_t room)
{
    hd_roll roll = {.mpi = a->made, .until = until, .tag = 1};
    int *ranks, code;

    MPI_Comm_set_errhandler(a->made, MPI_ERRORS_RETURN);
    MPI_Comm_rank(a->made, &roll.rank);
    MPI_Comm_size(a->made, &roll.n);
    if (!(ranks = malloc((size_t)roll.n * sizeof *ranks)))
        return HD_ERR_MEMORY;
    for (int i = 0; i < roll.n; i++)
        ranks[i] = i;
    roll.ranks = ranks;
    code = hd_roll_call(&roll);
    free(ranks);
    if (code)
        snprintf(text, room, "%s", roll.text);
    return code;
}

int hd_meet(MPI_Comm from, int64_t until, MPI_Comm *made, char *text, size_t room)
{
    attempt *a = attempt_of(from);
    int code;

    snprintf(text, room, "MPI_Comm_idup failed");
    if (!a)
        return HD_ERR_BACKEND;
    if ((code = await(&a->req, until))) {
        if (code != HD_ERR_BACKEND)
            snprintf(text, room, "not all ranks have arrived");
        return code;
    }
    if ((code = call_roll(a, until, text, room)))
        return code;
    *made = a->made;
    forget(a);
    return HD_OK;
}
