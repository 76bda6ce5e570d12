/* The first member leads. A member says hello; the leader says go; the member promises to wait for
 * the verdict. When all members have promised, the verdict is that they go on.
 *
 * A member may leave on its own before it has promised. After that it can only ask the leader to
 * end the roll call (by the same word, bye), and the leader's verdict counts, which is the same
 * for all. The leader is there: it has said go. So no member goes on alone.
 *
 * Each call of a member has a random number. A message left over from a call that has ended has no
 * effect: the leader answers it, but no promise follows, because its member no longer waits for
 * that number. */
#include <stdlib.h>
#include <time.h>

#include "hd_base.h"
#include "hd_job.h"
#include "hd_outbox.h"
#include "hd_roll.h"
#include "hd_threads.h"

enum { HELLO = 1, PROMISE, BYE, GO, VERDICT };
#define LEAVE_S 0.3 /* seconds for the verdict, once a member's time is over */
#define FLUSH_S 1.0 /* seconds for the last words to be gone */

typedef struct word {
    int32_t what, code;
    uint64_t number, list;
    char text[224];
} word;

typedef struct member {
    uint64_t number, list; /* 0: not here */
    int promised;
} member;

/* Messages that MPI had not taken when their roll call was over. */
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
    return HD_ERR_BACKEND;
}

static int say(hd_roll *r, int to, const word *w, int tag)
{
    int rc;
    pthread_mutex_lock(&left_mu);
    lock(r);
    count(r, hd_outbox_send(&left, r->mpi, w, sizeof *w, &to, 1, tag, &rc));
    unlock(r);
    pthread_mutex_unlock(&left_mu);
    return rc ? fail_mpi(r, rc, "MPI_Isend") : HD_OK;
}

/* Receives one message of a rank. *there: whether there was one. */
static int hear(hd_roll *r, int from, int tag, word *w, int *there)
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
    w->text[sizeof w->text - 1] = 0;
    return HD_OK;
}

/* Waits until MPI has taken the messages: outside hpcdist it may be long before MPI can send
 * them. */
static void flush(const hd_roll *r)
{
    const int64_t until = hd_until(FLUSH_S);
    for (;;) {
        const struct timespec nap = {0, 50000};
        int gone;
        pthread_mutex_lock(&left_mu);
        lock(r);
        gone = hd_outbox_tidy(&left);
        unlock(r);
        pthread_mutex_unlock(&left_mu);
        if (gone || hd_now() > until)
            return;
        nanosleep(&nap, NULL);
    }
}

/* ---- the leader ---- */

/* Reads what one member has sent meanwhile. */
static int listen(hd_roll *r, int i, member *m)
{
    hd_text t;
    word w;
    int there, code;

    hd_text_init(&t, r->text, sizeof r->text);
    while (!(code = hear(r, r->ranks[i], r->tag, &w, &there)) && there) {
        if (w.what == HELLO) {
            *m = (member){w.number, w.list, 0};
            if ((code = say(r, r->ranks[i], &(word){.what = GO, .number = w.number}, r->tag + 32)))
                return code;
        } else if (w.number != m->number) {
            continue; /* left over */
        } else if (w.what == PROMISE) {
            m->promised = 1;
            if (m->list != r->list) {
                hd_say(&t, "rank %d names other members, or another order, than rank %d",
                       r->ranks[i], r->ranks[0]);
                return HD_ERR_MISMATCH;
            }
        } else if (m->promised) {
            hd_say(&t, "rank %d gave up before all had arrived", r->ranks[i]);
            return HD_ERR_TIMEOUT;
        } else {
            m->number = 0;
        }
    }
    return code;
}

static void name_missing(hd_roll *r, const member *all)
{
    const char *sep = "no word from rank ";
    hd_text t;
    hd_text_init(&t, r->text, sizeof r->text);
    for (int i = 1; i < r->n; i++)
        if (!all[i].promised) {
            hd_say(&t, "%s%d", sep, r->ranks[i]);
            sep = ", ";
        }
}

/* Waits until all members have promised, or one of them will not. */
static int gather(hd_roll *r, member *all)
{
    hd_waiter w;
    hd_waiter_init(&w, 0, -1);
    for (;;) {
        int promised = 1, ev;
        for (int i = 1; i < r->n; i++) {
            const int code = listen(r, i, &all[i]);
            if (code)
                return code;
            promised += all[i].promised;
        }
        if (promised == r->n)
            return HD_OK;
        ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(NULL))
            return HD_ERR_INTERRUPT;
        if ((ev & HD_WAIT_CLOCK) && hd_now() >= r->until) {
            name_missing(r, all);
            return HD_ERR_TIMEOUT;
        }
    }
}

static int lead(hd_roll *r)
{
    member *all = calloc((size_t)r->n, sizeof *all);
    word verdict = {.what = VERDICT};
    hd_text t;
    int code, sent = HD_OK;

    if (!all)
        return HD_ERR_MEMORY;
    code = gather(r, all);
    verdict.code = code == HD_ERR_INTERRUPT ? HD_ERR_TIMEOUT : code;
    hd_text_init(&t, verdict.text, sizeof verdict.text);
    if (code == HD_ERR_INTERRUPT)
        hd_say(&t, "rank %d was interrupted", r->ranks[0]);
    else if (code)
        hd_say(&t, "%s", r->text);
    for (int i = 1; i < r->n; i++)
        if (all[i].number) {
            const int rc =
                (verdict.number = all[i].number, say(r, r->ranks[i], &verdict, r->tag + 32));
            sent = sent ? sent : rc;
        }
    free(all);
    flush(r);
    return code ? code : sent;
}

/* ---- a member ---- */

/* Reads the leader's messages. -1: no verdict yet. */
static int heed(hd_roll *r, uint64_t number, int leaves, int *promised)
{
    word w;
    int there, code;
    while (!(code = hear(r, r->ranks[0], r->tag + 32, &w, &there)) && there) {
        if (w.number != number)
            continue; /* left over */
        if (w.what == VERDICT) {
            hd_text t;
            hd_text_init(&t, r->text, sizeof r->text);
            hd_say(&t, "%s", w.text);
            return w.code;
        }
        if (w.what == GO && !leaves && !*promised) {
            *promised = 1;
            if ((code = say(r, r->ranks[0], &(word){.what = PROMISE, .number = number}, r->tag)))
                return code;
        }
    }
    return code ? code : -1;
}

static int follow(hd_roll *r)
{
    const uint64_t number = hd_random64() | 1;
    int promised = 0, leaves = 0, interrupted = 0, code;
    int64_t last = HD_NEVER;
    hd_text t;
    hd_waiter w;

    if ((code = say(r, r->ranks[0], &(word){.what = HELLO, .number = number, .list = r->list},
                    r->tag)))
        return code;
    hd_waiter_init(&w, 0, -1);
    while ((code = heed(r, number, leaves, &promised)) < 0) {
        const int ev = hd_waiter_step(&w);
        const int64_t now = ev & HD_WAIT_CLOCK ? hd_now() : 0;
        if ((ev & HD_WAIT_HOOK) && !interrupted && hd_py.slow && hd_py.slow(NULL))
            interrupted = 1;
        if (!leaves && (interrupted || now >= r->until)) {
            leaves = 1;
            last = interrupted ? now : hd_later(now, hd_ns(LEAVE_S));
            if ((code = say(r, r->ranks[0], &(word){.what = BYE, .number = number}, r->tag)))
                return code;
        }
        if (!promised && leaves && now >= last) {
            hd_text_init(&t, r->text, sizeof r->text);
            hd_say(&t, "no word from rank %d, the group's first member", r->ranks[0]);
            code = HD_ERR_TIMEOUT;
            break;
        }
    }
    if (code)
        flush(r);
    /* if all go on, so does this rank, and the exception is raised afterwards */
    return code && interrupted ? HD_ERR_INTERRUPT : code;
}

int hd_roll_call(hd_roll *r)
{
    r->text[0] = 0;
    return r->n < 2 ? HD_OK : r->rank == r->ranks[0] ? lead(r) : follow(r);
}
