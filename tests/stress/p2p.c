/* Point to point (hd_p2p.c): requests that the poller, those who wait and those who cancel look at together.
 *
 *   p2p SEED THREADS MESSAGES
 *
 * The messages are a stand-in for MPI's: each arrives after a random while, or never. Threads post them, leave them
 * to the poller, and wait for them, test them, take them back or drop them. Each ends once, with the outcome that it
 * must have, and in the end no job is left but those that were never received and could not be taken back.
 *
 * One more thread leaves posts with unsent messages to the poller (hd_unsent.c) and takes them again, sooner or later:
 * at any time one of both may use a post. */
#include <pthread.h>
#include <string.h>

#include "harness.h"
#include "hd_envelope.h"
#include "hd_p2p.h"
#include "hd_poller.h"
#include "hd_post.h"
#include "hd_unsent.h"

enum { THREADS = 16 };

struct stub_request {
    int64_t arrives; /* ns; INT64_MAX: never */
    int cancelled;
};

static hd_comm group;
static int slots[2];
static uint64_t seed, messages, wrong, made, freed, late;
static __thread chance luck;

/* ---- MPI's part ---- */

int hd_message_begin(hd_comm *c, hd_job *j)
{
    struct stub_request *r = calloc(1, sizeof *r);
    (void)c;
    r->arrives = draw(&luck, 8) ? hd_now() + (int64_t)draw(&luck, 300000) : INT64_MAX;
    if (j->kind == HD_SEND && r->arrives == INT64_MAX)
        r->arrives = hd_now();
    j->message.req = r;
    return MPI_SUCCESS;
}

int hd_message_test(hd_job *j, int *done, MPI_Status *st)
{
    *done = hd_now() >= j->message.req->arrives;
    st->MPI_SOURCE = 1;
    if (*done) {
        j->message.got = j->count;
        free(j->message.req);
        j->message.req = MPI_REQUEST_NULL;
    }
    return MPI_SUCCESS;
}

int hd_message_arrived(hd_job *j, int *done, MPI_Status *st) { return (void)st, j->message.got = j->count, *done = 1, 0; }
int hd_p2p_unfinished(const hd_job *j) { return j->message.req != MPI_REQUEST_NULL; }
int hd_message_matched(const hd_job *j) { return (void)j, 0; }
int hd_message_in_two(const hd_job *j) { return j->kind == HD_RECV && (uintptr_t)j >> 6 & 1; }
void hd_message_free(hd_job *j) { (void)j; }
int MPI_Cancel(MPI_Request *req) { return (*req)->cancelled = 1, 0; }
int MPI_Request_free(MPI_Request *req)
{
    free(*req);
    *req = MPI_REQUEST_NULL;
    return 0;
}
int MPI_Test_cancelled(const MPI_Status *st, int *flag) { return *flag = st->cancelled, 0; }
int MPI_Test(MPI_Request *req, int *done, MPI_Status *st)
{
    st->cancelled = hd_now() < (*req)->arrives;
    st->MPI_SOURCE = 1;
    *done = 1;
    free(*req);
    *req = MPI_REQUEST_NULL;
    return 0;
}
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *flag, MPI_Status *st)
{
    return (void)from, (void)tag, (void)comm, (void)st, *flag = 0, 0;
}

/* ---- threads ---- */

static void dispose(hd_job *j)
{
    if (hd_job_state(j) != HD_DONE || (j->code != HD_OK && j->code != HD_ERR_TIMEOUT && j->code != HD_ERR_BACKEND))
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    if (j->code)
        __atomic_add_fetch(&late, 1, __ATOMIC_RELAXED);
    hd_job_clear(j);
    free(j);
    __atomic_add_fetch(&freed, 1, __ATOMIC_RELAXED);
}

static void let_go(hd_job *j)
{
    if (__atomic_sub_fetch(&j->refs, 1, __ATOMIC_ACQ_REL) == 0)
        dispose(j);
}

static hd_job *begin(void)
{
    hd_job *j = calloc(1, sizeof *j);
    hd_job_init(j, &group, draw(&luck, 3) ? HD_RECV : HD_SEND, "message");
    j->dtype = HD_UINT8;
    j->message.peer = 1;
    j->count = 8;
    j->timeout = 0.003;
    if (j->kind == HD_SEND && !draw(&luck, 8))
        j->message.peer = group.rank, j->count = 0; /* a signal to itself, complete at once */
    j->refs = 2;
    __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
    hd_p2p_start(&group, j);
    return j;
}

static void end(hd_job *j)
{
    switch (draw(&luck, 5)) {
    case 0: break;
    case 1: hd_p2p_test(j); break;
    case 2:
        if (j->kind == HD_RECV) {
            hd_p2p_take_back(j, 0.5);
            break;
        } /* fall through */
    default: hd_p2p_wait(j, 1e-6 * (double)draw(&luck, 6000), 0);
    }
    if (draw(&luck, 2) && hd_p2p_unwatch(j))
        __atomic_sub_fetch(&j->refs, 1, __ATOMIC_ACQ_REL); /* the poller's */
    let_go(j);
}

static void *user(void *arg)
{
    luck = chance_of(seed, (uint64_t)(intptr_t)arg);
    for (uint64_t i = 0; i < messages;) {
        hd_job *batch[4], *posted = NULL;
        const uint64_t most = draw(&luck, 2) ? 1 : 1 + (uint64_t)draw(&luck, 4);
        int n = 0;
        for (; n < (int)most && i < messages; n++, i++) {
            hd_job *j = batch[n] = begin();
            if (hd_job_state(j) == HD_DONE) {
                let_go(j);
            } else {
                j->next = posted;
                posted = j;
            }
        }
        hd_p2p_watch(posted);
        while (n)
            end(batch[--n]);
    }
    return NULL;
}

/* ---- what entry checks have not sent ---- */

enum { POSTS = 3 };
static hd_comm others[POSTS];
static uint64_t posts_sent, posts_taken;
static int users_done;

int hd_post_closed(const hd_comm *c, int rank) { return (void)c, (void)rank, 0; }

/* `now` counts what is unsent, and no lock guards it. */
int hd_post_unsent(hd_post *p)
{
    if (p->now && !--p->now)
        __atomic_add_fetch(&posts_sent, 1, __ATOMIC_RELAXED);
    return p->now != 0;
}

static void *leaver(void *arg)
{
    (void)arg;
    luck = chance_of(seed, 99);
    while (!__atomic_load_n(&users_done, __ATOMIC_ACQUIRE)) {
        hd_comm *c = &others[draw(&luck, POSTS)];
        hd_unsent_take(c->post);
        if (__atomic_load_n(&c->post->kept, __ATOMIC_RELAXED))
            __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
        posts_taken += c->post->now != 0;
        c->post->now = draw(&luck, 6);
        hd_poller_sends(c);
        if (!draw(&luck, 4))
            nap_us((long)draw(&luck, 3000));
    }
    for (int i = 0; i < POSTS; i++) {
        hd_unsent_take(others[i].post);
        others[i].post->now = 3;
        hd_poller_sends(&others[i]);
    }
    for (int i = 0; i < 40 && hd_unsent_any(); i++)
        nap_us(50000); /* the poller sends all that is left */
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t all[THREADS], leaves;
    pthread_condattr_t attr;
    int n;
    if (argc != 4 || (n = atoi(argv[2])) < 1 || n > THREADS) {
        fprintf(stderr, "usage: p2p SEED THREADS MESSAGES\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    messages = strtoull(argv[3], NULL, 10);
    hd_py.release = dispose;
    pthread_mutex_init(&group.mu, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&group.lane.done_cv, &attr);
    group.size = 2;
    group.node_slot = slots;
    for (int i = 0; i < n; i++)
        pthread_create(&all[i], NULL, user, (void *)(intptr_t)i);
    for (int i = 0; i < POSTS; i++)
        others[i].post = calloc(1, sizeof *others[i].post);
    pthread_create(&leaves, NULL, leaver, NULL);
    for (int i = 0; i < n; i++)
        pthread_join(all[i], NULL);
    __atomic_store_n(&users_done, 1, __ATOMIC_RELEASE);
    pthread_join(leaves, NULL);
    if (hd_unsent_any())
        wrong++;
    for (int i = 0; i < POSTS; i++) {
        hd_unsent_take(others[i].post); /* the poller may not be done with the last one yet */
        wrong += others[i].post->now != 0;
        free(others[i].post);
    }
    if (!hd_p2p_drain(&group, 60))
        wrong++;
    hd_p2p_shutdown();
    if (made != freed)
        wrong++;
    printf("%d threads, %llu messages, %llu not received, %llu posts sent, %llu taken before, %llu wrong\n", n,
           (unsigned long long)made, (unsigned long long)late, (unsigned long long)posts_sent,
           (unsigned long long)posts_taken, (unsigned long long)wrong);
    return wrong ? 1 : 0;
}
