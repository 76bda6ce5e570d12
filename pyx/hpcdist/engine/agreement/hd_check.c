/* The entry check: before data moves, the ranks of a group agree on what they are about to do.
 *
 * On one node it goes through a page of shared memory (hd_page.h). Each rank publishes the number
 * of the check it has reached with a fingerprint of its call, waits until all other ranks have
 * arrived, and compares. Between nodes the check goes through MPI (hd_check_mpi.c).
 *
 * Giving up is one decision for all ranks: a rank that goes on to the data while another has timed
 * out would hang. Nothing has been sent when a check is abandoned, so the group stays usable and
 * in step.
 *
 * A rank that refuses its own arguments passes the check at once and leaves its reason. It waits
 * for no rank; the others find the check abandoned, and read the reason.
 *
 * The data of a call of a few bytes per rank travels with the fingerprint: up to 8 bytes in the
 * slot itself, more in lines beside it. It travels if it does on all ranks. A rank reads the
 * others' contributions before it leaves the check, as it does their fields, so the same rules
 * protect both. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_carry.h"
#include "hd_check.h"
#include "hd_check_mpi.h"
#include "hd_comm.h"
#include "hd_ft.h"
#include "hd_hang.h"
#include "hd_job.h"
#include "hd_late.h"
#include "hd_page.h"
#include "hd_page_pairs.h"
#include "hd_pairs.h"
#include "hd_report.h"
#include "hd_status.h"
#include "hd_threads.h"

/* One rank's way through one check. */
typedef struct visit {
    hd_comm *c;
    hd_job *j;
    uint32_t n;
    int joined; /* its fields are published: giving up takes a veto */
    hd_waiter wait;
    int64_t counted; /* ns: up to when it is counted for whom this rank has waited */
    uint32_t seen;   /* the check of another group that keeps a member from this one; 0: none */
} visit;

/* ---- abandoning ---- */

static int has_arrived(const void *visited, int rank)
{
    const visit *v = visited;
    return hd_page_arrived(v->c, rank, v->n);
}

/* Abandons the check for the given reason. Returns 0 if all ranks have arrived meanwhile. missing:
 * the ranks that have not arrived. */
static int abandon(visit *v, int why, int code, hd_text *missing)
{
    hd_comm *c = v->c;
    char here[HD_DESC];
    hd_describe_here(here, v->j);
    if (v->j->monitored)
        hd_say_awaited(here, c, has_arrived, v);
    hd_page_leave_note(c, v->n, why, code, hd_waiter_elapsed(&v->wait), here);
    if (v->joined)
        return hd_page_veto(c, v->n, missing);
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !hd_page_arrived(c, r, v->n - 1))
            hd_say(missing, "%s%d", missing->used ? ", " : "", r);
    hd_page_pass(c, v->n);
    return 1;
}

/* The other ranks that have not arrived, though the check is over. Returns their number. */
static int name_late(hd_text *t, const visit *v)
{
    int late = 0;
    for (int r = 0; r < v->c->size; r++)
        if (r != v->c->rank && !hd_page_arrived(v->c, r, v->n))
            hd_say(t, "%s%d", late++ ? ", " : "", r);
    return late;
}

/* Why, in the words of the rank `by` that gave up. late: as below. */
static void say_note(hd_text *t, const visit *v, int by, const hd_note *note, int late)
{
    char names[256];
    hd_text missing;
    int many;

    hd_text_init(&missing, names, sizeof names);
    many = name_late(&missing, v);
    hd_say(t, "%srank %d gave up after %.3g s in %s%s", late ? "this rank arrived too late: " : "",
           by, note->after, note->text,
           note->why == HD_INTERRUPTED ? ", where a signal handler raised" : "");
    if (note->why == HD_GAVE_UP && !late && many)
        hd_say(t, " because rank%s %s %s not joined ", many > 1 ? "s" : "", names,
               many > 1 ? "have" : "has");
    else if (note->why == HD_GAVE_UP && late && many)
        hd_say(t, "; rank%s %s %s not joined either; this rank enters with ", many > 1 ? "s" : "",
               names, many > 1 ? "have" : "has");
    else if (note->why == HD_GAVE_UP && !late)
        hd_say(t, " because a rank has not joined ");
    else
        hd_say(t, late ? "; this rank enters with " : "; this rank is in ");
}

/* The first member that has left the group without arriving, or -1. The order of the two reads
 * matters. */
static int find_closed(const visit *v)
{
    for (int r = 0; r < v->c->size; r++)
        if (r != v->c->rank && hd_page_closed(v->c, r) && !hd_page_arrived(v->c, r, v->n))
            return r;
    return -1;
}

/* Other ranks have abandoned the check; late: because this rank arrived too late, among others. */
static int fail_abandoned(visit *v, int late)
{
    hd_comm *c = v->c;
    hd_job *j = v->j;
    char buffer[HD_TEXT];
    hd_text t;
    hd_note note = {.code = HD_ERR_TIMEOUT};
    hd_refused refused;
    enum hd_gone how;
    int by = -1, closed;
    const int noted = hd_page_find_note(c, v->n, &by, &note);

    if (noted && note.why == HD_GAVE_UP && note.code == HD_ERR_FAILED)
        hd_ft_hear(c->session);
    if (!(noted && note.why == HD_REFUSED) &&
        (hd_fail_if_broken(c, j) || hd_fail_if_gone(c, j, has_arrived, v)))
        return j->code; /* a rank gave up because a member has gone: report that */
    if (noted && note.why == HD_INTERRUPTED &&
        (how = hd_session_gone(c->session, c->node_slot[by])))
        return hd_fail_gone(c, j, by, how); /* it was not a late rank that ended it */
    if (!(noted && note.why == HD_REFUSED) && (closed = find_closed(v)) >= 0)
        return hd_fail_closed(c, j, closed, hd_page_way(hd_page_closed(c, closed)));
    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    if (noted && note.why == HD_REFUSED) {
        hd_page_refused(c, v->n, by, &note, &refused);
        hd_say_refused(&t, j, note.code, &refused);
        hd_say(&t, "; this rank called ");
    } else if (noted) {
        say_note(&t, v, by, &note, late);
    } else {
        hd_say(&t, late ? "this rank arrived too late: another rank gave up waiting in "
                        : "another rank gave up waiting in ");
    }
    hd_say_call(&t, c, j);
    if (noted && note.why == HD_CROSSED)
        hd_say(&t, ". The ranks disagree about the order in which they use their groups");
    hd_say(&t, ". ");
    hd_say_unharmed(&t, c, j);
    hd_fail(j, note.code, "%s", buffer);
    return j->code;
}

static void say_missing(hd_session *s, int slot, hd_text *t)
{
    hd_session_report(s, slot, t);
    hd_hang_say_where(s, slot, t);
}

/* This rank's time is up. Returns HD_OK if all ranks have arrived meanwhile. */
static int time_out(visit *v)
{
    hd_comm *c = v->c;
    hd_job *j = v->j;
    const double after = hd_waiter_elapsed(&v->wait);
    char buffer[HD_TEXT], names[256];
    hd_text t, missing;

    hd_text_init(&missing, names, sizeof names);
    if (!abandon(v, HD_GAVE_UP, HD_ERR_TIMEOUT, &missing))
        return HD_OK;
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "timeout after %.3g s in ", after);
    hd_say_call(&t, c, j);
    hd_say(&t, ": rank%s %s %s not joined.", strchr(names, ',') ? "s" : "", names,
           strchr(names, ',') ? "have" : "has");
    for (int r = 0; r < c->size && t.used < 1200; r++) {
        if (r == c->rank)
            continue;
        hd_say(&t, "\n  rank %d: ", r);
        if (hd_page_arrived(c, r, v->n))
            hd_say(&t, "waits in the same call");
        else
            say_missing(c->session, c->node_slot[r], &t);
    }
    hd_say(&t, "\n");
    hd_say_unharmed(&t, c, j);
    hd_fail(j, HD_ERR_TIMEOUT, "%s", buffer);
    hd_hang_report(c->session, buffer, 0);
    return j->code;
}

/* A signal handler raised, or this rank finalizes MPI (HD_GAVE_UP). If all ranks are here, the
 * operation finishes first, and the exception is raised after it. */
static int interrupt(visit *v, enum hd_why why)
{
    char names[256];
    hd_text missing;
    const int code = v->j->code;

    hd_text_init(&missing, names, sizeof names);
    if (why == HD_INTERRUPTED)
        v->j->code = HD_ERR_INTERRUPT;
    if (code == HD_ERR_INTERRUPT || !abandon(v, why, HD_ERR_TIMEOUT, &missing))
        return HD_OK;
    return v->j->code = HD_ERR_INTERRUPT;
}

/* Rank r has gone without coming to this check. */
static int lose(visit *v, int r, enum hd_gone how)
{
    char names[256];
    hd_text missing;

    hd_text_init(&missing, names, sizeof names);
    return abandon(v, HD_GAVE_UP, HD_ERR_TIMEOUT, &missing) ? hd_fail_gone(v->c, v->j, r, how)
                                                            : HD_OK;
}

/* Rank r has left the group without coming to this check. */
static int lose_member(visit *v, int r)
{
    char names[256];
    hd_text missing;

    hd_text_init(&missing, names, sizeof names);
    if (!abandon(v, HD_GAVE_UP, HD_ERR_MISMATCH, &missing))
        return HD_OK;
    return hd_fail_closed(v->c, v->j, r, hd_page_way(hd_page_closed(v->c, r)));
}

/* A rank of the session has died, which may be in other groups only. */
static int lose_any(visit *v)
{
    char names[256];
    hd_text missing;

    hd_text_init(&missing, names, sizeof names);
    return abandon(v, HD_GAVE_UP, HD_ERR_FAILED, &missing) ? hd_fail_broken(v->c, v->j) : HD_OK;
}

/* Ranks that call two groups in different orders would wait for each other for ever. Rank r waits
 * in check `other` of group `where`. Returns HD_OK if it reached it meanwhile. */
static int cross(visit *v, int r, uint32_t other, const char *where)
{
    hd_comm *c = v->c;
    char buffer[HD_TEXT], names[256];
    hd_text t, missing;

    hd_note_site(v->j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "the ranks disagree about the order in which they use their groups: rank %d ", r);
    hd_session_report(c->session, c->node_slot[r], &t);
    hd_say(&t,
           ", waiting for this rank to make call %u of group '%s', while this rank waits for it "
           "in ",
           other, where);
    hd_say_call(&t, c, v->j);
    hd_say(&t, ". Neither could go on. ");
    hd_say_outcome(&t, v->j,
                   "; make all ranks call their groups in one order, or pass async_op=True and "
                   "wait afterwards.");
    hd_text_init(&missing, names, sizeof names);
    if (!abandon(v, HD_CROSSED, HD_ERR_MISMATCH, &missing))
        return HD_OK;
    hd_fail(v->j, HD_ERR_MISMATCH, "%s", buffer);
    return v->j->code;
}

/* ---- waiting for one rank ---- */

/* This rank waits for rank r, for so long that it has looked at a clock. */
static void count(visit *v, int r, int more)
{
    const int64_t now = hd_now(), since = v->counted ? v->counted : v->wait.start;
    hd_late_waited(v->c, v->j, r, now - since, more);
    v->counted = now;
}

/* Every 50 ms: checks for signals, ranks that have gone, and groups used in different orders.
 * HD_OK: keep waiting. */
static int look_around(visit *v, int r)
{
    hd_comm *c = v->c;
    hd_job *j = v->j;
    const char *where = "";
    uint32_t other;
    enum hd_gone how;
    int code;

    if (j->inline_)
        count(v, r, 1);
    hd_session_note(c->session, j);
    hd_hang_expect(c->session, (double)v->wait.limit * 1e-9 - hd_waiter_elapsed(&v->wait));
    if (hd_job_interrupted(j) && (code = interrupt(v, HD_INTERRUPTED)))
        return code;
    if (hd_job_ends(j) && (code = interrupt(v, HD_GAVE_UP)))
        return code;
    if (hd_session_broken(c->session))
        return lose_any(v);
    how = hd_session_gone(c->session, c->node_slot[r]);
    /* Gone, and truly not here: the order of these two reads matters. */
    if (how && hd_page_look(c, r, v->n) == HD_NOT_YET)
        return lose(v, r, how);
    if (hd_page_closed(c, r) && hd_page_look(c, r, v->n) == HD_NOT_YET)
        return lose_member(v, r);
    if (!j->inline_ || j->code != HD_OK)
        return HD_OK;
    hd_session_blocked(c->session, c, v->n,
                       (double)v->wait.limit * 1e-9 - hd_waiter_elapsed(&v->wait));
    other = hd_session_crossed(c->session, c, c->node_slot[r], &where);
    if (other && other == v->seen &&
        (code = cross(v, r, other, where))) /* seen twice: 50 ms apart */
        return code;
    v->seen = other;
    return HD_OK;
}

/* One step of waiting for rank r. HD_OK: look again. */
static int wait_step(visit *v, int r)
{
    const int ev = hd_waiter_step(&v->wait);
    int code;
    if (!ev)
        return HD_OK;
    hd_session_progress(v->c->session);
    if ((ev & HD_WAIT_HOOK) && (code = look_around(v, r)))
        return code;
    return ev & HD_WAIT_EXPIRED ? time_out(v) : HD_OK;
}

/* The fields of this check may be published once all ranks have left the check before the last. */
static int wait_to_publish(visit *v)
{
    int r, code;
    while ((r = hd_page_behind(v->c, v->n)) >= 0) {
        const int late = hd_page_look(v->c, v->c->rank, v->n) == HD_ABANDONED;
        if (late || hd_page_look(v->c, r, v->n) == HD_ABANDONED) {
            hd_page_pass(v->c, v->n);
            return fail_abandoned(v, late);
        }
        if ((code = wait_step(v, r)))
            return code;
    }
    return HD_OK;
}

static int wait_for(visit *v, int r)
{
    enum hd_sight sight;
    int code, waited = 0;
    hd_page_cores(v->c, &v->wait, r);
    for (; (sight = hd_page_look(v->c, r, v->n)) == HD_NOT_YET; waited = 1)
        if ((code = wait_step(v, r)))
            return code;
    if (waited && v->wait.start)
        count(v, r, 0);
    return sight == HD_JOINED ? HD_OK : fail_abandoned(v, 0);
}

/* ---- comparing ---- */

static int disagree(visit *v)
{
    hd_comm *c = v->c;
    hd_job *j = v->j;
    hd_words *w = hd_words_of(c);
    const int par = v->n & 1;
    hd_description *said = calloc((size_t)c->size, sizeof *said);
    hd_waiter wait;
    int rc;

    if (!said) {
        hd_fail(j, HD_ERR_MISMATCH, "the ranks disagree about collective #%u of group '%s'", j->seq,
                c->name);
        return j->code;
    }
    hd_describe_call(&w[c->rank].said[par], j);
    __atomic_store_n(&w[c->rank].seq[par], v->n, __ATOMIC_RELEASE);
    hd_waiter_init(&wait, 0, 0.9); /* all ranks are inside this call, and each describes itself */
    for (int r = 0; r < c->size; r++) {
        while (__atomic_load_n(&w[r].seq[par], __ATOMIC_ACQUIRE) != v->n)
            if (hd_waiter_step(&wait) & HD_WAIT_EXPIRED)
                break;
        if (__atomic_load_n(&w[r].seq[par], __ATOMIC_ACQUIRE) == v->n) {
            said[r] = w[r].said[par];
            said[r].text[HD_DESC - 1] = 0;
        }
    }
    rc = hd_fail_mismatch(c, j, said);
    free(said);
    return rc;
}

/* ---- what travels ---- */

static int in_slot(const hd_job *j) { return j->checked.carry && j->checked.carry->small; }

static char *contribution(const hd_comm *c, const hd_job *j, int rank, int par)
{
    return in_slot(j) ? c->page->slots[rank].d[par].small : hd_payloads(c)[rank].bytes[par];
}

static uint32_t flags_of(const hd_job *j)
{
    return (j->uneven ? HD_UNEVEN : 0) | (j->polls ? HD_POLLS : 0) |
           (j->checked.carry ? HD_CARRIES : 0) | (j->direct ? HD_DIRECT : 0);
}

static void publish(const hd_comm *c, const hd_job *j, int par, uint64_t hash, int64_t agreed)
{
    hd_fields *d = &c->page->slots[c->rank].d[par];
    d->hash = hash;
    d->flags = flags_of(j);
    if (!in_slot(j))
        d->count = agreed;
    if (j->checked.carry)
        j->checked.carry->give(c, j, contribution(c, j, c->rank, par));
    if (j->pairwise)
        hd_page_pairs_put(c, j, par);
}

static void take(const hd_comm *c, hd_job *j, int par)
{
    const hd_given from = {.at = contribution(c, j, 0, par),
                           .apart = in_slot(j) ? sizeof(hd_slot) : sizeof(hd_payload),
                           .n = c->size,
                           .parity = par};
    j->checked.carry->take(c, j, &from);
    j->checked.carried = 1;
}

static int refuse(hd_comm *c, hd_job *j, uint32_t n)
{
    hd_page_leave_note(c, n, HD_REFUSED, j->refusal.code ? j->refusal.code : HD_ERR_MISMATCH, 0,
                       j->refusal.why);
    hd_page_pass(c, n);
    return HD_OK;
}

static int check_page(hd_comm *c, hd_job *j, uint64_t hash)
{
    const uint32_t n = ++c->check_seq;
    const int par = n & 1;
    const int64_t agreed = hd_agreed(j);
    uint32_t any = flags_of(j), all = any;
    int differ = 0, code;
    visit v = {.c = c, .j = j, .n = n};

    if (j->refusal.why)
        return refuse(c, j, n);
    hd_job_waiter(&v.wait, hd_session_spin(c->session, !j->inline_), j);
    if (c->decided != n - 1 && (code = wait_to_publish(&v)))
        return code;
    publish(c, j, par, hash, agreed);
    if (!hd_page_join(c, n))
        return fail_abandoned(&v, 1);
    v.joined = 1;
    for (int i = 1; i < c->size; i++) {
        const int r = c->rank + i < c->size ? c->rank + i : c->rank + i - c->size;
        const hd_fields *d = &c->page->slots[r].d[par];
        if ((code = wait_for(&v, r)))
            return code;
        differ |= d->hash != hash;
        any |= d->flags;
        all &= d->flags;
        if (!in_slot(j) && d->count != agreed) {
            differ |= !j->pairwise;
            any |= HD_UNEVEN;
        }
    }
    c->decided = n;
    if (differ)
        return disagree(&v);
    j->polls = (any & HD_POLLS) != 0;
    j->direct = (all & HD_DIRECT) != 0;
    j->uneven = (any & HD_UNEVEN) && j->pairwise;
    j->checked.verified = j->uneven && hd_page_pairs_match(c, j, par);
    if ((all & HD_CARRIES) && (!j->uneven || j->checked.verified))
        take(c, j, par);
    return HD_OK;
}

int hd_check(hd_comm *c, hd_job *j, uint64_t hash)
{
    return c->page ? check_page(c, j, hash) : hd_check_mpi(c, j, hash);
}
