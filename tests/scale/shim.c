/* MPI for the engine's files inside SMPI: see shim.h.
 *
 * SMPI's own nonblocking all-reduce, which a new context id takes, is linear. Here it is the recursive doubling of
 * MPICH and Open MPI for short messages: the ranks beyond the largest power of two give their part to a neighbour and
 * get the result back. */
#include "shim.h"
/* What is called here is SMPI's. */
#undef nanosleep
#undef MPI_Isend
#undef MPI_Irecv
#undef MPI_Improbe
#undef MPI_Mrecv
#undef MPI_Test
#undef MPI_Testall
#undef MPI_Iallreduce
#undef MPI_Iallgather
#undef MPI_Comm_idup
#undef MPI_Comm_dup

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STRETCH 10
#define NAP_NS 1000000 /* longer ones are none */

enum { FIRST_TAG = 100000, STEPS = 64, LONGEST_PART = 256 };
/* MPICH agrees on a new context id by an all-reduce of a mask of 2,048 bits. */
enum { CONTEXT_MASK = 256 };

shim_counts shim_counted;

/* One all-reduce of this rank. */
typedef struct reduce {
    struct reduce *next;
    uint64_t *mine, theirs[LONGEST_PART / 8], own[LONGEST_PART / 8];
    int n, bytes, rank, size, core; /* core: the largest power of two */
    int tag, step, mask;
    MPI_Op op;
    MPI_Datatype type;
    MPI_Comm comm;
    MPI_Request req; /* of the receive that it waits for */
    int folds;       /* it awaits a part before the doubling, */
    int done;
} reduce;

static reduce *reduces;
static int rounds;

struct letter {
    int from, tag;
};

int shim_nap(const struct timespec *t)
{
    struct timespec longer = *t;
    if (!t->tv_sec && t->tv_nsec < NAP_NS)
        longer.tv_nsec *= STRETCH;
    return smpi_nanosleep(&longer, NULL);
}

int shim_isend(const void *data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *req)
{
    shim_counted.sent++;
    shim_counted.bytes += (uint64_t)n;
    return MPI_Isend(data, n, type, to, tag, comm, req);
}

/* It counts from here on: a rank takes all that it is sent in a check, if it has left, in the next one. */
int shim_irecv(void *data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *req)
{
    shim_counted.heard++;
    return MPI_Irecv(data, n, type, from, tag, comm, req);
}

/* ---- probes: SMPI has none that takes the message out ---- */

int shim_improbe(int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *st)
{
    MPI_Status found;
    const int rc = MPI_Iprobe(from, tag, comm, flag, &found);
    struct letter *l;
    (void)st;
    if (rc || !*flag)
        return rc;
    if (!(l = malloc(sizeof *l)))
        return MPI_ERR_NO_MEM;
    *l = (struct letter){found.MPI_SOURCE, found.MPI_TAG};
    *message = (MPI_Message)l;
    return MPI_SUCCESS;
}

int shim_mrecv(void *data, int n, MPI_Datatype type, MPI_Message *message, MPI_Status *st)
{
    struct letter l = *(struct letter *)*message;
    free(*message);
    shim_counted.heard++;
    return MPI_Recv(data, n, type, l.from, l.tag, MPI_COMM_WORLD, st);
}

/* ---- the all-reduce ---- */

static int begin_send(reduce *r, int to, int step)
{
    MPI_Request req;
    /* SMPI copies short messages, so no rank has to wait for them. */
    int rc = shim_isend(r->mine, r->bytes, MPI_BYTE, to, r->tag + step, r->comm, &req);
    return rc ? rc : MPI_Request_free(&req);
}

static int begin_receive(reduce *r, int from, int step)
{
    return MPI_Irecv(r->theirs, r->bytes, MPI_BYTE, from, r->tag + step, r->comm, &r->req);
}

/* Begins the next step, or ends. */
static int advance(reduce *r)
{
    const int beyond = r->size - r->core;
    int rc;
    if (r->mask < r->core) {
        const int to = r->rank ^ r->mask;
        r->mask <<= 1;
        r->step++;
        return (rc = begin_send(r, to, r->step)) ? rc : begin_receive(r, to, r->step);
    }
    r->done = 1;
    return r->rank < beyond ? begin_send(r, r->core + r->rank, STEPS - 1) : MPI_SUCCESS;
}

static int begin(reduce *r)
{
    int rc;
    if (r->rank >= r->core) {
        rc = begin_send(r, r->rank - r->core, 0);
        return rc ? rc : begin_receive(r, r->rank - r->core, STEPS - 1);
    }
    r->folds = r->rank < r->size - r->core;
    return r->folds ? begin_receive(r, r->core + r->rank, 0) : advance(r);
}

static int progress(reduce *r)
{
    while (!r->done) {
        int there = 0;
        int rc = MPI_Test(&r->req, &there, MPI_STATUS_IGNORE);
        if (rc || !there)
            return rc;
        shim_counted.heard++;
        if (r->rank >= r->core) {
            memcpy(r->mine, r->theirs, (size_t)r->bytes);
            r->done = 1;
            break;
        }
        if ((rc = MPI_Reduce_local(r->theirs, r->mine, r->n, r->type, r->op)) || (rc = advance(r)))
            return rc;
    }
    return MPI_SUCCESS;
}

int shim_iallreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request *req)
{
    reduce *r = calloc(1, sizeof *r);
    int each;
    (void)in;
    MPI_Type_size(type, &each);
    if (!r || n * each > LONGEST_PART)
        return MPI_ERR_NO_MEM;
    r->mine = out ? out : r->own;
    r->n = n;
    r->bytes = n * each;
    r->type = type;
    r->op = op;
    r->comm = comm;
    r->mask = 1;
    r->tag = FIRST_TAG + rounds++ * STEPS;
    MPI_Comm_rank(comm, &r->rank);
    MPI_Comm_size(comm, &r->size);
    for (r->core = 1; 2 * r->core <= r->size;)
        r->core *= 2;
    r->next = reduces;
    reduces = r;
    *req = (MPI_Request)(void *)r;
    return begin(r);
}

int shim_iallgather(const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype of, MPI_Comm comm,
                    MPI_Request *req)
{
    (void)in, (void)n, (void)type, (void)out, (void)m, (void)of, (void)comm, (void)req;
    fprintf(stderr, "the ranks disagree\n");
    return MPI_ERR_OTHER;
}

int shim_test(MPI_Request *req, int *flag, MPI_Status *st)
{
    for (reduce **at = &reduces; *at; at = &(*at)->next) {
        reduce *r = *at;
        int rc;
        if ((MPI_Request)(void *)r != *req)
            continue;
        if ((rc = progress(r)))
            return rc;
        if ((*flag = r->done)) {
            *at = r->next;
            free(r);
            *req = MPI_REQUEST_NULL;
        }
        return MPI_SUCCESS;
    }
    return MPI_Test(req, flag, st);
}

int shim_testall(int n, MPI_Request *req, int *flag, MPI_Status *st)
{
    (void)st;
    *flag = 1;
    for (int i = 0; i < n; i++) {
        int done = 1, rc = req[i] == MPI_REQUEST_NULL ? MPI_SUCCESS : shim_test(&req[i], &done, MPI_STATUS_IGNORE);
        if (rc)
            return rc;
        *flag &= done;
    }
    return MPI_SUCCESS;
}

/* ---- communicators: one is enough, as no two uses share a tag ---- */

int shim_idup(MPI_Comm comm, MPI_Comm *copy, MPI_Request *req)
{
    *copy = comm;
    return shim_iallreduce(MPI_IN_PLACE, NULL, CONTEXT_MASK / 8, MPI_UINT64_T, MPI_MIN, comm, req);
}

int shim_dup(MPI_Comm comm, MPI_Comm *copy) { return *copy = comm, MPI_SUCCESS; }
