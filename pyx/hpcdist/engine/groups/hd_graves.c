/* Groups that this rank has left: see hd_graves.h.
 *
 * MPI gives a freed communicator's number to the next one, and with it the messages that are still
 * on their way. So it may be freed only when all members have left, and no message is left that no
 * rank received. On a node's page each member has shown both, for good, and the others only read.
 * Between nodes the members agree by a nonblocking barrier, after which no member sends any more,
 * and then on the number of messages left, more than once, because a note may take its time. Both
 * end when the last member has left, however late that is; nobody waits for them. */
#include <mpi.h>
#include <pthread.h>
#include <stdlib.h>

#include "hd_exit.h"
#include "hd_graves.h"
#include "hd_lane.h"
#include "hd_late.h"
#include "hd_levels.h"
#include "hd_page_life.h"
#include "hd_poller.h"
#include "hd_post.h"
#include "hd_recorder.h"
#include "hd_roll_desk.h"
#include "hd_split.h"
#include "hd_status.h"
#include "hd_threads.h"
#include "hd_unsent.h"

#define AGREEMENTS 4 /* on the number of messages; then they are taken for lost */

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static hd_comm *graves; /* of all sessions */

/* The next agreement; under hd_mpi_lock. */
static void agree(hd_comm *c)
{
    int rc;
    c->grave.unread =
        __atomic_load_n(&c->unread, __ATOMIC_ACQUIRE) + c->post->unread + c->post->rounds.unread;
    rc = c->grave.step++ ? MPI_Iallreduce(MPI_IN_PLACE, &c->grave.unread, 1, MPI_INT64_T, MPI_SUM,
                                          c->mpi, &c->grave.parting)
                         : MPI_Ibarrier(c->mpi, &c->grave.parting);
    if (rc)
        c->grave.step = -1;
}

/* 1: all have left, and nothing is lost; 0: a message is; -1: not all have left. */
static int settle_post(hd_comm *c)
{
    int done = 0, outcome = -1, tidy;
    hd_unsent_take(c->post);
    hd_post_read(c);
    hd_mpi_lock(c->session);
    tidy = hd_post_tidy(c->post);
    if (c->grave.step >= 0 && !MPI_Test(&c->grave.parting, &done, MPI_STATUS_IGNORE) && done) {
        if (c->grave.step == 1 || (c->grave.unread && c->grave.step <= AGREEMENTS))
            agree(c); /* what is there has been read */
        else if (tidy)
            outcome = !c->grave.unread;
    }
    hd_mpi_unlock(c->session);
    if (outcome < 0)
        hd_poller_sends(c);
    return outcome;
}

static void finish(hd_comm *c, int frees)
{
    hd_post_close(c, frees);
    hd_mpi_lock(c->session);
    hd_levels_free(c);
    hd_split_free(c, frees && !c->post);
    if (frees)
        MPI_Comm_free(&c->mpi);
    hd_mpi_unlock(c->session);
    hd_page_close(c);
    c->session = NULL;
    c->grave.buried = 0;
    if (c->grave.orphan)
        hd_comm_dispose(c);
}

void hd_grave_tell(hd_comm *c)
{
    int down = 0;
    if (hd_in_child() || c->size == 1)
        return;
    MPI_Finalized(&down); /* by the program, before it destroys its groups */
    if (down)
        return;
    if (c->page) {
        hd_page_mark(c, HD_UNDRAINED, HD_DESTROYED);
    } else if (!hd_session_broken(c->session) && hd_lane_drain(c, 0)) { /* nobody uses the post */
        hd_unsent_take(c->post);
        hd_post_close_early(c);
    }
}

void hd_grave_dig(hd_comm *c)
{
    hd_session *s = c->session;
    c->grave.parting = MPI_REQUEST_NULL;
    if (c->post) {
        hd_post_read(c);
        hd_mpi_lock(s);
        hd_post_end(c->post);
        agree(c);
        hd_mpi_unlock(s);
        hd_poller_sends(c);
    }
    pthread_mutex_lock(&mu);
    c->grave.buried = 1;
    c->grave.next = graves;
    graves = c;
    pthread_mutex_unlock(&mu);
}

static int outcome_of(hd_comm *c, int down)
{
    if (down)
        return c->post ? -1 : 0;
    return c->page ? hd_page_left(c) : settle_post(c);
}

/* At the session's end what is not settled is kept by MPI. */
static void visit(hd_session *s, int last)
{
    int down = 0;
    MPI_Finalized(&down); /* by the program: it has freed them all */
    pthread_mutex_lock(&mu);
    for (hd_comm **at = &graves; *at;) {
        hd_comm *c = *at;
        int outcome = c->session != s ? -1 : outcome_of(c, down);
        if (c->session != s || (outcome < 0 && !last && !down)) {
            at = &c->grave.next;
            continue;
        }
        *at = c->grave.next;
        if (outcome < 0 && c->post) { /* MPI may still write to it */
            hd_session_poisoned(s);
            c->session = NULL;
        } else {
            finish(c, outcome > 0);
        }
    }
    pthread_mutex_unlock(&mu);
}

void hd_graves_visit(hd_session *s) { visit(s, 0); }

void hd_graves_close(hd_session *s) { visit(s, 1); }

int hd_grave_inherits(hd_comm *c)
{
    int buried;
    pthread_mutex_lock(&mu);
    buried = c->grave.buried;
    if (buried)
        c->grave.orphan = 1;
    pthread_mutex_unlock(&mu);
    return buried;
}

void hd_comm_dispose(hd_comm *c)
{
    hd_rec_forget(c->rec_group);
    hd_late_free(c);
    hd_desk_free(c->desk);
    free(c->node_slot);
    pthread_mutex_destroy(&c->mu);
    pthread_cond_destroy(&c->lane.work_cv);
    pthread_cond_destroy(&c->lane.done_cv);
    if (!c->vote.half.going) /* else MPI still writes the word of an agreement that gave up */
        free(c);
}
