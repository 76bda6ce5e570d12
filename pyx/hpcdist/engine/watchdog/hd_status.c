/* The status page: what the ranks of a node know of each other without asking: whether a rank is
 * alive or leaving, in which call, and since when. It informs; no rank waits on it. */
#include <stdio.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_session.h"
#include "hd_starving.h"
#include "hd_status.h"

static uint64_t own_phase(const entry *e) { return __atomic_load_n(&e->phase, __ATOMIC_RELAXED); }

/* The fast path: a few stores into this rank's own entry, no clock. Two threads of a rank may
 * overwrite each other's stores; the entry only informs. */
void hd_session_enter(hd_session *s, const hd_job *j)
{
    __atomic_store_n(&s->last_api, j->api, __ATOMIC_RELAXED);
    __atomic_store_n(&s->last_seq, j->seq, __ATOMIC_RELAXED);
    __atomic_store_n(&s->last_tid, hd_tid(), __ATOMIC_RELAXED);
    if (s->page) {
        entry *e = &s->page[s->slot];
        __atomic_store_n(&e->seq, j->seq, __ATOMIC_RELAXED);
        __atomic_store_n(&e->kind, (uint32_t)j->kind, __ATOMIC_RELAXED);
        __atomic_store_n(&e->phase, (own_phase(e) + 1) | 1, __ATOMIC_RELAXED);
    }
}

void hd_session_leave(hd_session *s)
{
    if (s->page) {
        entry *e = &s->page[s->slot];
        __atomic_store_n(&e->phase, (own_phase(e) | 1) + 1, __ATOMIC_RELAXED);
    }
}

void hd_session_begin(hd_session *s)
{
    __atomic_store_n(&s->last_api, NULL, __ATOMIC_RELAXED);
    if (s->page) {
        entry *e = &s->page[s->slot];
        __atomic_store_n(&e->seq, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&e->kind, HD_BARRIER, __ATOMIC_RELAXED);
    }
}

void hd_session_note(hd_session *s, const hd_job *j)
{
    char text[sizeof s->page->text[0]] = "";
    entry *e;
    hd_text t;
    uint64_t k;
    if (!s->page)
        return;
    e = &s->page[s->slot];
    if (!(own_phase(e) & 1)) /* a call that a signal handler made meanwhile has ended */
        hd_session_enter(s, j);
    k = !(__atomic_load_n(&e->text_phase, __ATOMIC_RELAXED) & 1);
    hd_text_init(&t, text, sizeof text);
    if (j->kind == HD_SEND || j->kind == HD_RECV)
        hd_say(&t, "%s %s rank %d, tag %d", j->api, j->kind == HD_SEND ? "to" : "from",
               j->message.peer, j->message.tag);
    else
        hd_say(&t, "%s #%u", j->api, j->seq);
    hd_say(&t, " of group '%s'", j->comm->name);
    if (j->site[0])
        hd_say(&t, " at %s", j->site);
    hd_put_words(e->text[k], text, sizeof text);
    __atomic_store_n(&e->text_phase, (own_phase(e) << 1) | k, __ATOMIC_RELEASE);
}

/* Seconds: a call that times out within these is left to do so; programs may count on that. */
#define SOON 5

/* Whether this process cannot make another call while it waits in the present one. */
static int stuck_here(hd_session *s, double left)
{
    int pending = left < SOON;
    pthread_mutex_lock(&s->mu);
    for (hd_comm *c = s->comms; c; c = c->next)
        pending |= __atomic_load_n(&c->lane.pending, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&s->mu);
    return !pending && hd_py.alone && hd_py.alone();
}

void hd_session_blocked(hd_session *s, const hd_comm *c, uint32_t n, double left)
{
    entry *e;
    if (!s->page || !stuck_here(s, left))
        return;
    e = &s->page[s->slot];
    __atomic_store_n(&e->blocked_group, c->uid, __ATOMIC_RELAXED);
    __atomic_store_n(&e->blocked_check, n, __ATOMIC_RELAXED);
    __atomic_store_n(&e->blocked_phase, own_phase(e), __ATOMIC_RELEASE);
}

uint32_t hd_session_crossed(hd_session *s, const hd_comm *c, int slot, const char **where)
{
    const entry *e, *me;
    uint64_t phase, group;
    uint32_t n;
    int waits = 0;

    if (!s->page || slot < 0)
        return 0;
    e = &s->page[slot], me = &s->page[s->slot];
    phase = __atomic_load_n(&e->blocked_phase, __ATOMIC_ACQUIRE);
    group = __atomic_load_n(&e->blocked_group, __ATOMIC_ACQUIRE);
    n = __atomic_load_n(&e->blocked_check, __ATOMIC_ACQUIRE);
    if (!(phase & 1) || phase != __atomic_load_n(&e->phase, __ATOMIC_ACQUIRE) || group == c->uid ||
        __atomic_load_n(&me->blocked_phase, __ATOMIC_RELAXED) != own_phase(me))
        return 0;
    pthread_mutex_lock(&s->mu);
    for (hd_comm *other = s->comms; other && !waits; other = other->next)
        if (other->uid == group && !other->freed && (int32_t)(n - other->check_seq) > 0) {
            waits = 1;
            *where = other->name;
        }
    pthread_mutex_unlock(&s->mu);
    return waits ? n : 0;
}

int hd_session_broken(const hd_session *s) { return __atomic_load_n(&s->broken, __ATOMIC_ACQUIRE); }

enum hd_gone hd_session_gone(hd_session *s, int slot)
{
    uint32_t state;
    if (!s->page || slot < 0)
        return HD_HERE;
    state = __atomic_load_n(&s->page[slot].state, __ATOMIC_ACQUIRE);
    if (state == LEAVING)
        return HD_LEFT;
    if (state == FAILING)
        return HD_FAILED;
    return __atomic_load_n(&s->dead[slot], __ATOMIC_ACQUIRE) ? HD_DIED : HD_HERE;
}

/* Whether the rank has begun an operation since hd_session_begin(); messages have no number. */
static int has_called(const entry *e)
{
    return __atomic_load_n(&e->kind, __ATOMIC_RELAXED) >= HD_SEND ||
           __atomic_load_n(&e->seq, __ATOMIC_RELAXED);
}

static void say_last(hd_text *t, const entry *e)
{
    const uint32_t kind = __atomic_load_n(&e->kind, __ATOMIC_RELAXED);
    hd_say(t, "%s", kind == HD_RECV ? "receive" : hd_kind_name((int)kind));
    if (kind < HD_SEND)
        hd_say(t, " #%u", __atomic_load_n(&e->seq, __ATOMIC_RELAXED));
}

int64_t hd_session_silent(const hd_session *s, int slot, int64_t limit)
{
    const int64_t since = hd_uptime() - __atomic_load_n(&s->page[slot].beat, __ATOMIC_RELAXED);
    return since > limit ? since : 0;
}

int64_t hd_session_starved(const hd_session *s, int slot)
{
    const entry *e = &s->page[slot];
    const uint64_t phase = __atomic_load_n(&e->phase, __ATOMIC_ACQUIRE);
    if (!(phase & 1) || __atomic_load_n(&e->since_phase, __ATOMIC_ACQUIRE) != phase)
        return 0;
    return __atomic_load_n(&e->starved, __ATOMIC_RELAXED);
}

void hd_session_report(hd_session *s, int slot, hd_text *t)
{
    entry *e;
    uint64_t phase, tp;
    int64_t now = hd_uptime(), silent;
    double since = 0.0, starved;

    if (!s->page || slot < 0) {
        hd_say(t, "on another node");
        return;
    }
    e = &s->page[slot];
    switch (hd_session_gone(s, slot)) {
    case HD_HERE: break;
    case HD_LEFT: hd_say(t, "has left the job in order (pid %u)", e->pid); return;
    case HD_DIED: hd_say(t, "died (pid %u)", e->pid); return;
    case HD_FAILED: hd_say(t, "%s", e->why); return;
    }
    if ((silent = hd_session_silent(s, slot, HD_STARVED))) {
        hd_say(t, "shows no sign of life for %.1f s (pid %u is stopped or starved)",
               (double)silent * 1e-9, e->pid);
        return;
    }
    phase = __atomic_load_n(&e->phase, __ATOMIC_ACQUIRE);
    tp = __atomic_load_n(&e->text_phase, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&e->since_phase, __ATOMIC_ACQUIRE) == phase)
        since = (double)(now - __atomic_load_n(&e->since, __ATOMIC_RELAXED)) * 1e-9;
    if (phase & 1) {
        char copy[sizeof e->text[0]];
        hd_get_words(copy, e->text[tp & 1], sizeof copy);
        copy[sizeof copy - 1] = 0;
        if (tp >> 1 == phase && __atomic_load_n(&e->text_phase, __ATOMIC_RELAXED) == tp) {
            hd_say(t, "is in %s for %.1f s", copy, since);
        } else {
            hd_say(t, "is in ");
            say_last(t, e);
            hd_say(t, " for %.1f s", since);
        }
        starved = (double)hd_session_starved(s, slot) * 1e-9;
        if (starved > since / 2)
            hd_say(t, ", %.1f s of it without a core", starved);
    } else if (phase && has_called(e)) {
        hd_say(t, "is outside hpcdist for %.1f s (last: ", since);
        say_last(t, e);
        hd_say(t, "; pid %u)", e->pid);
    } else {
        hd_say(t, "has called no operation yet (pid %u)", e->pid);
    }
}

void hd_session_set_leaving(hd_session *s)
{
    if (s && s->page && s->page[s->slot].state == RUNNING)
        __atomic_store_n(&s->page[s->slot].state, LEAVING, __ATOMIC_RELEASE);
}

void hd_session_set_failing(hd_session *s, const char *why)
{
    if (!s->page)
        return;
    snprintf(s->page[s->slot].why, sizeof s->page[s->slot].why, "failed (%s)", why);
    __atomic_store_n(&s->page[s->slot].state, FAILING, __ATOMIC_RELEASE);
}
