/* Windows between nodes (hd_window.c): requests, and memory that comes and goes while they are served.
 *
 *   window SEED CLIENTS REQUESTS
 *
 * Each client is a thread and, to the server, a rank. Its messages are a stand-in for MPI's: requests arrive in order,
 * their data and what is fetched after a random while. A client writes and reads a part of its own, so it knows what it
 * must read, also if it awaits that after it has written again, and after requests whose answers it has not awaited; it
 * adds to a part that all have; and it asks for a second window, which another thread exposes and withdraws. What is
 * withdrawn is never written again. In the end all that was added is there. Clients serve too while they wait, as
 * threads do that wait for a message. */
#include <pthread.h>
#include <string.h>

#include "harness.h"
#include "hd_block.h"
#include "hd_combine.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_p2p.h"
#include "hd_window.h"

enum { CLIENTS = 8, OWN = 2000, COMMON = 400, PASSING = 700, MOST = 600 }; /* MOST: elements of a request */
enum { STEADY = 1 };                                                       /* number of the first window */

typedef struct mail {
    struct mail *next;
    int rank, tag, kind;
    int64_t bytes, arrives; /* ns */
    char data[];
} mail;

struct stub_request {
    int64_t ends; /* ns */
};

typedef struct box {
    pthread_mutex_t mu;
    mail *first;
} box;
static box to_server = {PTHREAD_MUTEX_INITIALIZER, NULL}, to_clients[CLIENTS];

static hd_comm group;
static uint64_t seed, requests, wrong, refused, passed_by;
/* Atomic: of the second window; at first one that never is there, and not the first window's. */
static uint64_t newest = STEADY + 1;
static int64_t steady[CLIENTS * OWN + COMMON], passing[PASSING], added[COMMON];
static int stop;
static __thread chance luck;

static void is_wrong(const char *what)
{
    if (__atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED) < 4)
        fprintf(stderr, "window: %s\n", what);
}

/* ---- MPI's part ---- */

static void post(box *to, int rank, int tag, int kind, const void *data, int64_t n, int64_t arrives)
{
    mail *m = malloc(sizeof *m + (size_t)n), **at = &to->first;
    *m = (mail){NULL, rank, tag, kind, n, arrives};
    memcpy(m->data, data, (size_t)n);
    pthread_mutex_lock(&to->mu);
    while (*at)
        at = &(*at)->next;
    *at = m;
    pthread_mutex_unlock(&to->mu);
}

/* The first message of a kind that has arrived; rank and tag -1: of any. The caller frees it. */
static mail *take(box *from, int rank, int tag, int kind)
{
    mail *m, **at = &from->first;
    pthread_mutex_lock(&from->mu);
    for (; (m = *at); at = &m->next)
        if (m->kind == kind && (rank < 0 || m->rank == rank) && (tag < 0 || m->tag == tag) && m->arrives <= hd_now())
            break;
    if (m)
        *at = m->next;
    pthread_mutex_unlock(&from->mu);
    return m;
}

static int64_t soon(void) { return hd_now() + (int64_t)draw(&luck, draw(&luck, 4) ? 20000 : 2000000); }

int MPI_Improbe(int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *st)
{
    mail *m = take(&to_server, -1, -1, HD_WINDOW_REQUEST);
    (void)from, (void)tag, (void)comm;
    *message = m;
    if ((*flag = m != NULL))
        *st = (MPI_Status){.MPI_SOURCE = m->rank, .bytes = m->bytes};
    return MPI_SUCCESS;
}

int MPI_Get_count(const MPI_Status *st, MPI_Datatype type, int *n) { return (void)type, *n = (int)st->bytes, 0; }

int MPI_Mrecv(void *data, int n, MPI_Datatype type, MPI_Message *message, MPI_Status *st)
{
    mail *m = *message;
    (void)type, (void)st;
    memcpy(data, m->data, (size_t)n);
    free(m);
    return MPI_SUCCESS;
}

/* Now and then another rank accumulates there. */
int hd_block_combine(int redop, int dtype, const char *from, char *to, int64_t n)
{
    if (!luck.state)
        luck = chance_of(seed, 77); /* the server's thread */
    if (!draw(&luck, 8))
        return 0;
    hd_combine(redop, dtype, from, to, n);
    return 1;
}

int hd_p2p_start(hd_comm *c, hd_job *j)
{
    (void)c;
    if (!luck.state)
        luck = chance_of(seed, 77); /* the server's thread */
    j->message.req = malloc(sizeof *j->message.req);
    j->message.req->ends = soon();
    return HD_OK;
}

static void finish(hd_job *j)
{
    free(j->message.req);
    j->message.req = MPI_REQUEST_NULL;
    hd_job_finish(j);
}

/* A send reads its tensor when it ends. */
int hd_p2p_test(hd_job *j)
{
    mail *m;
    if (hd_job_state(j) == HD_DONE)
        return 1;
    if (j->message.req->ends > hd_now())
        return 0;
    if (j->kind == HD_SEND) {
        post(&to_clients[j->message.peer], j->message.peer, j->message.tag, j->message.tag_kind, j->in1.ptr, j->count,
             0);
    } else {
        if (!(m = take(&to_server, j->message.peer, j->message.tag, j->message.tag_kind)))
            return 0;
        memcpy(j->out1.ptr, m->data, (size_t)m->bytes);
        if (m->bytes != j->count)
            is_wrong("data of another length");
        free(m);
    }
    finish(j);
    return 1;
}

void hd_p2p_end(hd_job *j)
{
    if (hd_p2p_test(j))
        return;
    j->code = HD_ERR_CLOSED;
    finish(j);
}

int hd_p2p_unfinished(const hd_job *j) { return j->message.req != MPI_REQUEST_NULL; }
void (*hd_p2p_serves)(void);

static void add(const void *one, const void *other, void *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ((int64_t *)to)[i] = ((const int64_t *)one)[i] + ((const int64_t *)other)[i];
}
hd_reduce_fn hd_reduce_kernel(int op, int dtype) { return (void)op, (void)dtype, add; }

/* ---- clients ---- */

static int ask(int rank, uint64_t window, int call, int64_t at, const int64_t *data, int64_t n)
{
    static uint64_t numbers;
    const uint64_t number = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
    const int64_t bytes = n * 8;
    const int brings = call != HD_GET, is_short = bytes <= HD_WINDOW_SHORT;
    char text[sizeof(hd_request) + HD_WINDOW_SHORT];
    const hd_request q = {window, number, at * 8, bytes, call, HD_INT64, HD_SUM, (int)number};
    memcpy(text, &q, sizeof q);
    if (brings && is_short)
        memcpy(text + sizeof q, data, (size_t)bytes);
    if (brings && !is_short)
        post(&to_server, rank, q.tag, HD_WINDOW_BRINGS, data, bytes, soon());
    post(&to_server, rank, 0, HD_WINDOW_REQUEST, text,
         (int64_t)sizeof q + (brings && is_short ? bytes : 0), 0);
    return q.tag;
}

static mail *await(int rank, int tag, int kind)
{
    mail *m;
    void (*const serves)(void) = __atomic_load_n(&hd_p2p_serves, __ATOMIC_ACQUIRE);
    for (int k = 0; !(m = take(&to_clients[rank], rank, tag, kind)); k++) {
        if (draw(&luck, 2))
            serves();
        else
            nap_us(5);
        if (k > 4000000) {
            is_wrong("no answer");
            exit(1);
        }
    }
    return m;
}

/* What became of a request; got: of a get, what it has fetched. */
static int outcome(int rank, int tag, int64_t *got, int64_t n)
{
    mail *m = await(rank, tag, HD_WINDOW_ANSWER);
    hd_answer a;
    memcpy(&a, m->data, sizeof a);
    if (a.outcome == HD_SERVED && got && n * 8 > HD_WINDOW_SHORT) {
        free(m);
        m = await(rank, tag, HD_WINDOW_FETCHES);
        memcpy(got, m->data, (size_t)n * 8);
    } else if (a.outcome == HD_SERVED && got) {
        memcpy(got, m->data + sizeof a, (size_t)n * 8);
    }
    free(m);
    return a.outcome;
}

/* A get that is awaited when more has been asked for. */
typedef struct fetched {
    int how; /* as ask(); 0: none */
    int64_t n, expect[MOST];
} fetched;

static void await_get(int rank, fetched *f)
{
    int64_t data[MOST];
    if (f->how && (outcome(rank, f->how, data, f->n) != HD_SERVED || memcmp(data, f->expect, (size_t)f->n * 8)))
        is_wrong("a get has not what was put before, or has what was put later");
    f->how = 0;
}

static void step(int rank, int64_t *expect, int64_t *serial, fetched *open)
{
    int64_t data[MOST];
    const int64_t n = 1 + (int64_t)draw(&luck, draw(&luck, 2) ? 20 : COMMON);
    const int64_t at = (int64_t)draw(&luck, draw(&luck, 2) ? OWN - n : 40); /* half of them meet */
    const int awaits = !draw(&luck, 3);
    int how;
    for (int64_t i = 0; i < n; i++)
        data[i] = ++*serial;
    switch (draw(&luck, 9)) {
    case 0: /* its own part */
    case 1:
    case 2:
        how = ask(rank, STEADY, HD_PUT, rank * OWN + at, data, n);
        memcpy(expect + at, data, (size_t)n * 8);
        if (awaits && outcome(rank, how, NULL, 0) != HD_SERVED)
            is_wrong("a put was refused");
        break;
    case 3:
    case 4:
    case 5:
        open += draw(&luck, 2);
        await_get(rank, open);
        *open = (fetched){.how = ask(rank, STEADY, HD_GET, rank * OWN + at, NULL, n), .n = n};
        memcpy(open->expect, expect + at, (size_t)n * 8);
        if (awaits)
            await_get(rank, open);
        break;
    case 6: /* what all have */
        how = ask(rank, STEADY, HD_ACCUMULATE, CLIENTS * OWN, data, n);
        for (int64_t i = 0; i < n; i++)
            __atomic_add_fetch(&added[i], data[i], __ATOMIC_RELAXED);
        if (awaits && outcome(rank, how, NULL, 0) != HD_SERVED)
            is_wrong("an accumulate was refused");
        break;
    case 7: /* the second window: gone, there, or to come */
        how = ask(rank, __atomic_load_n(&newest, __ATOMIC_ACQUIRE) + draw(&luck, 2), HD_PUT, 0, data, n);
        how = outcome(rank, how, NULL, 0);
        __atomic_add_fetch(how == HD_SERVED ? &passed_by : &refused, 1, __ATOMIC_RELAXED);
        if (how != HD_SERVED && how != HD_NOT_THERE)
            is_wrong("neither there nor withdrawn");
        break;
    default:
        how = ask(rank, STEADY, draw(&luck, 2) ? HD_PUT : HD_ACCUMULATE, CLIENTS * OWN + COMMON - n + 1, data, n);
        if (outcome(rank, how, NULL, 0) != HD_OUT_OF_RANGE)
            is_wrong("a request that does not fit was served");
    }
}

static void *client(void *arg)
{
    const int rank = (int)(intptr_t)arg;
    int64_t *expect = calloc(OWN, sizeof *expect), serial = (int64_t)rank << 32, all[OWN];
    fetched open[2] = {{0}};
    luck = chance_of(seed, 100 + (uint64_t)rank);
    for (uint64_t i = 0; i < requests; i++)
        step(rank, expect, &serial, open);
    await_get(rank, &open[0]);
    await_get(rank, &open[1]);
    /* After all that it has not awaited. */
    if (outcome(rank, ask(rank, STEADY, HD_GET, rank * OWN, NULL, OWN), all, OWN) != HD_SERVED ||
        memcmp(all, expect, sizeof all))
        is_wrong("the memory in the end");
    free(expect);
    return NULL;
}

/* The second window: each time under a new number. */
static void *comes_and_goes(void *arg)
{
    (void)arg;
    luck = chance_of(seed, 50);
    while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
        const uint64_t number = __atomic_load_n(&newest, __ATOMIC_RELAXED) + 1;
        hd_exposed *e = hd_window_expose(&group, number, (char *)passing, sizeof passing);
        __atomic_store_n(&newest, number, __ATOMIC_RELEASE);
        nap_us((long)draw(&luck, 3000));
        if (!hd_window_withdraw(e))
            is_wrong("MPI is not done with the memory");
        hd_window_free(e);
        memset(passing, 0x5a, sizeof passing);
        nap_us((long)draw(&luck, 1000));
        for (int i = 0; i < PASSING; i++)
            if (passing[i] != 0x5a5a5a5a5a5a5a5aLL) {
                is_wrong("memory was written that is withdrawn");
                break;
            }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t all[CLIENTS], other;
    hd_exposed *e;
    int n;
    if (argc != 4 || (n = atoi(argv[2])) < 1 || n > CLIENTS) {
        fprintf(stderr, "usage: window SEED CLIENTS REQUESTS\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    requests = strtoull(argv[3], NULL, 10);
    for (int i = 0; i < CLIENTS; i++)
        pthread_mutex_init(&to_clients[i].mu, NULL);
    e = hd_window_expose(&group, STEADY, (char *)steady, sizeof steady);
    pthread_create(&other, NULL, comes_and_goes, NULL);
    for (int i = 0; i < n; i++)
        pthread_create(&all[i], NULL, client, (void *)(intptr_t)i);
    for (int i = 0; i < n; i++)
        pthread_join(all[i], NULL);
    __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
    pthread_join(other, NULL);
    hd_windows_close(&group);
    if (!hd_window_withdraw(e) || !hd_windows_shutdown())
        is_wrong("the server has not ended");
    hd_window_free(e);
    for (int i = 0; i < COMMON; i++)
        if (steady[CLIENTS * OWN + i] != added[i]) {
            is_wrong("what was added is not there");
            break;
        }
    printf("window: seed %llu, %d clients of %llu requests; second window: %llu served, %llu refused; %llu wrong\n",
           (unsigned long long)seed, n, (unsigned long long)requests, (unsigned long long)passed_by,
           (unsigned long long)refused, (unsigned long long)wrong);
    return wrong != 0;
}
