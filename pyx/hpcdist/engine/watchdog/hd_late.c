/* Who makes the others wait: see hd_late.h. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_late.h"
#include "hd_session.h"

/* What this rank has waited for one member. Only the lane's thread writes `ns` to `worst`; the
 * watchdog remembers in the rest what they were when the window began. */
typedef struct member {
    int64_t ns;     /* atomic, as the next two */
    uint32_t times; /* collectives in which it waited for it */
    int64_t worst;  /* ns, the longest wait since the watchdog has set it to 0 */
    int64_t now;    /* ns of the present wait */
    int64_t ns_before;
    uint32_t times_before;
} member;

struct hd_late {
    int64_t queued; /* ns: the wait of the last operation, if that was asynchronous */
    member by[];
};

static double share = 0.0;
static int64_t window = 60000000000LL; /* ns */

void hd_late_wish(double of, double seconds)
{
    share = of;
    window = hd_ns(seconds);
}

/* An asynchronous operation holds up its lane, not the program: what the program will lose is how
 * far the member falls behind from one operation to the next. */
static int64_t lost(struct hd_late *l, const hd_job *j, int64_t ns)
{
    const int64_t before = l->queued;
    l->queued = j->inline_ ? 0 : ns;
    if (j->inline_)
        return ns;
    return ns > before ? ns - before : 0;
}

void hd_late_waited(hd_comm *c, const hd_job *j, int rank, int64_t ns, int more)
{
    struct hd_late *l = c->late;
    member *m;
    if (share <= 0)
        return;
    if (!l) {
        if (!(l = calloc(1, sizeof *l + (size_t)c->size * sizeof l->by[0])))
            return;
        __atomic_store_n(&c->late, l, __ATOMIC_RELEASE);
    }
    ns = lost(l, j, ns);
    m = &l->by[rank];
    __atomic_store_n(&m->ns, m->ns + ns, __ATOMIC_RELAXED);
    m->now += ns;
    if (m->now > __atomic_load_n(&m->worst, __ATOMIC_RELAXED))
        __atomic_store_n(&m->worst, m->now, __ATOMIC_RELAXED);
    if (more)
        return;
    __atomic_store_n(&m->times, m->times + 1, __ATOMIC_RELAXED);
    m->now = 0;
}

void hd_late_free(hd_comm *c)
{
    free(c->late);
    c->late = NULL;
}

/* ---- the watchdog's part ---- */

static int first_to_warn(hd_session *s)
{
    static int alone;
    int *warned = s->page ? &s->page[0].warned : &alone;
    return !__atomic_exchange_n(warned, 1, __ATOMIC_ACQ_REL);
}

static void warn(hd_session *s, const hd_comm *c, int rank, double seconds, hd_text *t)
{
    const member *m = &c->late->by[rank];
    /* Between nodes a wait is counted when the next collective is called: it may have been longer.
     */
    const double all = (double)(__atomic_load_n(&m->ns, __ATOMIC_RELAXED) - m->ns_before) * 1e-9,
                 waited = all < seconds ? all : seconds;
    if (!first_to_warn(s))
        return;
    hd_say(t, "[hpcdist rank %d of %d] warning: rank %d of group '%s'", s->rank, s->size, rank,
           c->name);
    if (s->page && c->node_slot[rank] >= 0 && !c->as_world)
        hd_say(t, " (rank %u of the job)", s->page[c->node_slot[rank]].world_rank);
    hd_say(t,
           " makes the others wait: in the last %.3g s rank %d waited %.3g s for it (%.0f %%) in "
           "%u collectives, at most %.3g s in one. This is said once per node; HPCDIST_STRAGGLER "
           "sets the share (%.3g; 0: off). python -m hpcdist top shows what the ranks do.",
           seconds, s->rank, waited, 100 * waited / seconds,
           __atomic_load_n(&m->times, __ATOMIC_RELAXED) - m->times_before,
           (double)__atomic_load_n(&m->worst, __ATOMIC_RELAXED) * 1e-9, share);
}

/* The end of a window: the next one begins. The worst member, or -1. */
static int turn(const hd_comm *c, int64_t passed, double *part)
{
    struct hd_late *l = __atomic_load_n(&c->late, __ATOMIC_ACQUIRE);
    int worst = -1;
    *part = share;
    for (int r = 0; l && r < c->size; r++) {
        const double of =
            (double)(__atomic_load_n(&l->by[r].ns, __ATOMIC_RELAXED) - l->by[r].ns_before) /
            (double)passed;
        if (of > *part) {
            *part = of;
            worst = r;
        }
    }
    return worst;
}

static void begin(const hd_comm *c)
{
    struct hd_late *l = __atomic_load_n(&c->late, __ATOMIC_ACQUIRE);
    for (int r = 0; l && r < c->size; r++) {
        member *m = &l->by[r];
        m->ns_before = __atomic_load_n(&m->ns, __ATOMIC_RELAXED);
        m->times_before = __atomic_load_n(&m->times, __ATOMIC_RELAXED);
        __atomic_store_n(&m->worst, 0, __ATOMIC_RELAXED);
    }
}

void hd_late_look(hd_session *s, int64_t now, hd_text *t)
{
    const hd_comm *found = NULL;
    double most = 0, part;
    int who = -1;
    if (share <= 0)
        return;
    if (!s->window)
        s->window = now;
    if (now - s->window < window)
        return;
    for (const hd_comm *c = s->comms; c; c = c->next) {
        const int r = turn(c, now - s->window, &part);
        if (r >= 0 && part > most) {
            found = c;
            who = r;
            most = part;
        }
    }
    if (found)
        warn(s, found, who, (double)(now - s->window) * 1e-9, t);
    for (const hd_comm *c = s->comms; c; c = c->next)
        begin(c);
    s->window = now;
}
