/* Point to point: nonblocking MPI from the caller's thread, never queued behind a lane. A thread
 * that waits makes progress, and so does one poller thread (hd_poller.c).
 *
 * The MPI tag carries the user's tag and the dtype, so a receive of another dtype does not match
 * and cannot misread the bytes. A receive that waits checks for such a message now and then and
 * reports it. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_envelope.h"
#include "hd_ft.h"
#include "hd_hang.h"
#include "hd_job.h"
#include "hd_nan.h"
#include "hd_overdue.h"
#include "hd_p2p.h"
#include "hd_peer.h"
#include "hd_recorder.h"
#include "hd_report.h"
#include "hd_status.h"
#include "hd_stopped.h"
#include "hd_threads.h"
#include "hd_types.h"

enum { ASKED = 1, TAKEN = 2 }; /* of hd_message.recalled */
#define LOOKS 16               /* 2 us: the time that a short message is on its way */
#define BRIEF (64 << 10)       /* bytes that are copied in a few us */
#define PATIENCE 0.5 /* seconds that the rest of a message has to arrive when its receive ends */

#define OTHERS 16 /* looks at a message between looks at others */

void (*hd_p2p_others)(void);
void (*hd_p2p_serves)(void);

static void finish(hd_job *j)
{
    hd_rec_end(j);
    hd_job_finish(j);
}

/* Seconds since it was posted, or since somebody first asked: most messages end before that. */
static double elapsed(hd_job *j)
{
    const int64_t now = hd_now();
    int64_t posted = 0;
    if (__atomic_compare_exchange_n(&j->message.posted, &posted, now, 0, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
        return 0;
    return (double)(now - posted) * 1e-9;
}

static int expired(hd_job *j) { return j->timeout > 0 && elapsed(j) > j->timeout; }

static void complete(hd_job *j, const MPI_Status *st, int rc)
{
    hd_message_free(j);
    if (j->kind == HD_RECV) {
        int class = rc;
        if (rc != MPI_SUCCESS)
            MPI_Error_class(rc, &class);
        if (rc == MPI_SUCCESS || class == MPI_ERR_TRUNCATE)
            __atomic_sub_fetch(&j->comm->unread, 1, __ATOMIC_RELAXED);
        if (class == MPI_ERR_TRUNCATE ||
            (rc == MPI_SUCCESS && j->message.got > j->count * (int64_t)hd_itemsize(j->dtype))) {
            hd_fail(j, HD_ERR_MISMATCH,
                    "rank %d sent more than the %lld elements of %s that rank %d receives with tag "
                    "%d (group '%s'%s%s): the message is lost, the group can still be used",
                    st->MPI_SOURCE, (long long)j->count, hd_dtype_name(j->dtype), j->comm->rank,
                    j->message.tag, j->comm->name, j->site[0] ? ", called at " : "", j->site);
            return;
        }
    }
    if (hd_mpi_failed(j, rc, j->kind == HD_SEND ? "MPI_Isend" : "MPI_Irecv"))
        return;
    if (j->kind == HD_RECV) {
        const int64_t item = (int64_t)hd_itemsize(j->dtype);
        j->message.source = st->MPI_SOURCE;
        if (j->message.got != j->count * item)
            hd_fail(j, HD_ERR_MISMATCH,
                    "rank %d sent %lld elements of %s with tag %d, rank %d expected %lld (group "
                    "'%s'): the rest of the tensor is unchanged",
                    j->message.source, (long long)(j->message.got / item), hd_dtype_name(j->dtype),
                    j->message.tag, j->comm->rank, (long long)j->count, j->comm->name);
    } else {
        j->message.source = j->comm->rank;
    }
    if (hd_nan_wanted && j->code == HD_OK)
        hd_nan_fail_message(j);
}

/* With MPICH a message to oneself ends with its receive, which may never come. This one is empty:
 * there is no memory that it needs until then. */
static void let_go(hd_job *j)
{
    int rc;
    hd_mpi_lock(j->comm->session);
    rc = MPI_Request_free(&j->message.req);
    hd_mpi_unlock(j->comm->session);
    complete(j, MPI_STATUS_IGNORE, rc);
    finish(j);
}

/* One test of a receive that MPI was asked to cancel. 1: MPI is done with it. */
static int look_at_recalled(hd_job *j, int *cancelled, MPI_Status *st, int *rc)
{
    int done = 0;
    hd_mpi_lock(j->comm->session);
    if (hd_message_matched(j)) {
        *rc = hd_message_test(j, &done, st);
    } else {
        *rc = MPI_Test(&j->message.req, &done, st);
        if (!*rc && done)
            MPI_Test_cancelled(st, cancelled);
        if (!*rc && done && !*cancelled)
            *rc = hd_message_arrived(j, &done, st);
    }
    hd_mpi_unlock(j->comm->session);
    return done || *rc;
}

/* The receive was cancelled, or its message arrived at the last moment. */
static void settle_recalled(hd_job *j, int cancelled, const MPI_Status *st, int rc)
{
    if (cancelled) {
        j->message.recalled = TAKEN;
        hd_message_free(j);
        return;
    }
    free(j->text);
    j->text = NULL;
    if (j->code != HD_ERR_INTERRUPT)
        j->code = HD_OK;
    complete(j, st, rc);
}

/* With j->message.mu held. */
static int test_locked(hd_job *j)
{
    MPI_Status st;
    int done = 0, rc;
    if (hd_job_state(j) == HD_DONE)
        return 1;
    if (j->message.recalled) {
        int cancelled = 0;
        if (!look_at_recalled(j, &cancelled, &st, &rc))
            return 0;
        settle_recalled(j, cancelled, &st, rc);
        finish(j);
        return 1;
    }
    hd_mpi_lock(j->comm->session);
    rc = hd_message_test(j, &done, &st);
    hd_mpi_unlock(j->comm->session);
    if (!done && (rc == MPI_SUCCESS || hd_ft_pending(rc)))
        return 0;
    complete(j, &st, rc);
    finish(j);
    return 1;
}

int hd_p2p_test(hd_job *j)
{
    int done;
    if (hd_job_state(j) == HD_DONE)
        return 1;
    if (pthread_mutex_trylock(&j->message.mu))
        return 0; /* another thread is testing it right now */
    done = test_locked(j);
    pthread_mutex_unlock(&j->message.mu);
    return done;
}

/* Not where another thread may keep MPI, where a test may copy a long message or wait for a GPU, or
 * where MPI is asked about a rank that has died. */
int hd_p2p_is_brief(const hd_job *j)
{
    const hd_session *s = j->comm->session;
    return !hd_session_serialized(s) && !hd_ft_on(s) && !j->message.on_device &&
           j->count <= BRIEF / (int64_t)hd_itemsize(j->dtype);
}

int hd_p2p_soon(hd_job *j)
{
    int looks = hd_session_spin(j->comm->session, 0) ? LOOKS : 1;
    if (!hd_p2p_is_brief(j))
        return hd_job_state(j) == HD_DONE;
    while (!hd_p2p_test(j))
        if (!--looks)
            return 0;
    return 1;
}

int hd_p2p_start(hd_comm *c, hd_job *j)
{
    int rc;

    pthread_mutex_init(&j->message.mu, NULL);
    if (hd_session_broken(c->session)) {
        hd_fail_broken(c, j);
        finish(j);
        return j->code;
    }
    if (hd_nan_wanted && j->kind == HD_SEND)
        hd_nan_look_at_send(j);
    hd_mpi_lock(c->session);
    rc = hd_message_begin(c, j);
    hd_mpi_unlock(c->session);
    if (hd_mpi_failed(j, rc, j->kind == HD_SEND ? "MPI_Isend" : "MPI_Irecv")) {
        j->message.req = MPI_REQUEST_NULL;
        finish(j);
        return j->code;
    }
    if (j->kind == HD_SEND)
        __atomic_add_fetch(&c->unread, 1, __ATOMIC_RELAXED);
    /* A short send is done. A receive rarely is, and Open MPI yields the core in each test that
     * finds nothing. */
    if (j->kind != HD_SEND)
        return HD_OK;
    if (!test_locked(j)) { /* no other thread knows it yet */
        if (j->count || j->message.peer != c->rank)
            return HD_OK;
        let_go(j);
    }
    return j->code;
}

static void cancel(hd_job *j)
{
    hd_mpi_lock(j->comm->session);
    MPI_Cancel(&j->message.req);
    hd_mpi_unlock(j->comm->session);
    j->message.recalled = ASKED;
}

/* With j->message.mu held. A receive can be cancelled unless it has matched: then its message is on
 * its way, and this waits for it. A send cannot be cancelled: its buffer stays owned for ever. 1:
 * MPI is done with it; 0: not within that many seconds. */
static int end_request(hd_job *j, double seconds)
{
    const int64_t until = hd_until(seconds);
    int cancelled = 0, rc = MPI_SUCCESS, looks = 0;
    MPI_Status st;
    if (j->kind != HD_RECV || j->message.req == MPI_REQUEST_NULL)
        return j->message.req == MPI_REQUEST_NULL;
    if (!j->message.recalled && !hd_message_matched(j))
        cancel(j);
    j->message.recalled = ASKED;
    while (!look_at_recalled(j, &cancelled, &st, &rc)) {
        if (++looks < 1000)
            continue;
        if (hd_now() > until)
            return 0;
        sched_yield();
    }
    settle_recalled(j, cancelled, &st, rc);
    return 1;
}

/* With j->message.mu held: the deadline of the group has passed. */
static void time_out(hd_job *j)
{
    char buffer[HD_TEXT];
    hd_comm *c = j->comm;
    const double waited = elapsed(j);
    int over;

    if (hd_now() < hd_stopped_end(c->session))
        return; /* its death ends the message, too */
    over = end_request(j, PATIENCE);
    if (over && j->message.recalled == ASKED) { /* it came just then */
        finish(j);
        return;
    }
    hd_say_overdue(buffer, j, waited, over);
    hd_fail(j, HD_ERR_TIMEOUT, "%s", buffer);
    hd_hang_report(c->session, buffer, 0);
    finish(j);
}

/* A message that would match but for its dtype, or because it goes in pieces. */
static int other_dtype(hd_job *j)
{
    hd_comm *c = j->comm;
    if (j->message.tag_kind && j->message.tag_kind != HD_ANNOUNCEMENT)
        return 0;
    for (int d = 0; d <= HD_ANNOUNCEMENT; d++) {
        const int announced = d == HD_ANNOUNCEMENT;
        MPI_Status st;
        int flag = 0, rc;
        if (TAG(j->message.tag, d) == hd_tag(j) || (d >= HD_NDTYPES && !announced))
            continue;
        hd_mpi_lock(c->session);
        rc = MPI_Iprobe(j->message.peer < 0 ? MPI_ANY_SOURCE : j->message.peer,
                        TAG(j->message.tag, d), c->mpi, &flag, &st);
        hd_mpi_unlock(c->session);
        if (!rc && flag) {
            hd_fail(j, HD_ERR_MISMATCH,
                    "rank %d sent %s%s with tag %d, but rank %d receives %lld elements of %s "
                    "(group '%s'%s%s). The message waits for a matching recv; the group can still "
                    "be used.",
                    st.MPI_SOURCE, announced ? "a long CUDA tensor" : "elements of ",
                    announced ? "" : hd_dtype_name(d), j->message.tag, c->rank, (long long)j->count,
                    hd_dtype_name(j->dtype), c->name, j->site[0] ? ", called at " : "", j->site);
            return 1;
        }
    }
    return 0;
}

/* With j->message.mu held: a message of another dtype waits. It may have come after this one's own,
 * which is longer and still on its way: MPI cancels no receive that has matched. */
static void end_unless_matched(hd_job *j)
{
    if (end_request(j, PATIENCE)) {
        finish(j);
        return;
    }
    free(j->text);
    j->text = NULL;
    j->code = HD_OK;
}

static int closed(const hd_comm *c)
{
    return __atomic_load_n(&c->closing, __ATOMIC_SEQ_CST) == HD_COMM_CLOSED;
}
static int recalls(const hd_comm *c) { return __atomic_load_n(&c->recalls, __ATOMIC_ACQUIRE); }

static void fail_closed(hd_job *j)
{
    const int open = __atomic_load_n(&j->comm->closing, __ATOMIC_SEQ_CST) == HD_COMM_OPEN;
    hd_fail(j, HD_ERR_CLOSED,
            "%s '%s' %s before %s %s rank %d, tag %d, had ended (this is rank %d of %d%s%s)",
            open ? "the program finalized MPI, and group" : "group", j->comm->name,
            open ? "ended" : "was destroyed", j->api, hd_peer_is(j), j->message.peer,
            j->message.tag, j->comm->rank, j->comm->size, j->site[0] ? ", called at " : "",
            j->site);
}

/* With j->message.mu held: the group is being destroyed. */
static void end_closed(hd_job *j)
{
    fail_closed(j);
    end_request(j, PATIENCE);
    finish(j);
}

/* With j->message.mu held. If the group no longer waits for receives, asks MPI to cancel this one,
 * unless its message is on its way. The next thread that tests it finds the outcome. */
static void recall(hd_job *j)
{
    if (j->kind != HD_RECV || j->message.recalled || !recalls(j->comm) || hd_message_matched(j))
        return;
    fail_closed(j);
    cancel(j);
}

/* Each time: who asks waits, and this rank may wait for what it answers. */
static void serve(void)
{
    void (*const serves)(void) = __atomic_load_n(&hd_p2p_serves, __ATOMIC_ACQUIRE);
    if (serves)
        serves();
}

static void look_at_others(void)
{
    void (*const others)(void) = __atomic_load_n(&hd_p2p_others, __ATOMIC_ACQUIRE);
    if (others)
        others();
}

int hd_p2p_wait(hd_job *j, double seconds, int interruptible)
{
    hd_comm *c = j->comm;
    unsigned looks = 0;
    hd_waiter w;

    if (hd_p2p_test(j))
        return j->code;
    hd_session_enter(c->session, j);
    hd_waiter_init(&w, hd_session_spin(c->session, 0), seconds);
    for (;;) {
        int ev;
        if (hd_p2p_test(j))
            break;
        serve();
        if (++looks % OTHERS == 0)
            look_at_others();
        ev = hd_waiter_step(&w);
        if (ev && !__atomic_load_n(&j->message.posted, __ATOMIC_RELAXED))
            elapsed(j);
        if (ev & HD_WAIT_HOOK) {
            hd_session_note(c->session, j);
            if (j->timeout > 0)
                hd_hang_expect(c->session, j->timeout - elapsed(j));
            if (interruptible && hd_py.slow && hd_py.slow(j)) {
                hd_session_leave(c->session);
                return HD_ERR_INTERRUPT;
            }
            pthread_mutex_lock(&j->message.mu);
            if (hd_job_state(j) != HD_DONE) {
                if (test_locked(j)) {
                } else if (closed(c)) {
                    end_closed(j);
                } else if (j->kind == HD_RECV && !j->message.recalled && !hd_message_matched(j) &&
                           other_dtype(j)) {
                    end_unless_matched(j);
                } else if (hd_peer_gone(j) || hd_peer_closed(j)) {
                    end_request(j, PATIENCE);
                    finish(j);
                } else if (expired(j)) {
                    time_out(j);
                } else {
                    recall(j);
                }
            }
            pthread_mutex_unlock(&j->message.mu);
        }
        if ((ev & HD_WAIT_EXPIRED) && hd_job_state(j) != HD_DONE) {
            hd_session_leave(c->session);
            return -1;
        }
    }
    hd_session_leave(c->session);
    return j->code;
}

int hd_p2p_take_back(hd_job *j, double seconds)
{
    int taken = 0;
    pthread_mutex_lock(&j->message.mu);
    if (test_locked(j)) {
        taken = j->message.recalled == TAKEN;
    } else {
        hd_fail(j, HD_ERR_BACKEND, "%s from rank %d, tag %d, of group '%s' was cancelled", j->api,
                j->message.peer, j->message.tag, j->comm->name);
        if (end_request(j, seconds)) {
            taken = j->message.recalled == TAKEN;
            finish(j);
        } else if (expired(j)) {
            time_out(j);
        } else if (closed(j->comm)) {
            end_closed(j);
        } else if (hd_peer_gone(j)) {
            finish(j);
        } else {
            taken = -1;
        }
    }
    pthread_mutex_unlock(&j->message.mu);
    return taken;
}

void hd_p2p_give_up(hd_job *j)
{
    pthread_mutex_lock(&j->message.mu);
    for (int looks = LOOKS; looks && !test_locked(j); looks--)
        ;
    if (hd_job_state(j) != HD_DONE) {
        j->code = HD_ERR_INTERRUPT;
        finish(j);
    }
    pthread_mutex_unlock(&j->message.mu);
}

/* ---- for the poller ---- */

int hd_p2p_look_after(hd_job *j)
{
    if (hd_p2p_test(j))
        return 1;
    if (!(expired(j) || recalls(j->comm)) || pthread_mutex_trylock(&j->message.mu))
        return 0;
    if (test_locked(j)) {
    } else if (expired(j)) {
        time_out(j);
    } else {
        recall(j);
    }
    pthread_mutex_unlock(&j->message.mu);
    return hd_job_state(j) == HD_DONE;
}

void hd_p2p_end(hd_job *j)
{
    pthread_mutex_lock(&j->message.mu);
    if (!test_locked(j))
        end_closed(j);
    pthread_mutex_unlock(&j->message.mu);
}
