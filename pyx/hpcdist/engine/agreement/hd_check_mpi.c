/* The entry check of a group that spans nodes, on a communicator of its own.
 *
 * A check consists of two all-reduces, called rounds (hd_rounds.h). The first compares the
 * fingerprints. It ends when all ranks have arrived, and until then a rank may give up: its time is
 * over, a signal handler raised, or a peer has gone. In the second round each rank says whether it
 * has seen the first one end. From here on no rank gives up: each rank is either in this check or
 * has given it up, and says so now or has already done so. The call goes on if all ranks have seen
 * the first round end.
 *
 *   If a rank goes on, all ranks have said yes, so none has given up, and all will go on.
 *   If a rank has given up, it says no, so no rank goes on.
 *
 * Ranks that give up or arrive too late take part in both rounds, but do not wait for their end:
 * they send void ballots in the place of all that are due. In the first round those of a rank that
 * has joined before reach some ranks and not others: some leave, and some vote. A rank that gives
 * up sends a note to all others, and a note whose author has left this check without an outcome
 * ends the check for its reader. Notes only inform and hasten; the rounds decide which checks
 * succeed. In a large group notes travel from rank to rank (hd_post.h). A rank in the second round
 * can rely on them all the same: all ranks have arrived by then, and each that has left has sent or
 * passed on a note.
 *
 * The data of a short call travels with the first round, as a letter: a rank that goes on after the
 * second one has it already.
 *
 * At level fast such a call ends with the first round. So a rank may give up a check from which
 * others go on; in that call nobody can be let down by it, since its data has moved. Each ballot
 * says from which of the checks before its rank has gone on. Where some have and some have not, no
 * rank goes on, now or later: the program may be at different places on the ranks, and their next
 * calls would be paired wrongly. Whatever has no letter, and a barrier, has two rounds: in those a
 * rank that goes on needs all others.
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
#include "hd_leave.h"
#include "hd_pairs.h"
#include "hd_post.h"
#include "hd_report.h"
#include "hd_rounds.h"
#include "hd_status.h"
#include "hd_threads.h"
#include "hd_watchdog.h"

#define GONE_S 0.2 /* seconds to wait for a note that a rank that has gone may have sent before */
#define AWAY_NS 10000000 /* between two checks, after which a rank looks for notes first, */
#define LOOK_NS 100000   /* for no longer than this, */
#define LOOKS 8          /* but so many times at least: it may have been off its core */

/* 1: the request has ended, or, where there is none, the round; 0: not yet; -1: MPI failed, and the
 * job with it. */
static int has_ended(hd_comm *c, hd_job *j, enum hd_round round, MPI_Request *req)
{
    hd_post *p = c->post;
    int done = 0, rc;
    hd_mpi_lock(c->session);
    rc = req                       ? MPI_Test(req, &done, MPI_STATUS_IGNORE)
         : round == HD_FIRST_ROUND ? hd_rounds_first(&p->rounds, hd_post_voters(p), &done)
                                   : hd_rounds_second(&p->rounds, &done);
    hd_mpi_unlock(c->session);
    return hd_mpi_failed(j, rc, req ? "MPI_Test" : "a message of the entry check") ? -1 : done;
}

/* Whether a signal handler has raised in this call. */
static int interrupted(hd_job *j) { return j->code != HD_ERR_INTERRUPT && hd_job_interrupted(j); }

static void begin_wait(const hd_comm *c, hd_job *j, hd_waiter *w)
{
    const int spin = hd_session_spin(c->session, !j->inline_);
    hd_job_waiter(w, spin, j);
    w->naps = !spin && !j->inline_; /* a lane beside a thread that computes */
    if (!hd_post_votes(c->post))
        hd_caucus_cores(c->post->caucus, w);
}

/* 1: another rank has destroyed the group, and this one has left. */
static int leave_if_closed(hd_comm *c, hd_job *j, double after)
{
    const hd_post *p = c->post;
    for (int r = 0; r < c->size; r++)
        if (p->closed[r] && !hd_post_arrived(p, r) && hd_leave_allowed(p))
            return hd_leave_closed(c, j, r, after) != HD_OK;
    return 0;
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
    if (hd_job_ends(j) && !j->closing && hd_leave_allowed(p)) {
        j->code = HD_ERR_INTERRUPT;
        hd_leave_early(c, j, HD_POST_GAVE_UP, after);
        return 1;
    }
    if (interrupted(j)) {
        j->code = HD_ERR_INTERRUPT;
        if (!hd_leave_allowed(p))
            return 0; /* after the operation */
        hd_leave_early(c, j, HD_POST_INTERRUPTED, after);
        return 1;
    }
    if (hd_session_broken(c->session)) {
        hd_fail_broken(c, j);
        hd_leave_behind(c);
        return 1;
    }
    hd_post_read(c);
    if (hd_post_abandoned(p))
        return hd_leave_following(c, j) != HD_OK;
    for (int r = 0; r < c->size; r++) {
        const enum hd_gone how =
            r == c->rank ? HD_HERE : hd_session_gone(c->session, c->node_slot[r]);
        if (!how || hd_post_arrived(p, r))
            continue;
        if (!j->closing)
            hd_leave_reason(c, GONE_S);
        if (hd_post_abandoned(p))
            return hd_leave_following(c, j) != HD_OK;
        if (hd_session_broken(c->session)) {
            hd_fail_broken(c, j);
            hd_leave_behind(c);
            return 1;
        }
        if (!hd_post_arrived(p, r) && hd_leave_allowed(p))
            return hd_leave_lost(c, j, r, how, after) != HD_OK;
    }
    if (leave_if_closed(c, j, after))
        return 1;
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

/* How the first round ends without all: MPI failed, and the job with it; the check is abandoned; or
 * this rank has left. */
enum { FAILED = -1, ABANDONED = -2, LEFT = -3 };

/* 1: all ranks have arrived, or, for one that listens, the check has gone on; 0: not yet. */
static int met(hd_comm *c, hd_job *j)
{
    hd_post *p = c->post;
    hd_rounds *r = &p->rounds;
    if (p->caucus && !hd_post_votes(p)) {
        const int heard = hd_caucus_listen(p->caucus, p->now, &r->all);
        return heard < 0 ? ABANDONED : heard;
    }
    if (p->caucus && hd_caucus_given_up(p->caucus, p->now))
        return ABANDONED;
    if (p->caucus && !r->begun) {
        if (!hd_caucus_complete(p->caucus, p->now))
            return 0;
        if (!hd_caucus_gather(p->caucus, p->now, &r->first)) {
            r->first.vote[WENT] = r->first.vote[STAYED] = 0; /* they may be of the next check */
            return ABANDONED;
        }
    }
    return has_ended(c, j, HD_FIRST_ROUND, NULL);
}

/* Whether another rank of the node has said yes for this one: it waits as in the second round. */
static int is_spoken_for(const hd_post *p)
{
    return !hd_post_votes(p) && hd_caucus_spoken(p->caucus, p->now);
}

/* HD_OK when all ranks have arrived; otherwise the check is abandoned. */
static int first_round(hd_comm *c, hd_job *j)
{
    hd_waiter w;
    int end, watched = 0;

    begin_wait(c, j, &w);
    while (!(end = met(c, j))) {
        const int ev = hd_waiter_step(&w);
        if (!(ev & (HD_WAIT_HOOK | HD_WAIT_EXPIRED)))
            continue;
        if (!watched && is_spoken_for(c->post)) {
            hd_votes_begin(c, j);
            watched = 1;
            w.limit = HD_NEVER;
            continue;
        }
        if ((ev & HD_WAIT_HOOK) && look_around(c, j, &w)) {
            end = LEFT;
            break;
        }
        if (!(ev & HD_WAIT_EXPIRED))
            continue;
        if ((end = met(c, j))) /* once more: the last look may be a nap old */
            break;
        hd_post_read(c);
        if (hd_post_abandoned(c->post))
            end = ABANDONED;
        else if (hd_leave_allowed(c->post))
            return hd_leave_late(c, j, &w);
        if (end)
            break;
    }
    if (watched)
        hd_data_end(c);
    if (end == ABANDONED)
        return hd_leave_following(c, j);
    if (end == FAILED)
        hd_leave_behind(c); /* what can still be sent spares the others a timeout */
    if (end > 0 && w.start)
        c->post->waited = hd_now() - w.start;
    return end > 0 ? HD_OK : j->code;
}

/* Waits for what ends as soon as all ranks have heard of it: the second round, after which
 * c->post->rounds.seen tells whether all ranks said yes, or the request that is given. */
static int second_round(hd_comm *c, hd_job *j, MPI_Request *req)
{
    hd_post *p = c->post;
    hd_waiter w;
    int end;
    begin_wait(c, j, &w);
    w.limit = HD_NEVER; /* the watchdog's task, as with data */
    while (!(end = has_ended(c, j, HD_SECOND_ROUND, req))) {
        if (!(hd_waiter_step(&w) & HD_WAIT_HOOK))
            continue;
        hd_session_note(c->session, j);
        if (interrupted(j))
            j->code = HD_ERR_INTERRUPT; /* after the operation */
        if (hd_session_broken(c->session))
            return hd_fail_broken(c, j);
        hd_post_read(c);
        if (hd_post_abandoned(c->post))
            return hd_leave_following(c, j);
    }
    if (end > 0 && p->caucus && w.start)
        p->waited += hd_now() - w.start; /* as for those who listen, who wait for both rounds */
    return end > 0 ? HD_OK : j->code;
}

/* All ranks are here and disagree: each tells the others what it called. */
static int quote_all(hd_comm *c, hd_job *j)
{
    hd_description *said = calloc((size_t)c->size + 1, sizeof *said), *mine;
    MPI_Request req;
    int rc;
    if (!said) {
        hd_fail(j, HD_ERR_MEMORY, "no memory to describe a mismatch");
        return j->code;
    }
    mine = said + c->size;
    hd_describe_call(mine, j);
    hd_mpi_lock(c->session);
    rc = MPI_Iallgather(mine, sizeof *mine, MPI_CHAR, said, sizeof *said, MPI_CHAR, c->post->mpi,
                        &req);
    hd_mpi_unlock(c->session);
    if (!hd_mpi_failed(j, rc, "MPI_Iallgather") && !second_round(c, j, &req)) {
        hd_fail_mismatch(c, j, said);
        free(said);
    } /* otherwise MPI may still write there */
    return j->code;
}

/* HD_OK when all ranks have voted yes. */
static int vote(hd_comm *c, hd_job *j)
{
    hd_post *p = c->post;
    if (p->caucus && !hd_caucus_speak(p->caucus, p->now))
        return hd_leave_following(c, j);
    if (second_round(c, j, NULL)) {
        if (p->caucus)
            hd_caucus_conclude(p->caucus, p->now, NULL);
        return j->code;
    }
    if (!p->rounds.seen)
        return hd_leave_following(c, j);
    if (p->caucus)
        hd_caucus_conclude(p->caucus, p->now, p->rounds.all);
    return HD_OK;
}

static int all_agree(const hd_job *j, const uint64_t *v)
{
    return v[HASH] == ~v[NOT_HASH] && (j->pairwise || v[COUNT] == ~v[NOT_COUNT]);
}

static int are_uneven(const hd_job *j, const uint64_t *v)
{
    return j->pairwise && (v[UNEVEN] || v[COUNT] != ~v[NOT_COUNT]);
}

/* The first round was the last one: the same on all ranks that have seen it end. */
static int is_short(const hd_comm *c, const hd_job *j)
{
    const hd_first *all = c->post->rounds.all;
    return c->check == HD_CHECK_FAST && all_agree(j, all->vote) && !are_uneven(j, all->vote) &&
           all->letter.kind != HD_NO_LETTER;
}

static int conclude_short(hd_comm *c, hd_job *j)
{
    hd_post *p = c->post;
    if (p->caucus && hd_post_votes(p)) {
        if (!hd_caucus_speak(p->caucus, p->now))
            return hd_leave_following(c, j);
        hd_caucus_conclude(p->caucus, p->now, p->rounds.all);
    }
    j->polls = p->rounds.all->vote[POLLS] != 0;
    j->checked.carried = hd_letter_read(c, j, &p->rounds.all->letter);
    return HD_OK;
}

/* From the end of the first round on no rank can give up, so a peer that dies or is stopped is left
 * to the watchdog. */
static int conclude(hd_comm *c, hd_job *j)
{
    hd_rounds *r = &c->post->rounds;
    const uint64_t *v = r->all->vote;
    if (hd_post_votes(c->post)) {
        if (vote(c, j))
            return j->code;
    } else {
        r->seen = r->voted = 1; /* it has heard that all have */
    }
    if (all_agree(j, v)) {
        j->uneven = are_uneven(j, v);
        j->polls = v[POLLS] != 0;
        j->checked.carried = !j->uneven && hd_letter_read(c, j, &r->all->letter);
        return HD_OK;
    }
    return quote_all(c, j);
}

/* Writes this rank's ballot. */
static void vote_first(hd_comm *c, const hd_job *j, uint64_t hash)
{
    const uint64_t count = j->refusal.why ? 0 : (uint64_t)hd_agreed(j);
    hd_rounds *r = &c->post->rounds;
    /* a maximum over (x, ~x) tells whether all x are the same */
    memcpy(r->first.vote,
           (uint64_t[VOTE]){hash, ~hash, count, ~count, (uint64_t)j->uneven, (uint64_t)j->polls,
                            !!j->refusal.why, lateness(c),
                            r->stayed & 1 ? (uint64_t)c->rank + 1 : 0, r->went, r->stayed},
           sizeof r->first.vote);
    if (j->closing) /* a group comes to its end, whatever was before */
        r->first.vote[WENT] = r->first.vote[STAYED] = 0;
    hd_letter_write(c, j, &r->first.letter, r->needs);
}

/* At level fast a rank that comes late could go on alone from a check that others have given up, in
 * time or while it was away. It looks for a thousandth of that time: MPI may bring a message only
 * after the ones before, one at a look. */
static int is_given_up(hd_comm *c)
{
    hd_post *p = c->post;
    const int64_t now = hd_now(), away = now - p->left;
    const int64_t until = now + (away / 1000 < LOOK_NS ? away / 1000 : LOOK_NS);
    for (int looks = 0; away > AWAY_NS && !hd_post_abandoned(p); looks++) {
        if (looks >= LOOKS && hd_now() >= until)
            break;
        hd_post_read(c);
    }
    return hd_post_abandoned(p) && hd_leave_allowed(p);
}

static int check(hd_comm *c, hd_job *j, uint64_t hash)
{
    hd_post *p = c->post;
    const int64_t waited = p->waited;
    const uint64_t *v;
    int code;

    vote_first(c, j, hash);
    p->waited = 0;
    if (p->caucus)
        hd_caucus_arrive(p->caucus, p->now, &p->rounds.first);
    if (j->refusal.why)
        return hd_leave_refusing(c, j);
    if (j->monitored)
        hd_post_tell(c, 1);
    if ((c->check == HD_CHECK_FAST || p->apart[0]) && !j->closing && is_given_up(c))
        return hd_leave_following(c, j);
    if ((code = first_round(c, j)))
        return code;
    v = p->rounds.all->vote;
    if (c->check == HD_CHECK_FAST && v[WENT] & v[STAYED]) {
        hd_leave_together(c, v[WENT] & v[STAYED] & 1 ? (int)v[WHO] - 1 : -1);
        return hd_leave_apart(c, j);
    }
    if (v[REFUSES])
        return hd_leave_following(c, j);
    if (is_short(c, j)) {
        code = conclude_short(c, j);
    } else {
        hd_votes_begin(c, j);
        code = conclude(c, j);
        hd_data_end(c);
    }
    if (code == HD_OK)
        count_late(c, j, v[LATE], waited);
    return code;
}

int hd_check_mpi(hd_comm *c, hd_job *j, uint64_t hash)
{
    hd_post *p = c->post;
    hd_rounds *r = &p->rounds;
    const int fast = c->check == HD_CHECK_FAST;
    int code;

    p->now++;
    p->here.announced = 0;
    /* A rank that has gone on from the check before may yet hear that another one gave that up. */
    hd_post_forget(p, p->now - (fast && r->went & 1));
    hd_rounds_enter(r, p->now);
    r->is_fast = fast;
    code = check(c, j, hash);
    r->went = r->went << 1 | !(code || j->refusal.why);
    r->stayed = r->stayed << 1 | !(r->went & 1);
    if (fast)
        p->left = hd_now();
    return code;
}
