/* Agreement and recovery after a rank has died.
 *
 * A recovery has four steps:
 *   1. An agreement whose flag nobody reads: when it ends, all ranks that live are here. Until then
 *      a rank can give up.
 *   2. MPIX_Comm_shrink of the session's control communicator.
 *   3. A new session on the result, with its page and a communicator. Its parts are made by calls
 *      that expect all ranks to be there. If another rank dies meanwhile, the old session's
 *      watchdog, which still watches the node, revokes the communicators that they use, so none of
 *      these calls waits for it.
 *   4. An agreement on whether all ranks have made it; else again from 2. */
#include <stdio.h>
#include <stdlib.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_comm_life.h"
#include "hd_exit.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_making.h"
#include "hd_recover.h"
#include "hd_session.h"
#include "hd_session_life.h"
#include "hd_status.h"

#define ATTEMPTS 64 /* one more after each in which another rank has died */
/* For which a rank that knows of no death lets the others end what they are in: this rank may have
 * done its part of it, and the last one to return from new_group would find its new group revoked.
 */
#define PATIENCE_NS 250000000

static void break_now(hd_session *s)
{
    hd_making_broke(s);
    hd_ft_break(s);
}

static int is_time_to_break(hd_session *s, int64_t patient)
{
    const int64_t now = hd_now();
    return hd_session_broken(s) ||
           (now >= patient && (!hd_making_goes_on(s) || now >= hd_later(patient, HD_MAKING_NS)));
}

/* breaks, which may be NULL, breaks after PATIENCE_NS, or when what is being made then is. */
static int await(MPI_Request *request, int64_t until, hd_session *breaks)
{
    const int64_t patient = hd_later(hd_now(), PATIENCE_NS);
    hd_waiter w;
    hd_waiter_init(&w, 0, -1);
    for (;;) {
        int done = 0, ev;
        const int rc = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (rc) {
            *request = MPI_REQUEST_NULL;
            return hd_ft_agreed(rc) ? HD_OK : HD_ERR_BACKEND;
        }
        if (done)
            return HD_OK;
        ev = hd_waiter_step(&w);
        if (breaks && (ev & HD_WAIT_CLOCK) && is_time_to_break(breaks, patient)) {
            break_now(breaks);
            breaks = NULL;
        }
        if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(NULL))
            return HD_ERR_INTERRUPT;
        if ((ev & HD_WAIT_CLOCK) && hd_now() >= until)
            return HD_ERR_TIMEOUT;
    }
}

/* going: it has begun, in an earlier call that gave up. */
static int agree(MPI_Comm comm, int *flag, MPI_Request *request, int *going, int64_t until,
                 hd_session *breaks)
{
    int code = *going ? HD_OK : hd_ft_iagree(comm, flag, request);
    if (code == HD_OK)
        code = await(request, until, breaks);
    *going = code == HD_ERR_TIMEOUT || code == HD_ERR_INTERRUPT;
    return code;
}

/* One that has called may have been stopped since. */
static void say_absent(const hd_session *s, hd_text *t, int recovers)
{
    const char *before = " (";
    for (int i = 0; s->page && i < s->node_n; i++)
        if (i != s->slot && !__atomic_load_n(&s->dead[i], __ATOMIC_ACQUIRE) &&
            !(recovers && __atomic_load_n(&s->page[i].recovers, __ATOMIC_ACQUIRE) &&
              !hd_session_silent(s, i, HD_STARVED))) {
            hd_say(t, "%srank %u ", before, s->page[i].world_rank);
            hd_session_report((hd_session *)s, i, t);
            before = "; ";
        }
    if (before[0] == ';')
        hd_say(t, ")");
}

int hd_comm_agree(hd_comm *c, int *flag, double timeout, char *text, size_t room)
{
    hd_text t;
    int code;

    hd_text_init(&t, text, room);
    if (!c->session->ft) {
        hd_say(&t, "group '%s' cannot agree: %s", c->name,
               hd_ft_missing() ? hd_ft_missing() : "HPCDIST_FT is not set");
        return HD_ERR_BACKEND;
    }
    if (!c->vote.going)
        c->vote.flag = *flag;
    code = agree(c->mpi, &c->vote.flag, &c->vote.request, &c->vote.going, hd_until(timeout), NULL);
    *flag = c->vote.flag;
    if (code == HD_ERR_TIMEOUT) {
        hd_say(&t, "timeout after %.3g s in an agreement of group '%s' (this is rank %d of %d)",
               timeout, c->name, c->rank, c->size);
        say_absent(c->session, &t, 0);
    } else if (code) {
        hd_say(&t, "MPIX_Comm_iagree failed in group '%s'", c->name);
    }
    return code;
}

/* ---- recovery ---- */

static int meet(hd_session *s, double timeout, hd_text *t)
{
    const int broken = hd_session_broken(s);
    int code;
    if (!s->meeting)
        s->met_flag = 1;
    hd_making_stop(s, broken ? HD_DEATH : HD_NO_DEATH);
    code = agree(s->ctl, &s->met_flag, &s->met, &s->meeting, hd_until(timeout), s);
    break_now(s);
    if (code == HD_ERR_TIMEOUT) {
        hd_say(t, "timeout after %.3g s: not all ranks that are left have called reconfigure",
               timeout);
        say_absent(s, t, 1);
        hd_say(t, ". It may be called again.");
    } else if (code) {
        hd_say(t, "MPIX_Comm_iagree failed");
    }
    return code;
}

static int former_ranks(hd_session *s, MPI_Comm now, int *out)
{
    MPI_Group all = MPI_GROUP_NULL, left = MPI_GROUP_NULL;
    int n = 0, *ranks = NULL, rc;
    if ((rc = MPI_Comm_group(s->ctl, &all)) || (rc = MPI_Comm_group(now, &left)))
        return rc;
    MPI_Group_size(left, &n);
    ranks = calloc((size_t)n + 1, sizeof *ranks);
    for (int i = 0; ranks && i < n; i++)
        ranks[i] = i;
    rc = ranks ? MPI_Group_translate_ranks(left, n, ranks, all, out) : MPI_ERR_OTHER;
    if (!rc)
        hd_ft_settle(s, out, n);
    free(ranks);
    MPI_Group_free(&all);
    MPI_Group_free(&left);
    return rc;
}

/* A session of the ranks of `left`, which then owns that, and a communicator. */
static int build(hd_comm *old, MPI_Comm left, const char *name, hd_quota quota, hd_session **s,
                 hd_comm **out, char *text, size_t room)
{
    int code = hd_session_reopen(left, quota, s, text, room);
    if (!code)
        code = hd_comm_open(left, *s, name, old->timeout, old->check, out, text, room);
    if (code == HD_OK)
        (*out)->node_limit = old->node_limit;
    return code;
}

/* Some rank could not make its part. */
static void demolish(hd_session *s, MPI_Comm left, hd_comm **out)
{
    hd_comm *failed = *out;
    *out = NULL;
    if (s)
        hd_ft_break(s);
    if (failed) {
        hd_comm_free(failed, 1, HD_KEEP);
        hd_comm_release(failed);
    }
    if (s)
        hd_session_unref(s);
    else
        MPI_Comm_free(&left);
}

/* Of the ranks that are left, all of which are here. */
static int rebuild(hd_comm *c, const char *name, hd_quota quota, hd_comm **out, int *came_from,
                   hd_text *t)
{
    char why[256] = "";
    for (int i = 0; i < ATTEMPTS; i++) {
        MPI_Comm left = MPI_COMM_NULL;
        hd_session *made = NULL;
        int all, code;
        if (hd_ft_shrink(c->session->ctl, &left)) {
            hd_say(t, "MPIX_Comm_shrink failed");
            return HD_ERR_BACKEND;
        }
        MPI_Comm_set_errhandler(left, MPI_ERRORS_RETURN);
        hd_ft_guard(left);
        all = !former_ranks(c->session, left, came_from);
        all &= build(c, left, name, quota, &made, out, why, sizeof why) == HD_OK;
        hd_ft_unguard(left);
        code = hd_ft_shrunk(left, &all);
        if (code == HD_OK && all) {
            hd_session_unref(made); /* the communicator owns it now */
            return HD_OK;
        }
        demolish(made, left, out);
        if (code)
            break;
    }
    hd_say(t, "the ranks that are left made no new group%s%s", why[0] ? ": " : "", why);
    return HD_ERR_BACKEND;
}

static void replace(hd_session *s)
{
    pthread_mutex_lock(&s->mu);
    for (hd_comm *c = s->comms; c; c = c->next)
        __atomic_store_n(&c->replaced, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->mu);
    hd_exit_unmet(0); /* the ranks that are left have met */
}

int hd_comm_recover(hd_comm *c, const char *name, double timeout, hd_quota quota, hd_comm **out,
                    int *came_from, char *text, size_t room)
{
    hd_session *s = c->session;
    hd_text t;
    int code;

    *out = NULL;
    hd_text_init(&t, text, room);
    if (!s->ft) {
        hd_say(&t, "group '%s' cannot be reconfigured: %s", c->name,
               hd_ft_missing() ? hd_ft_missing() : "HPCDIST_FT is not set");
        return HD_ERR_BACKEND;
    }
    if ((code = meet(s, timeout, &t)))
        return code;
    __atomic_store_n(&s->rebuilt_by, hd_until(timeout), __ATOMIC_RELEASE);
    if ((code = rebuild(c, name, quota, out, came_from, &t)) == HD_OK)
        replace(s);
    __atomic_store_n(&s->rebuilt_by, code ? 0 : -1, __ATOMIC_RELEASE);
    return code;
}
