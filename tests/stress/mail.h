/* Messages between threads, in the place of MPI's: they keep the order between two ranks and take a random while. */
#ifndef MAIL_H
#define MAIL_H

#include <mpi.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "harness.h"
#include "hd_base.h"

/* A message is no longer than what Open MPI sends at once between processes of a machine: see hd_rounds.c. */
enum { MOST = 1024, LANES = 64, LONGEST_LETTER = 4096 };

typedef struct letter {
    struct letter *next;
    int from, tag, n;
    int64_t ready; /* ns */
    char data[LONGEST_LETTER];
} letter;

typedef struct box {
    pthread_mutex_t mu;
    letter *first, **last;
    int64_t ready; /* of the last one: nothing overtakes it */
} box;

static box *boxes; /* by receiver, sender modulo LANES */
static uint64_t sent[MOST], heard[MOST];
static int slow_post = 1;
static int (*mail_to)(MPI_Comm comm, int rank); /* which rank of all that is; NULL: itself */
static __thread int me;
static __thread chance luck;

static inline void open_boxes(int ranks)
{
    boxes = calloc((size_t)ranks * LANES, sizeof *boxes);
    for (int i = 0; i < ranks * LANES; i++) {
        pthread_mutex_init(&boxes[i].mu, NULL);
        boxes[i].last = &boxes[i].first;
    }
}

int MPI_Isend(const void *data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *req)
{
    box *b = &boxes[(mail_to ? mail_to(comm, to) : to) * LANES + me % LANES];
    letter *l = malloc(sizeof *l);
    (void)type;
    *l = (letter){.from = me, .tag = tag, .n = n};
    if (n > (int)sizeof l->data)
        abort();
    memcpy(l->data, data, (size_t)n);
    __atomic_add_fetch(&sent[me], 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&b->mu);
    l->ready = slow_post ? hd_now() + (int64_t)draw(&luck, draw(&luck, 20) ? 20000 : 20000000) : 0;
    if (l->ready < b->ready)
        l->ready = b->ready;
    b->ready = l->ready;
    *b->last = l;
    b->last = &l->next;
    pthread_mutex_unlock(&b->mu);
    *req = MPI_REQUEST_NULL;
    return MPI_SUCCESS;
}

/* Takes the first letter that fits and is there out of a box. */
static inline letter *take(box *b, int from, int tag)
{
    letter *found = NULL;
    pthread_mutex_lock(&b->mu);
    for (letter **at = &b->first; *at; at = &(*at)->next) {
        letter *l = *at;
        if ((from != MPI_ANY_SOURCE && l->from != from) || l->tag != tag)
            continue;
        if (l->ready <= (slow_post ? hd_now() : 0)) {
            if (!(*at = l->next))
                b->last = at;
            found = l;
        }
        break;
    }
    pthread_mutex_unlock(&b->mu);
    return found;
}

int MPI_Improbe(int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *st)
{
    (void)comm, (void)st;
    if (slow_post && !draw(&luck, 200000))
        nap_us((long)draw(&luck, 450000)); /* stopped */
    *message = NULL;
    if (from != MPI_ANY_SOURCE)
        *message = take(&boxes[me * LANES + from % LANES], from, tag);
    else
        for (int lane = 0; lane < LANES && !*message; lane++)
            *message = take(&boxes[me * LANES + lane], from, tag);
    *flag = *message != NULL;
    return MPI_SUCCESS;
}

int MPI_Mrecv(void *data, int n, MPI_Datatype type, MPI_Message *message, MPI_Status *st)
{
    letter *l = *message;
    (void)type;
    memcpy(data, l->data, (size_t)(l->n < n ? l->n : n));
    if (st != MPI_STATUS_IGNORE)
        st->bytes = l->n;
    free(l);
    __atomic_add_fetch(&heard[me], 1, __ATOMIC_RELAXED);
    return MPI_SUCCESS;
}

int MPI_Get_count(const MPI_Status *st, MPI_Datatype type, int *n) { return (void)type, *n = (int)st->bytes, MPI_SUCCESS; }

/* Of a receive for which there is nothing. */
int MPI_Cancel(MPI_Request *req) { return (void)req, MPI_SUCCESS; }
int MPI_Wait(MPI_Request *req, MPI_Status *st) { return (void)st, free(*req), *req = MPI_REQUEST_NULL, MPI_SUCCESS; }

/* Prints the messages, and returns those that one rank sent and received, at most over all ranks. */
static inline uint64_t report(int ranks)
{
    uint64_t total = 0, most = 0;
    for (int i = 0; i < ranks; i++) {
        const uint64_t n = sent[i] + heard[i];
        total += sent[i];
        most = n > most ? n : most;
    }
    printf("%d ranks, %llu messages, at most %llu of one rank", ranks, (unsigned long long)total,
           (unsigned long long)most);
    return most;
}

#endif
