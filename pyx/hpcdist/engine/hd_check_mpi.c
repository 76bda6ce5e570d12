/* The entry check of a group that spans nodes, on a communicator of its own.
 *
 * A check consists of two nonblocking all-reduces, called rounds. The first compares the
 * fingerprints. It ends when all ranks have arrived, and until then a rank may give up: its time is
 * over, a signal handler raised, or a peer has gone. In the second round each rank says whether it
 * has seen the first one end. From here on no rank gives up: each rank is either in this check or
 * has given it up, and says so now or has already done so. The call goes on if all ranks have seen
 * the first round end.
 *
 *   If a rank goes on, all ranks have said yes, so none has given up, and all will go on.
 *   If a rank has given up, it says no, so no rank goes on.
 *
 * Ranks that give up or arrive too late take part in both rounds, so that the rounds stay in order,
 * but do not wait for their end: they leave the requests and their memory to MPI. (For such a
 * request to end, MPI may need the help of every rank, and ranks that have given up do something
 * else.) So no rank waits for the rounds of an abandoned check. A rank that gives up sends a note
 * to all others, and a note whose author has left this check without an outcome ends the check for
 * its reader. Notes only inform and hasten; the rounds decide which checks succeed. In a large
 * group notes travel from rank to rank (hd_post.h). A rank in the second round can rely on them all
 * the same: all ranks have arrived by then, and each that has left has sent or passed on a note.
 *
 * The data of a short call travels with the first round, as a letter: a rank that goes on after the
 * second one has it already.
 *
 * A rank that refuses its own arguments, or cannot make the call, acts like one that gives up at
 * once, and its note contains the reason.
 *
 * A rank that has waited for half its time announces itself, and the ranks in the same check answer
 * (hd_here.h). At the deadline the silent ranks are the missing ones; in a large group the last
 * ones to announce themselves may be silent too.
 *
 * tests/model/check_mpi.pml checks this protocol. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hd_ballot.h"
#include "hd_base.h"
#include "hd_carry.h"
#include "hd_caucus.h"
#include "hd_check_mpi.h"
#include "hd_comm.h"
#include "hd_hang.h"
#include "hd_here.h"
#include "hd_job.h"
#include "hd_late.h"
#include "hd_pairs.h"
#include "hd_post.h"
#include "hd_report.h"
#include "hd_status.h"
#include "hd_threads.h"
#include "hd_watchdog.h"

static int has_arrived(const void *post, int rank)
{
    const hd_post *p = post;
    return hd_here_has(&p->here, p->now, rank) || hd_post_has(p, rank);
}

#define REASON_S 0.5 /* seconds to wait for a note that must be on its way */
#define GONE_S 0.2   /* the same, for one that a rank that has gone may have sent before */
#define NAMED 16     /* missing ranks of a large group that an error names */

/* The rounds are those of all ranks, or of one of each node: see hd_caucus.h. */
static int takes_part(const hd_post *p) { return !p->caucus || hd_caucus_speaks(p->caucus); }
static MPI_Comm rounds_of(const hd_post *p) { return p->caucus ? p->caucus->speakers : p->mpi; }

/* ---- leaving a check without an outcome ---- */

/* Says no in the second round, unless this rank has already voted there, and leaves the requests to
 * MPI. */
static void leave_behind(hd_comm *c)
{
    hd_post *p = c->post;
    hd_ballot *b = p->ballot, *fresh = hd_ballot_new();
    if (p->caucus)
        hd_caucus_give_up(p->caucus, p->now);
    hd_mpi_lock(c->session);
    if (!b->begun && takes_part(p))
        hd_ballot_begin(b, rounds_of(p));
    if (!b->voted && takes_part(p))
        MPI_Iallreduce(MPI_IN_PLACE, &b->seen, 1, MPI_UINT64_T, MPI_MIN, rounds_of(p), &b->req[1]);
    b->voted = 1;
    b->next = p->left;
    p->left = b;
    p->ballot = fresh; /* without memory the next check tries again */
    hd_post_tidy(p);
    hd_mpi_unlock(c->session);
    if (p->caucus && takes_part(p))
        hd_caucus_conclude(p->caucus, p->now, NULL);
}

/* Whether this rank may still give up. Otherwise the speaker of its node has said yes. */
static int may_leave(const hd_post *p)
{
    return !p->caucus || hd_caucus_give_up(p->caucus, p->now);
}

static void give_up(hd_comm *c, hd_job *j, int what, double after)
{
    char here[HD_DESC];
    leave_behind(c);
    hd_describe_here(here, j);
    hd_say_awaited(here, c, has_arrived, c->post);
    hd_post_send(c, what, HD_ERR_TIMEOUT, after, here);
    hd_post_flush(c);
}

/* A rank has gone without coming to this check: ranks of other nodes do not see that. */
static int lose(hd_comm *c, hd_job *j, int rank, enum hd_gone how, double after)
{
    char why[HD_DESC];
    hd_text t;
    hd_fail_gone(c, j, rank, how);
    leave_behind(c);
    hd_text_init(&t, why, sizeof why);
    hd_say(&t, "rank %d ", rank);
    hd_say_gone(&t, c, rank, how);
    hd_post_send(c, HD_POST_LOST, HD_ERR_FAILED, after, why);
    hd_post_flush(c);
    return j->code;
}

static int refuse(hd_comm *c, const hd_job *j)
{
    leave_behind(c);
    hd_post_send(c, HD_POST_REFUSED, j->refusal.code ? j->refusal.code : HD_ERR_MISMATCH, 0,
                 j->refusal.why);
    hd_post_flush(c);
    return HD_OK;
}

static const hd_post_heard *await_reason(hd_comm *c, double seconds)
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
    if (how && h->note.what == HD_POST_INTERRUPTED)
        return hd_fail_gone(c, j, h->note.by, how); /* not a late rank ended the check */
    if (h && (h->note.what == HD_POST_REFUSED || h->note.text[0]))
        return HD_OK;
    return hd_fail_if_gone(c, j, has_arrived, c->post);
}

/* Another rank has abandoned the check: reports which, as far as that is known, and leaves. */
static int follow(hd_comm *c, hd_job *j)
{
    hd_post *p = c->post;
    const hd_post_heard *h = await_reason(c, REASON_S);
    char buffer[HD_TEXT];
    hd_refused refused;
    int code = HD_ERR_TIMEOUT;
    hd_text t;

    leave_behind(c);
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
        hd_say_last(&t, "Nothing was transferred, and the group cannot be used any more.");
    else
        hd_say_unharmed(&t, c);
    hd_fail(j, code, "%s", buffer);
    return j->code;
}

static void say_missing(hd_text *t, const hd_comm *c)
{
    /* In a large group not all may know of a rank that has just come. */
    const int silent = c->post->passes_on, named = silent ? NAMED : c->size;
    int missing = 0;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !has_arrived(c->post, r) && missing++ < named)
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

static int time_out(hd_comm *c, hd_job *j, const hd_waiter *w)
{
    const hd_post *p = c->post;
    const double after = hd_waiter_elapsed(w);
    char buffer[HD_TEXT];
    hd_text t;

    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "timeout after %.3g s in ", after);
    hd_say_call(&t, c, j);
    say_missing(&t, c);
    for (int r = 0; r < c->size && t.used < 1200; r++) {
        const int here = has_arrived(p, r);
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
    hd_say_unharmed(&t, c);
    hd_fail(j, HD_ERR_TIMEOUT, "%s", buffer);
    give_up(c, j, HD_POST_GAVE_UP, after);
    hd_hang_report(c->session, buffer, 0);
    return j->code;
}

/* ---- the rounds ---- */

/* 1: the request has ended; 0: not yet; -1: MPI failed, and the job with it. */
static int ended(hd_comm *c, hd_job *j, MPI_Request *req)
{
    int done = 0, rc;
    hd_mpi_lock(c->session);
    rc = MPI_Test(req, &done, MPI_STATUS_IGNORE);
    hd_mpi_unlock(c->session);
    return hd_mpi_failed(j, rc, "MPI_Test") ? -1 : done;
}

/* Whether a signal handler has raised in this call. */
static int interrupted(hd_job *j) { return j->code != HD_ERR_INTERRUPT && hd_job_interrupted(j); }

static void begin_wait(const hd_comm *c, hd_job *j, hd_waiter *w)
{
    const int spin = hd_session_spin(c->session, !j->inline_);
    hd_job_waiter(w, spin, j);
    w->naps = !spin && !j->inline_; /* a lane beside a thread that computes */
    if (!takes_part(c->post))
        hd_caucus_cores(c->post->caucus, w);
}

/* Every 50 ms in the first round. 1: this rank has left. */
static int look_around(hd_comm *c, hd_job *j, const hd_waiter *w)
{
    hd_post *p = c->post;
    const double after = hd_waiter_elapsed(w);

    hd_session_note(c->session, j);
    hd_hang_expect(c->session, (double)w->limit * 1e-9 - after);
    if (p->caucus)
        hd_session_progress(c->session);
    if (interrupted(j)) {
        j->code = HD_ERR_INTERRUPT;
        if (!may_leave(p))
            return 0; /* after the operation */
        give_up(c, j, HD_POST_INTERRUPTED, after);
        return 1;
    }
    if (hd_session_broken(c->session)) {
        hd_fail_broken(c, j);
        leave_behind(c);
        return 1;
    }
    hd_post_read(c);
    if (hd_post_abandoned(p))
        return follow(c, j) != HD_OK;
    for (int r = 0; r < c->size; r++) {
        const enum hd_gone how =
            r == c->rank ? HD_HERE : hd_session_gone(c->session, c->node_slot[r]);
        if (!how || has_arrived(p, r))
            continue;
        if (!j->closing)
            await_reason(c, GONE_S);
        if (hd_post_abandoned(p))
            return follow(c, j) != HD_OK;
        if (hd_session_broken(c->session)) {
            hd_fail_broken(c, j);
            leave_behind(c);
            return 1;
        }
        if (!has_arrived(p, r) && may_leave(p))
            return lose(c, j, r, how, after) != HD_OK;
    }
    hd_post_tell(c, !j->closing && (hd_here_any(&p->here, p->now) || after > 0.5 * j->timeout));
    return 0;
}

/* ---- who was late ---- */

/* The rank that waited least for a check was the last to arrive. Each rank learns in the next one
 * which that was: the largest of these numbers has the shortest wait, in us, and the rank. */
#define RANK_BITS 24
#define LONGEST ((1ll << (63 - RANK_BITS)) - 1)

static uint64_t lateness(const hd_comm *c)
{
    const int64_t us = c->post->waited / 1000;
    return (uint64_t)(LONGEST - (us < LONGEST ? us : LONGEST)) << RANK_BITS | (uint32_t)c->rank;
}

static void count_late(hd_comm *c, const hd_job *j, uint64_t latest, int64_t waited)
{
    const int64_t least = (LONGEST - (int64_t)(latest >> RANK_BITS)) * 1000;
    const int rank = (int)(latest & ((1 << RANK_BITS) - 1));
    if (waited > least && rank < c->size && rank != c->rank)
        hd_late_waited(c, j, rank, waited - least, 0);
}

/* 1: all ranks have arrived, or, for one that listens, the check has gone on; 0: not yet; -1: MPI
 * failed, and the job with it; -2: it is abandoned on this node. */
static int met(hd_comm *c, hd_job *j)
{
    hd_post *p = c->post;
    hd_ballot *b = p->ballot;
    int rc;
    if (p->caucus && !takes_part(p)) {
        const int heard = hd_caucus_listen(p->caucus, p->now, &b->first);
        return heard < 0 ? -2 : heard;
    }
    if (p->caucus && hd_caucus_given_up(p->caucus, p->now))
        return -2;
    if (!b->begun) {
        if (p->caucus && !hd_caucus_complete(p->caucus, p->now))
            return 0;
        if (p->caucus)
            hd_caucus_gather(p->caucus, &b->first);
        hd_mpi_lock(c->session);
        rc = hd_ballot_begin(b, rounds_of(p));
        hd_mpi_unlock(c->session);
        if (hd_mpi_failed(j, rc, "MPI_Iallreduce"))
            return -1;
    }
    return ended(c, j, &b->req[0]);
}

/* HD_OK when all ranks have arrived; otherwise the check is abandoned. */
static int first_round(hd_comm *c, hd_job *j)
{
    hd_waiter w;
    int end, watched = 0;

    begin_wait(c, j, &w);
    while (!(end = met(c, j))) {
        const int ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && look_around(c, j, &w))
            return j->code;
        if (!(ev & HD_WAIT_EXPIRED))
            continue;
        if ((end = met(c, j))) /* once more: the last look may be a nap old */
            break;
        hd_post_read(c);
        if (hd_post_abandoned(c->post)) {
            end = -2;
            break;
        }
        if (may_leave(c->post))
            return time_out(c, j, &w);
        w.limit = HD_NEVER; /* from here on as in the second round */
        hd_data_begin(c, j);
        watched = 1;
    }
    if (watched)
        hd_data_end(c);
    if (end == -2)
        return follow(c, j);
    if (end > 0 && w.start)
        c->post->waited = hd_now() - w.start;
    return end > 0 ? HD_OK : j->code;
}

/* Waits for an operation that ends as soon as all ranks have heard of it. After a vote,
 * c->post->ballot->seen tells whether all ranks said yes. */
static int second_round(hd_comm *c, hd_job *j, MPI_Request *req)
{
    hd_waiter w;
    int end;
    begin_wait(c, j, &w);
    w.limit = HD_NEVER; /* the watchdog's task, as with data */
    while (!(end = ended(c, j, req))) {
        if (!(hd_waiter_step(&w) & HD_WAIT_HOOK))
            continue;
        hd_session_note(c->session, j);
        if (interrupted(j))
            j->code = HD_ERR_INTERRUPT; /* after the operation */
        if (hd_session_broken(c->session))
            return hd_fail_broken(c, j);
        hd_post_read(c);
        if (hd_post_abandoned(c->post))
            return follow(c, j);
    }
    return end > 0 ? HD_OK : j->code;
}

/* All ranks are here and disagree: each tells the others what it called. */
static int quote_all(hd_comm *c, hd_job *j)
{
    char *texts = calloc((size_t)c->size + 1, HD_DESC), *mine;
    MPI_Request req;
    int rc;
    if (!texts) {
        hd_fail(j, HD_ERR_MEMORY, "no memory to describe a mismatch");
        return j->code;
    }
    mine = texts + (size_t)c->size * HD_DESC;
    hd_describe_here(mine, j);
    hd_mpi_lock(c->session);
    rc = MPI_Iallgather(mine, HD_DESC, MPI_CHAR, texts, HD_DESC, MPI_CHAR, c->post->mpi, &req);
    hd_mpi_unlock(c->session);
    if (!hd_mpi_failed(j, rc, "MPI_Iallgather") && !second_round(c, j, &req)) {
        hd_fail_mismatch(c, j, texts, HD_DESC);
        free(texts);
    } /* otherwise MPI may still write there */
    return j->code;
}

/* HD_OK when all ranks have voted yes. */
static int vote(hd_comm *c, hd_job *j, hd_ballot *b)
{
    hd_post *p = c->post;
    int rc;
    if (p->caucus && !hd_caucus_speak(p->caucus, p->now))
        return follow(c, j);
    b->seen = b->voted = 1;
    hd_mpi_lock(c->session);
    rc = MPI_Iallreduce(MPI_IN_PLACE, &b->seen, 1, MPI_UINT64_T, MPI_MIN, rounds_of(p), &b->req[1]);
    hd_mpi_unlock(c->session);
    if (hd_mpi_failed(j, rc, "MPI_Iallreduce") || second_round(c, j, &b->req[1]))
        return j->code;
    if (!b->seen)
        return follow(c, j);
    if (p->caucus)
        hd_caucus_conclude(p->caucus, p->now, &b->first);
    return HD_OK;
}

/* From the end of the first round on no rank can give up, so a peer that dies or is stopped is left
 * to the watchdog. */
static int conclude(hd_comm *c, hd_job *j, hd_ballot *b)
{
    const uint64_t *v = b->first.vote;
    if (takes_part(c->post)) {
        if (vote(c, j, b))
            return j->code;
    } else {
        b->seen = b->voted = 1; /* it has heard that all have */
    }
    if (v[HASH] == ~v[NOT_HASH] && (j->pairwise || v[COUNT] == ~v[NOT_COUNT])) {
        j->uneven = j->pairwise && (v[UNEVEN] || v[COUNT] != ~v[NOT_COUNT]);
        j->polls = v[POLLS] != 0;
        if (b->first.letter.kind && !j->uneven) {
            hd_letter_read(c, j, &b->first.letter);
            j->checked.carried = 1;
        }
        return HD_OK;
    }
    return quote_all(c, j);
}

int hd_check_mpi(hd_comm *c, hd_job *j, uint64_t hash)
{
    const uint64_t count = j->refusal.why ? 0 : (uint64_t)hd_agreed(j);
    hd_post *p = c->post;
    const int64_t waited = p->waited;
    hd_ballot *b = p->ballot ? p->ballot : (p->ballot = hd_ballot_new());
    int code;

    if (!b) {
        hd_fail(j, HD_ERR_MEMORY, "no memory for the entry check");
        return j->code;
    }
    p->now++;
    p->here.announced = 0;
    hd_post_forget(p, p->now);
    b->seen = 0;
    b->begun = b->voted = 0;
    /* a maximum over (x, ~x) tells whether all x are the same */
    memcpy(b->first.vote,
           (uint64_t[VOTE]){hash, ~hash, count, ~count, (uint64_t)j->uneven, (uint64_t)j->polls,
                            !!j->refusal.why, lateness(c)},
           sizeof b->first.vote);
    p->waited = 0;
    hd_letter_write(c, j, &b->first.letter);
    if (p->caucus)
        hd_caucus_arrive(p->caucus, p->now, &b->first);
    if (j->refusal.why)
        return refuse(c, j);
    if (j->monitored)
        hd_post_tell(c, 1);
    if ((code = first_round(c, j)))
        return code;
    if (b->first.vote[REFUSES])
        return follow(c, j);
    hd_data_begin(c, j);
    code = conclude(c, j, b);
    hd_data_end(c);
    if (code == HD_OK)
        count_late(c, j, b->first.vote[LATE], waited);
    return code;
}
