/* How a rank leaves an entry check between nodes without an outcome: see hd_leave.h. */
#include <time.h>

#include "hd_base.h"
#include "hd_caucus.h"
#include "hd_comm.h"
#include "hd_hang.h"
#include "hd_job.h"
#include "hd_leave.h"
#include "hd_page.h"
#include "hd_post.h"
#include "hd_report.h"
#include "hd_rounds.h"
#include "hd_status.h"
#include "hd_threads.h"

#define REASON_S 0.5 /* seconds to wait for a note that must be on its way */
#define NAMED 16     /* missing ranks of a large group that an error names */

void hd_leave_behind(hd_comm *c)
{
    hd_post *p = c->post;
    if (p->caucus)
        hd_caucus_give_up(p->caucus, p->now);
    hd_mpi_lock(c->session);
    if (hd_post_votes(p))
        hd_rounds_leave(&p->rounds, hd_post_voters(p));
    hd_post_tidy(p);
    hd_mpi_unlock(c->session);
    if (p->caucus && hd_post_votes(p))
        hd_caucus_conclude(p->caucus, p->now, NULL);
}

int hd_leave_allowed(const hd_post *p)
{
    return !p->caucus || hd_caucus_give_up(p->caucus, p->now);
}

/* Says no, and names the rank because of which the group is lost. */
static void leave_for(hd_comm *c, int rank, int code, double after, const char *why)
{
    char text[HD_DESC];
    hd_text t;
    hd_leave_behind(c);
    hd_text_init(&t, text, sizeof text);
    if (rank != c->rank)
        hd_say(&t, "rank %d %s", rank, why);
    else
        hd_say(&t, "it %s", why);
    hd_post_send(c, HD_POST_LOST, code, after, text);
    hd_post_flush(c);
}

static void leave_closed_by(hd_comm *c, int rank, double after)
{
    char why[HD_DESC];
    hd_text t;
    hd_text_init(&t, why, sizeof why);
    if (c->as_world)
        hd_say_gone(&t, c, rank, HD_LEFT);
    else if (rank != c->rank)
        hd_say(&t, "of group '%s' has %s", c->name, hd_page_way(HD_DESTROYED));
    else
        hd_say(&t, "has destroyed group '%s'", c->name);
    leave_for(c, rank, c->as_world ? HD_ERR_FAILED : HD_ERR_MISMATCH, after, why);
}

void hd_leave_early(hd_comm *c, hd_job *j, int what, double after)
{
    char here[HD_DESC];
    if (j->closing) { /* it destroys the group all the same */
        leave_closed_by(c, c->rank, after);
        return;
    }
    hd_leave_behind(c);
    hd_describe_here(here, j);
    hd_say_awaited(here, c, hd_post_arrived, c->post);
    hd_post_send(c, what, HD_ERR_TIMEOUT, after, here);
    hd_post_flush(c);
}

int hd_leave_lost(hd_comm *c, hd_job *j, int rank, enum hd_gone how, double after)
{
    char why[HD_DESC];
    hd_text t;
    hd_fail_gone(c, j, rank, how);
    hd_text_init(&t, why, sizeof why);
    hd_say_gone(&t, c, rank, how);
    leave_for(c, rank, HD_ERR_FAILED, after, why);
    return j->code;
}

int hd_leave_closed(hd_comm *c, hd_job *j, int rank, double after)
{
    if (c->as_world) /* whoever leaves the group of all ranks leaves the job */
        hd_fail_gone(c, j, rank, HD_LEFT);
    else
        hd_fail_closed(c, j, rank, hd_page_way(HD_DESTROYED));
    leave_closed_by(c, rank, after);
    return j->code;
}

int hd_leave_refusing(hd_comm *c, const hd_job *j)
{
    hd_leave_behind(c);
    hd_post_send(c, HD_POST_REFUSED, j->refusal.code ? j->refusal.code : HD_ERR_MISMATCH, 0,
                 j->refusal.why);
    hd_post_flush(c);
    return HD_OK;
}

const hd_post_heard *hd_leave_reason(hd_comm *c, double seconds)
{
    const int64_t until = hd_until(seconds);
    const hd_post_heard *h;
    while (!(h = hd_post_reason(c->post)) && hd_now() < until) {
        const struct timespec nap = {0, 50000};
        nanosleep(&nap, NULL);
        hd_post_read(c);
    }
    return h;
}

/* Where no note says why: a member that has gone may be the reason. A note is believed first. Those
 * who followed it and ended are gone here, too, and nobody waited for them. */
static int fail_if_lost(hd_comm *c, hd_job *j, const hd_post_heard *h)
{
    const enum hd_gone how = h ? hd_session_gone(c->session, c->node_slot[h->note.by]) : HD_HERE;
    if (hd_session_broken(c->session)) /* a rank with a new session has left this one */
        return hd_fail_broken(c, j);
    if (how && h->note.what == HD_POST_INTERRUPTED)
        return hd_fail_gone(c, j, h->note.by, how); /* not a late rank ended the check */
    if (h && (h->note.what == HD_POST_REFUSED || h->note.text[0]))
        return HD_OK;
    return hd_fail_if_gone(c, j, hd_post_arrived, c->post);
}

void hd_leave_together(hd_comm *c, int rank)
{
    hd_post *p = c->post;
    char text[HD_DESC];
    hd_text t;
    hd_text_init(&t, text, sizeof text);
    if (rank >= 0)
        hd_say(&t, "rank %d gave up the call before", rank);
    else
        hd_say(&t, "a rank gave up an earlier call");
    hd_post_part(p, HD_ERR_TIMEOUT, text);
    if (p->caucus && hd_post_votes(p) && hd_caucus_speak(p->caucus, p->now))
        hd_caucus_conclude(p->caucus, p->now, p->rounds.all);
}

int hd_leave_apart(hd_comm *c, hd_job *j)
{
    hd_post *p = c->post;
    char buffer[HD_TEXT];
    hd_text t;

    hd_leave_behind(c);
    hd_post_send(c, HD_POST_APART, p->apart_code, 0, p->apart);
    hd_post_flush(c);
    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "%s, from which other ranks have gone on (HPCDIST_CHECK=fast). So they are apart: ",
           p->apart);
    hd_say_call(&t, c, j);
    hd_say(&t, " fails, as do all calls of this group from now on. ");
    hd_say_outcome(&t, j, ". Make a new group of these ranks, or give the group check=\"on\".");
    hd_fail(j, p->apart_code, "%s", buffer);
    return j->code;
}

/* What has become of a call that has no outcome here. */
static void say_rest(hd_text *t, const hd_comm *c, const hd_job *j)
{
    if (hd_post_may_be_short(c->post))
        hd_say(t, "With HPCDIST_CHECK=fast another rank may have its result; then all later calls "
                  "of this group fail. ");
    hd_say_unharmed(t, c, j);
}

/* A rank has given up the check before, from which this one has gone on. */
static void part_after(hd_post *p, const hd_post_note *was)
{
    char text[HD_DESC];
    hd_text t;
    hd_text_init(&t, text, sizeof text);
    hd_say(&t, "rank %d gave up after %.3g s %s %s", was->by, was->after,
           was->what == HD_POST_LOST ? "because" : "in", was->text);
    hd_post_part(p, was->code, text);
}

int hd_leave_following(hd_comm *c, hd_job *j)
{
    hd_post *p = c->post;
    const hd_post_heard *h = hd_leave_reason(c, p->apart[0] ? 0 : REASON_S);
    char buffer[HD_TEXT];
    hd_refused refused;
    int code = HD_ERR_TIMEOUT;
    hd_text t;

    if (h && h->note.check < p->now && h->note.what != HD_POST_APART)
        part_after(p, &h->note);
    if (p->apart[0])
        return hd_leave_apart(c, j);
    hd_leave_behind(c);
    hd_post_pass_on(c, h);
    if (fail_if_lost(c, j, h))
        return j->code;
    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    if (h && h->note.what == HD_POST_REFUSED) {
        code = h->note.code;
        hd_post_refused(p, h, &refused);
        hd_say_refused(&t, j, code, &refused);
        hd_say(&t, "; this rank called ");
        hd_say_call(&t, c, j);
        hd_say(&t, ". ");
    } else if (h && h->note.what == HD_POST_LOST) {
        code = h->note.code;
        hd_say(&t, "rank %d gave up after %.3g s because %s; this rank is in ", h->note.by,
               h->note.after, h->note.text);
        hd_say_call(&t, c, j);
        hd_say(&t, ". ");
    } else if (h && h->note.text[0]) {
        const int raised = h->note.what == HD_POST_INTERRUPTED;
        hd_say(&t, "rank %d gave up after %.3g s in %s%s; this rank is in ", h->note.by,
               h->note.after, h->note.text, raised ? ": a signal handler raised there" : "");
        hd_say_call(&t, c, j);
        hd_say(&t, raised ? ". " : ": not all ranks had joined in time. ");
    } else {
        hd_say(&t, "another rank gave up waiting in ");
        hd_say_call(&t, c, j);
        hd_say(&t, ": not all ranks had joined in time. ");
    }
    if (h && h->note.what == HD_POST_LOST) /* perhaps on another node, which is not seen here */
        hd_say_outcome(&t, j, ", and the group cannot be used any more.");
    else
        say_rest(&t, c, j);
    hd_fail(j, code, "%s", buffer);
    return j->code;
}

static void say_missing(hd_text *t, const hd_comm *c)
{
    /* In a large group not all may know of a rank that has just come. */
    const int silent = c->post->passes_on, named = silent ? NAMED : c->size;
    int missing = 0;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !hd_post_arrived(c->post, r) && missing++ < named)
            hd_say(t, "%s%d", missing > 1 ? ", " : silent ? ": no word from rank " : ": rank ", r);
    if (!missing)
        hd_say(t, ": some rank has not joined.");
    else if (!silent)
        hd_say(t, missing > 1 ? " have not joined." : " has not joined.");
    else if (missing > named)
        hd_say(t, " and %d more.", missing - named);
    else
        hd_say(t, ".");
}

int hd_leave_late(hd_comm *c, hd_job *j, const hd_waiter *w)
{
    const hd_post *p = c->post;
    const double after = hd_waiter_elapsed(w);
    char buffer[HD_TEXT];
    hd_text t;

    /* First: its node sees already that it has given up, and waits for the note. To describe the
     * others takes longer than that on a busy machine. */
    hd_leave_early(c, j, HD_POST_GAVE_UP, after);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "timeout after %.3g s in ", after);
    hd_say_call(&t, c, j);
    say_missing(&t, c);
    for (int r = 0; r < c->size && t.used < 1200; r++) {
        const int here = hd_post_arrived(p, r);
        if (r == c->rank || (here && p->passes_on))
            continue;
        hd_say(&t, "\n  rank %d: ", r);
        if (here) {
            hd_say(&t, "waits in the same call");
            continue;
        }
        hd_session_report(c->session, c->node_slot[r], &t);
        hd_hang_say_where(c->session, c->node_slot[r], &t);
    }
    hd_say(&t, "\n");
    say_rest(&t, c, j);
    hd_fail(j, HD_ERR_TIMEOUT, "%s", buffer);
    hd_hang_report(c->session, buffer, 0);
    return j->code;
}
