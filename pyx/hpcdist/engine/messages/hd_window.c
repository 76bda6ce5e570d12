/* Windows between nodes, on the side of the rank whose memory it is. Others ask by messages; one
 * thread of the process takes their requests, moves the data, and answers, without the program's
 * help. Not MPI's own windows: they know no timeouts, no bfloat16 and no death of a rank, and with
 * Open MPI over TCP they wait until the target calls MPI.
 *
 * Each request has a tag of its own for its data and its answer, so an answer after a timeout meets
 * no later request. Memory is exposed after all ranks have agreed on its number, so a request for a
 * number that is not known yet may be early, and waits. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "hd_base.h"
#include "hd_block.h"
#include "hd_envelope.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_p2p.h"
#include "hd_status.h"
#include "hd_window.h"

#define AWAKE                                                                                      \
    30000          /* ns after a request, for the next one: it comes when the first is answered    \
                    */
#define AT_ONCE 64 /* requests taken in before the others go on */

typedef struct host host;

struct hd_exposed {
    hd_exposed *next;
    host *host; /* NULL: withdrawn */
    uint64_t number;
    char *at;
    int64_t bytes;
    int unfinished; /* MPI may touch the memory for ever */
};

/* One request. */
typedef struct service {
    struct service *next;
    hd_exposed *of; /* NULL: it waits, or is refused */
    int source, begun, outcome;
    hd_job *data, *answer; /* messages on their way, or NULL */
    char *scratch;         /* of data that do not go into the memory as they come */
    hd_answer *reply;
    int extra; /* bytes that came behind the request */
    hd_request asked;
    char behind[];
} service;

_Static_assert(offsetof(service, behind) == offsetof(service, asked) + sizeof(hd_request),
               "a request and what is behind it are one message");

/* A group with exposed memory. */
struct host {
    host *next;
    hd_comm *c;
    hd_exposed *exposed;
    service *services; /* in the order of their arrival */
    uint64_t newest;   /* the highest number so far */
};

static struct {
    pthread_mutex_t mu;
    pthread_cond_t cv;
    host *hosts;
    int any; /* atomic: there are hosts */
    int started, stop;
    pthread_t thread;
} server = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0, 0};

/* ---- messages ---- */

/* NULL: there is no memory for it. It has no deadline of its own. */
static hd_job *message(hd_comm *c, const service *s, int kind, int tag_kind, char *at, int64_t n)
{
    hd_job *j = calloc(1, sizeof *j);
    if (!j)
        return NULL;
    hd_job_init(j, c, kind, "a window's request");
    j->timeout = 0;
    j->dtype = HD_UINT8;
    j->count = n;
    j->message.peer = s->source;
    j->message.tag = s->asked.tag;
    j->message.tag_kind = tag_kind;
    *(kind == HD_SEND ? &j->in1 : &j->out1) = (hd_seg){.ptr = at, .n = n};
    hd_p2p_start(c, j);
    return j;
}

/* 1: MPI is done with it. */
static int free_message(hd_job *j)
{
    const int unfinished = j && hd_p2p_unfinished(j);
    if (!j || unfinished)
        return !unfinished;
    hd_job_clear(j);
    free(j->room);
    free(j);
    return 1;
}

static int ended(hd_job *j) { return !j || hd_p2p_test(j); }

/* ---- one request ---- */

static int is_short(int64_t bytes) { return bytes <= HD_WINDOW_SHORT; }

static hd_exposed *find(const host *h, uint64_t number)
{
    hd_exposed *e = h->exposed;
    while (e && e->number != number)
        e = e->next;
    return e;
}

static void refuse(service *s, int outcome)
{
    s->of = NULL;
    s->outcome = outcome;
}

/* What the request says may be used. */
static void look_at(const host *h, service *s)
{
    const hd_request *q = &s->asked;
    const hd_exposed *e = s->of = find(h, q->window);
    const int brings = q->call != HD_GET && is_short(q->bytes);
    if (!e)
        refuse(s, HD_NOT_THERE);
    else if (q->at < 0 || q->bytes < 0 || q->at > e->bytes - q->bytes ||
             (brings && s->extra != q->bytes))
        refuse(s, HD_OUT_OF_RANGE);
    else if (q->call == HD_ACCUMULATE && !hd_reduce_kernel(q->redop, q->dtype))
        refuse(s, HD_OUT_OF_RANGE);
}

/* Data that nobody wants are received too: their sender waits for that. */
static void fetch_data(host *h, service *s)
{
    char *to = s->of && s->asked.call == HD_PUT ? s->of->at + s->asked.at : NULL;
    if (!to && !(to = s->scratch = malloc((size_t)s->asked.bytes)))
        refuse(s, HD_NO_ROOM);
    else if (!(s->data = message(h->c, s, HD_RECV, HD_WINDOW_BRINGS, to, s->asked.bytes)))
        refuse(s, HD_NO_ROOM);
}

static void answer(host *h, service *s)
{
    const hd_request *q = &s->asked;
    const int64_t brings = q->call == HD_GET && q->bytes > 0 && is_short(q->bytes) ? q->bytes : 0;
    if (!(s->reply = calloc(1, sizeof *s->reply + (size_t)brings)))
        return; /* who asked gives up in time */
    s->reply->number = q->number;
    s->reply->outcome = s->outcome;
    if (s->of && brings)
        memcpy(s->reply + 1, s->of->at + q->at, (size_t)brings);
    s->answer = message(h->c, s, HD_SEND, HD_WINDOW_ANSWER, (char *)s->reply,
                        (int64_t)sizeof *s->reply + brings);
}

/* What has arrived is put where it belongs. 0: not yet, another rank accumulates there. */
static int apply(service *s)
{
    const hd_request *q = &s->asked;
    const char *from = s->scratch ? s->scratch : s->behind;
    char *to = s->of ? s->of->at + q->at : NULL;
    if (s->of && s->data && s->data->code != HD_OK)
        refuse(s, HD_DATA_LOST);
    if (s->of && q->call == HD_ACCUMULATE)
        return hd_block_combine(q->redop, q->dtype, from, to,
                                q->bytes / (int64_t)hd_itemsize(q->dtype));
    if (s->of && q->call == HD_PUT && !s->data)
        memcpy(to, from, (size_t)q->bytes);
    return 1;
}

static void begin(host *h, service *s)
{
    s->begun = 1;
    look_at(h, s);
    if (s->asked.call != HD_GET) {
        if (!is_short(s->asked.bytes))
            fetch_data(h, s);
        return;
    }
    if (s->of && !is_short(s->asked.bytes) &&
        !(s->data = message(h->c, s, HD_SEND, HD_WINDOW_FETCHES, s->of->at + s->asked.at,
                            s->asked.bytes)))
        refuse(s, HD_NO_ROOM);
    answer(h, s);
}

/* Whether a later request of the same rank has to wait. A long get has its answer on the way at
 * once, while MPI still reads the memory. */
static int is_in_the_way(const host *h, const service *s, const service *later)
{
    if (!s->begun)
        return s->asked.window <= h->newest;
    return !s->reply || (later->asked.call != HD_GET && s->asked.call == HD_GET && s->data &&
                         hd_job_state(s->data) != HD_DONE);
}

/* A rank's requests take effect in the order in which it has made them, also after a timeout. */
static int may_begin(const host *h, const service *s)
{
    for (const service *e = h->services; e != s; e = e->next)
        if (e->source == s->source && is_in_the_way(h, e, s))
            return 0;
    return s->asked.window <= h->newest;
}

/* 1: it is over. */
static int step(host *h, service *s)
{
    if (!s->begun && !may_begin(h, s))
        return 0;
    if (!s->begun)
        begin(h, s);
    if (!ended(s->data))
        return 0;
    if (!s->reply) {
        if (!apply(s))
            return 0;
        answer(h, s);
    }
    return ended(s->answer);
}

static void free_service(service *s)
{
    if (!free_message(s->data))
        return; /* MPI may use all of it */
    free(s->scratch);
    if (free_message(s->answer))
        free(s->reply);
    free(s);
}

/* Its memory goes: it is refused, unless it has taken effect. */
static void let_go(host *h, service *s)
{
    hd_exposed *e = s->of;
    hd_job *j = s->scratch ? NULL : s->data; /* what MPI moves from or into the memory itself */
    if (j)
        hd_p2p_end(j);
    if (j && j->code == HD_OK) {
        s->of = NULL;
        return;
    }
    refuse(s, HD_NOT_THERE);
    if (j && hd_p2p_unfinished(j)) {
        e->unfinished = 1;
    } else if (j && j->kind == HD_RECV) { /* cancelled */
        free_message(j);
        s->data = NULL;
        fetch_data(h, s);
    }
}

/* Its group goes: who asked is not told. */
static void cut(service *s)
{
    if (s->data)
        hd_p2p_end(s->data);
    if (s->answer)
        hd_p2p_end(s->answer);
    free_service(s);
}

/* ---- all requests ---- */

/* The next one that has come. 1: there was one. */
static int take_in(host *h)
{
    hd_comm *c = h->c;
    MPI_Message waiting;
    MPI_Status st;
    service *s, **at;
    int come = 0, n = 0;

    if (MPI_Improbe(MPI_ANY_SOURCE, TAG(0, HD_WINDOW_REQUEST), c->mpi, &come, &waiting, &st) ||
        !come)
        return 0;
    MPI_Get_count(&st, MPI_BYTE, &n);
    s = calloc(1, sizeof *s + (size_t)n);
    if (MPI_Mrecv(s ? &s->asked : NULL, s ? n : 0, MPI_BYTE, &waiting, &st) || !s ||
        n < (int)sizeof s->asked) {
        free(s);
        return 1;
    }
    __atomic_sub_fetch(&c->unread, 1, __ATOMIC_RELAXED);
    s->source = st.MPI_SOURCE;
    s->extra = n - (int)sizeof s->asked;
    for (at = &h->services; *at;)
        at = &(*at)->next;
    *at = s;
    return 1;
}

/* 1: a request has come or is over. One that is only under way may never end, and what moves its
 * data is MPI. */
static int serve(host *h)
{
    int busy = 0;
    if (hd_session_broken(h->c->session))
        return 0;
    for (int i = 0; i < AT_ONCE && take_in(h); i++)
        busy = 1;
    for (service **at = &h->services; *at;) {
        service *s = *at;
        if (!step(h, s)) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        free_service(s);
        busy = 1;
    }
    return busy;
}

static int serve_all(void)
{
    int busy = 0;
    for (host *h = server.hosts; h && !server.stop; h = h->next)
        busy |= serve(h);
    return busy;
}

/* By a thread that waits for a message. */
static void serve_beside(void)
{
    if (!__atomic_load_n(&server.any, __ATOMIC_ACQUIRE) || pthread_mutex_trylock(&server.mu))
        return;
    serve_all();
    pthread_mutex_unlock(&server.mu);
}

static void *serve_main(void *arg)
{
    hd_nap nap = {0};
    int64_t awake = 0;
    (void)arg;
    prctl(PR_SET_NAME, "hpcdist-window");
    prctl(PR_SET_TIMERSLACK, 1); /* else a nap of 20 us takes 70 */
    pthread_mutex_lock(&server.mu);
    while (!server.stop) {
        if (!server.hosts) {
            pthread_cond_wait(&server.cv, &server.mu);
            continue;
        }
        if (serve_all()) {
            nap = (hd_nap){0};
            awake = hd_later(hd_now(), AWAKE);
        }
        pthread_mutex_unlock(&server.mu);
        if (hd_now() < awake)
            sched_yield();
        else
            hd_nap_step(&nap);
        pthread_mutex_lock(&server.mu);
    }
    pthread_mutex_unlock(&server.mu);
    return NULL;
}

/* With server.mu held. 1: the thread runs. */
static int start(void)
{
    if (!server.started && !server.stop)
        server.started = !hd_thread_start(&server.thread, serve_main, NULL);
    return server.started;
}

int hd_windows_shutdown(void)
{
    int started;
    pthread_mutex_lock(&server.mu);
    server.stop = 1;
    started = server.started;
    pthread_cond_signal(&server.cv);
    pthread_mutex_unlock(&server.mu);
    if (!started)
        return 1;
    if (!hd_thread_join(server.thread))
        return 0;
    server.started = 0;
    return 1;
}

/* ---- exposed memory ---- */

/* With server.mu held. */
static host *host_of(hd_comm *c)
{
    host *h = server.hosts;
    while (h && h->c != c)
        h = h->next;
    if (h || !(h = calloc(1, sizeof *h)))
        return h;
    h->c = c;
    h->next = server.hosts;
    server.hosts = h;
    __atomic_store_n(&server.any, 1, __ATOMIC_RELEASE);
    return h;
}

hd_exposed *hd_window_expose(hd_comm *c, uint64_t number, char *at, int64_t bytes)
{
    hd_exposed *e = calloc(1, sizeof *e);
    host *h;
    if (!e)
        return NULL;
    pthread_mutex_lock(&server.mu);
    __atomic_store_n(&hd_p2p_serves, serve_beside, __ATOMIC_RELEASE);
    h = start() ? host_of(c) : NULL;
    if (h) {
        *e = (hd_exposed){h->exposed, h, number, at, bytes, 0};
        h->exposed = e;
        h->newest = number > h->newest ? number : h->newest;
        pthread_cond_signal(&server.cv);
    } else {
        free(e);
        e = NULL;
    }
    pthread_mutex_unlock(&server.mu);
    return e;
}

/* With server.mu held. The group stays a host: what still comes for the memory is refused. */
static void withdraw(hd_exposed *e)
{
    host *h = e->host;
    hd_exposed **at = &h->exposed;
    for (service *s = h->services; s; s = s->next)
        if (s->of == e)
            let_go(h, s);
    while (*at != e)
        at = &(*at)->next;
    *at = e->next;
    e->host = NULL;
}

int hd_window_withdraw(hd_exposed *e)
{
    int unfinished;
    pthread_mutex_lock(&server.mu);
    if (e->host)
        withdraw(e);
    unfinished = e->unfinished;
    pthread_mutex_unlock(&server.mu);
    return !unfinished;
}

void hd_window_free(hd_exposed *e) { free(e); }

void hd_windows_close(hd_comm *c)
{
    pthread_mutex_lock(&server.mu);
    for (host **at = &server.hosts, *h; (h = *at);) {
        if (c && h->c != c) {
            at = &h->next;
            continue;
        }
        while (h->exposed)
            withdraw(h->exposed);
        for (service *s = h->services, *next; s; s = next) {
            next = s->next;
            cut(s);
        }
        *at = h->next;
        free(h);
    }
    __atomic_store_n(&server.any, server.hosts != NULL, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&server.mu);
}
