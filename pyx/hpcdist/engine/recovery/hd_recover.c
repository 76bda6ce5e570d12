/* Agreement and recovery after a rank has died.
 *
 * A recovery has four steps:
 *   1. An agreement whose flag nobody reads: when it ends, all ranks that live are here. Until then
 *      a rank can give up.
 *   2. MPIX_Comm_shrink of the session's control communicator.
 *   3. A new session on the result, with its page and a communicator. Its parts are made by calls
 *      that expect all ranks to be there. If another rank dies meanwhile, the old session's
 *      watchdog, which still watches the node, revokes the communicators that they use, so none of
 *      these calls waits for it. After each that makes such a communicator, the ranks agree
 *      whether all have it.
 *   4. An agreement on whether all ranks have made it; else again from 2.
 * Spares take part in all four: see hd_spares.h. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "hd_accord.h"
#include "hd_base.h"
#include "hd_comm.h"
#include "hd_comm_life.h"
#include "hd_exit.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_making.h"
#include "hd_recorder_file.h"
#include "hd_recover.h"
#include "hd_session.h"
#include "hd_session_life.h"
#include "hd_spares.h"
#include "hd_status.h"
#include "hd_stopped.h"

#define HALF 16     /* bits */
#define ATTEMPTS 64 /* one more after each in which another rank has died */
/* For which a rank that knows of no death lets the others end what they are in: this rank may have
 * done its part of it, and the last one to return from new_group would find its new group revoked.
 */
#define PATIENCE_NS 250000000

/* ns from one look of a spare to the next: it uses no core, and the others recover in milliseconds.
 * Once it knows of a death it looks more often. */
#define SPARE_NAP 10000000
#define SPARE_NAP_BROKEN 500000

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

/* One step of a spare that waits. */
static int nap(const hd_session *s)
{
    const struct timespec ts = {0, hd_session_broken(s) ? SPARE_NAP_BROKEN : SPARE_NAP};
    nanosleep(&ts, NULL);
    return HD_WAIT_HOOK;
}

/* breaks, which may be NULL, breaks after PATIENCE_NS, or when what is being made then is. spare:
 * of this process, which is one, or NULL. */
static int await(hd_session *s, MPI_Request *request, int64_t until, hd_session *breaks,
                 const hd_session *spare)
{
    const int64_t patient = hd_later(hd_now(), PATIENCE_NS);
    hd_waiter w;
    hd_waiter_init(&w, 0, -1);
    for (;;) {
        int done = 0, ev;
        const int rc = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (rc) {
            *request = MPI_REQUEST_NULL;
            return hd_accord_has_word(rc) ? HD_OK : HD_ERR_BACKEND;
        }
        if (done)
            return HD_OK;
        ev = spare ? nap(spare) : hd_waiter_step(&w);
        if (breaks && (ev & HD_WAIT_CLOCK) && is_time_to_break(breaks, patient)) {
            break_now(breaks);
            breaks = NULL;
        }
        if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(NULL))
            return HD_ERR_INTERRUPT;
        if ((ev & HD_WAIT_CLOCK) && hd_now() >= until && hd_now() >= hd_stopped_end(s))
            return HD_ERR_TIMEOUT;
    }
}

/* Goes on with it where an earlier call has given up. */
static int agree(hd_session *s, MPI_Comm comm, hd_accord *a, int64_t until, hd_session *breaks,
                 const hd_session *spare)
{
    int code;
    do {
        code = hd_accord_say(a, comm);
        if (code == HD_OK)
            code = await(s, &a->request, until, breaks, spare);
        if (code != HD_OK) {
            a->begun = a->going = code == HD_ERR_TIMEOUT || code == HD_ERR_INTERRUPT;
            return code;
        }
    } while (!hd_accord_heard(a));
    return HD_OK;
}

/* One that has called may have been stopped since. */
static void say_absent(const hd_session *s, hd_text *t, int recovers)
{
    const char *before = " (";
    for (int i = 0; s->page && i < s->node_n; i++)
        if (i != s->slot && (int)s->page[i].world_rank < s->active &&
            !__atomic_load_n(&s->dead[i], __ATOMIC_ACQUIRE) &&
            !(recovers && __atomic_load_n(&s->page[i].recovers, __ATOMIC_ACQUIRE) &&
              !hd_session_silent(s, i, HD_STARVED))) {
            hd_say(t, "%srank %u ", before, s->page[i].world_rank);
            hd_session_report((hd_session *)s, i, t);
            before = "; ";
        }
    if (before[0] == ';')
        hd_say(t, ")");
}

/* A flag has more bits than a value of an accord. */
static int agree_on_halves(hd_comm *c, unsigned flag, int64_t until)
{
    hd_vote *v = &c->vote;
    int code = HD_OK;
    if (!v->half.begun)
        *v = (hd_vote){.given = flag};
    while (code == HD_OK && v->halves < 2) {
        const int at = HALF * v->halves;
        if (!v->half.begun)
            hd_accord_begin(&v->half, (int)(v->given >> at & ((1u << HALF) - 1)), 0);
        code = agree(c->session, c->mpi, &v->half, until, NULL, NULL);
        if (code == HD_OK) {
            v->agreed |= (unsigned)v->half.value << at;
            v->halves++;
        }
    }
    return code;
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
    code = agree_on_halves(c, (unsigned)*flag, hd_until(timeout));
    *flag = (int)c->vote.agreed;
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

/* A spare says that it recovers when all are here, because it always is; if its agreement fails,
 * the ranks that need it may still be training. */
static int meet(hd_session *s, double timeout, int *wish, hd_text *t)
{
    const int spare = hd_spares_is(s);
    int code;
    if (!s->met.begun)
        hd_accord_begin(&s->met, HD_GOES_ON | (spare ? HD_REBUILDS | HD_LOSES : *wish), 1);
    if (!spare)
        hd_making_stop(s, hd_session_broken(s) ? HD_DEATH : HD_NO_DEATH);
    code = agree(s, s->ctl, &s->met, spare ? HD_NEVER : hd_until(timeout), spare ? NULL : s,
                 spare ? s : NULL);
    *wish = s->met.value & (HD_REBUILDS | HD_LOSES);
    if (code == HD_OK && s->met.value == HD_ENDS) {
        hd_say(t, "the other ranks have destroyed the default group");
        return HD_ERR_CLOSED;
    }
    if (!spare || !code)
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

/* The processes that are left, by new rank. Gives the number of active ranks; 0: none, and *now is
 * not made. */
static int regroup(const hd_session *s, MPI_Comm left, MPI_Comm *now, int *active, int *came_from,
                   int *place)
{
    int n = 0, mine = 0, key = 0, rc, *who, *former;
    MPI_Comm_size(left, &n);
    MPI_Comm_rank(left, &mine);
    if (!(who = calloc(2 * (size_t)n, sizeof *who)))
        return MPI_ERR_OTHER;
    former = who + n;
    for (int i = 0; i < n; i++)
        former[i] = came_from[i];
    *active = hd_spares_assign(former, n, s->active, who, place);
    for (int i = 0; i < n && *active; i++) {
        came_from[i] = former[who[i]];
        key = who[i] == mine ? i : key;
    }
    rc = *active ? MPI_Comm_split(left, 0, key, now) : MPI_SUCCESS;
    free(who);
    return rc;
}

/* The default group, or on a spare one of the spares. Collective over `from`, whose ranks are the
 * session's. */
static int open_group(const hd_comm *old, MPI_Comm from, hd_session *s, const char *name,
                      hd_comm **out, char *text, size_t room)
{
    MPI_Comm part = from;
    int code;
    if (hd_spares_has(s)) {
        int rc = MPI_Comm_split(from, hd_spares_is(s), s->rank, &part);
        if (s->remade)
            rc = hd_ft_made_all(from, rc, &part);
        if (rc) {
            snprintf(text, room, "MPI_Comm_split failed");
            return HD_ERR_BACKEND;
        }
        MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN);
        hd_ft_guard(part);
    }
    code = hd_comm_open(part, s, hd_spares_is(s) ? "spares" : name, old->timeout, old->check, out,
                        text, room);
    if (code == HD_OK)
        (*out)->node_limit = old->node_limit;
    if (part != from) {
        hd_ft_unguard(part);
        MPI_Comm_free(&part);
    }
    return code;
}

/* The first `active` ranks are the default group's, the others are spares. */
static void divide(hd_session *s, int active)
{
    s->active = active;
    hd_rec_place(s->rank, active, s->size - active);
}

/* A session of the ranks of `ctl`, which then owns that, and a communicator. */
static int build(const hd_comm *old, MPI_Comm ctl, int active, const char *name, hd_quota quota,
                 hd_session **s, hd_comm **out, char *text, size_t room)
{
    int code = hd_session_reopen(ctl, quota, s, text, room);
    if (code)
        return code;
    if (active)
        divide(*s, active);
    return open_group(old, ctl, *s, name, out, text, room);
}

/* Some rank could not make its part. */
static void demolish(hd_session *s, MPI_Comm ctl, hd_comm **out)
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
    else if (ctl != MPI_COMM_NULL)
        MPI_Comm_free(&ctl);
}

/* One attempt. *again: another rank has died meanwhile. */
static int try_rebuild(hd_comm *c, const char *name, hd_quota quota, hd_comm **out, int *came_from,
                       int *place, int *again, char *why, size_t room)
{
    hd_session *s = c->session, *made = NULL;
    const int spares = hd_spares_has(s);
    MPI_Comm left = MPI_COMM_NULL, ctl = MPI_COMM_NULL;
    int rc, all, code, active = 0;

    *again = 0;
    if (hd_ft_shrink(s->ctl, &left)) {
        snprintf(why, room, "MPIX_Comm_shrink failed");
        *again = 1;
        return HD_ERR_BACKEND;
    }
    MPI_Comm_set_errhandler(left, MPI_ERRORS_RETURN);
    hd_ft_guard(left);
    rc = former_ranks(s, left, came_from);
    if (!spares)
        ctl = left;
    else if (!rc)
        rc = regroup(s, left, &ctl, &active, came_from, place);
    rc = hd_ft_made(left, rc);
    if (spares && !rc && !active) {
        hd_ft_unguard(left);
        MPI_Comm_free(&left);
        snprintf(why, room, "all ranks of the default group have died, and spares alone are left");
        return HD_ERR_FAILED;
    }
    if (spares && !rc) {
        MPI_Comm_set_errhandler(ctl, MPI_ERRORS_RETURN);
        hd_ft_guard(ctl);
    }
    all = !rc && build(c, ctl, active, name, quota, &made, out, why, room) == HD_OK;
    if (spares && !rc)
        hd_ft_unguard(ctl);
    hd_ft_unguard(left);
    code = hd_accord_reach(left, &all);
    *again = code == HD_OK && !all;
    if (code || !all)
        demolish(made, ctl, out);
    else
        hd_session_unref(made); /* the communicator owns it now */
    if (spares)
        MPI_Comm_free(&left);
    return code || !all ? HD_ERR_BACKEND : HD_OK;
}

/* Of the ranks that are left, all of which are here. */
static int rebuild(hd_comm *c, const char *name, hd_quota quota, hd_comm **out, int *came_from,
                   int *place, hd_text *t)
{
    char why[256] = "";
    int code = HD_ERR_BACKEND, again = 1;
    for (int i = 0; i < ATTEMPTS && again; i++)
        code = try_rebuild(c, name, quota, out, came_from, place, &again, why, sizeof why);
    if (code)
        hd_say(t, "the ranks that are left made no new group%s%s", why[0] ? ": " : "", why);
    return code;
}

static void replace(hd_session *s)
{
    pthread_mutex_lock(&s->mu);
    for (hd_comm *c = s->comms; c; c = c->next)
        __atomic_store_n(&c->replaced, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->mu);
    hd_exit_unmet(0); /* the ranks that are left have met */
}

int hd_comm_recover(hd_comm *c, const char *name, double timeout, hd_quota quota, int *wish,
                    hd_comm **out, int *came_from, int *place, char *text, size_t room)
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
    if ((code = meet(s, timeout, wish, &t)))
        return code;
    __atomic_store_n(&s->rebuilt_by, hd_until(timeout), __ATOMIC_RELEASE);
    if ((code = rebuild(c, name, quota, out, came_from, place, &t)) == HD_OK)
        replace(s);
    for (int r = 0; code == HD_OK && !hd_spares_has(s) && r < (*out)->size; r++)
        place[r] = came_from[r];
    __atomic_store_n(&s->rebuilt_by, code ? 0 : -1, __ATOMIC_RELEASE);
    return code;
}

int hd_comm_set_aside(hd_comm *all, int spares, const char *name, hd_comm **out, char *text,
                      size_t room)
{
    hd_session *s = all->session;
    *out = NULL;
    divide(s, s->size - spares);
    s->uncommitted = !hd_spares_is(s); /* a spare may look often at once */
    return open_group(all, all->mpi, s, name, out, text, room);
}
