/* The entry check of a group that spans nodes: the fingerprints meet in a nonblocking all-reduce on a
 * communicator of their own, polled under the deadline.
 *
 * A rank that gives up cannot take its contribution back. It leaves the request behind, and tells the
 * others by a message. Who completes the all-reduce looks for such a message before it goes on to the
 * data, so a late rank finds the check abandoned, on all ranks alike, and the group stays in order. The
 * votes carry the time of entry: where somebody has waited long, it looks for 20 ms, far longer than a
 * message takes. (Should one be missed all the same, the watchdog ends the job with a report.) The same messages tell who is there: a rank that has waited for half its
 * time announces itself, and those inside the same check answer; at the deadline the silent ones are
 * missing. */
#include <stdlib.h>
#include <string.h>

#include "hd_engine.h"

#define TAG_NOTE 1
#define LOG 64 /* abandoned checks remembered */

enum { HERE = 1, GAVE_UP = 2, VOTE = 7 };

typedef struct note {
    int32_t what;
    uint32_t check;
    double after; /* seconds, of GAVE_UP */
} note;

/* A contribution that MPI may still read and write. */
typedef struct vote {
    uint64_t v[VOTE];
    MPI_Request req;
    struct vote *next;
} vote;

/* Notes on their way. */
typedef struct mail {
    note text;
    int n;
    struct mail *next;
    MPI_Request req[];
} mail;

typedef struct hd_post {
    MPI_Comm mpi;
    int64_t unread;       /* notes sent, less those received */
    vote *vote, *left;    /* the one in use; those given up */
    mail *sent;
    uint32_t log[LOG];    /* checks somebody gave up on */
    int by[LOG];
    double after[LOG];
    unsigned nlog;
    unsigned char *here;  /* who announced itself in check `now` */
    uint32_t now;
    int announced;
} hd_post;

int hd_post_open(hd_comm *c)
{
    hd_post *p = calloc(1, sizeof *p);
    if (p) {
        p->here = calloc((size_t)c->size, 1);
        p->vote = calloc(1, sizeof *p->vote);
    }
    if (!p || !p->here || !p->vote)
        return HD_ERR_MEMORY;
    c->post = p;
    if (MPI_Comm_dup(c->mpi, &p->mpi))
        return HD_ERR_BACKEND;
    MPI_Comm_set_errhandler(p->mpi, MPI_ERRORS_RETURN);
    return HD_OK;
}

/* Frees what has arrived meanwhile. */
static void tidy(hd_post *p)
{
    for (vote **v = &p->left; *v;) {
        vote *x = *v;
        int done = 0;
        MPI_Test(&x->req, &done, MPI_STATUS_IGNORE);
        if (done) {
            *v = x->next;
            free(x);
        } else {
            v = &x->next;
        }
    }
    for (mail **m = &p->sent; *m;) {
        mail *x = *m;
        int done = 0;
        MPI_Testall(x->n, x->req, &done, MPI_STATUSES_IGNORE);
        if (done) {
            *m = x->next;
            free(x);
        } else {
            m = &x->next;
        }
    }
}

static void send_note(hd_comm *c, int what, uint32_t check, double after)
{
    hd_post *p = c->post;
    mail *m = malloc(sizeof *m + (size_t)c->size * sizeof(MPI_Request));
    if (!m)
        return; /* the others will time out by themselves */
    m->text = (note){what, check, after};
    m->n = 0;
    hd_mpi_lock(c->session);
    for (int i = 1; i < c->size; i++)
        if (!MPI_Isend(&m->text, (int)sizeof m->text, MPI_BYTE, (c->rank + i) % c->size, TAG_NOTE, p->mpi,
                       &m->req[m->n]))
            m->n++;
    p->unread += m->n;
    m->next = p->sent;
    p->sent = m;
    tidy(p);
    hd_mpi_unlock(c->session);
}

static void read_notes(hd_comm *c)
{
    hd_post *p = c->post;
    MPI_Status st;
    int flag = 1;
    hd_mpi_lock(c->session);
    while (!MPI_Iprobe(MPI_ANY_SOURCE, TAG_NOTE, p->mpi, &flag, &st) && flag) {
        note in;
        if (MPI_Recv(&in, (int)sizeof in, MPI_BYTE, st.MPI_SOURCE, TAG_NOTE, p->mpi, MPI_STATUS_IGNORE))
            break;
        p->unread--;
        if (in.what == GAVE_UP) {
            p->log[p->nlog % LOG] = in.check;
            p->by[p->nlog % LOG] = st.MPI_SOURCE;
            p->after[p->nlog++ % LOG] = in.after;
        } else if (in.check == p->now) {
            p->here[st.MPI_SOURCE] = 1;
        }
    }
    hd_mpi_unlock(c->session);
}

static int given_up(const hd_post *p, uint32_t n)
{
    for (unsigned i = 0; i < LOG && i < p->nlog; i++)
        if (p->log[i] == n)
            return 1;
    return 0;
}

/* Has somebody given up on check n? Fails the job if so. */
static int abandoned(hd_comm *c, hd_job *j, uint32_t n)
{
    const hd_post *p = c->post;
    for (unsigned i = 0; i < LOG && i < p->nlog; i++) {
        char buffer[HD_TEXT];
        hd_text t;
        if (p->log[i] != n)
            continue;
        if (hd_fail_if_gone(c, j))
            return 1;
        hd_note_site(j);
        hd_text_init(&t, buffer, sizeof buffer);
        hd_say(&t, "rank %d gave up after %.3g s in ", p->by[i], p->after[i]);
        hd_say_call(&t, c, j);
        hd_say(&t, " because not all ranks had joined. Nothing was transferred; the group can still be used.");
        hd_fail(j, HD_ERR_TIMEOUT, "%s", buffer);
        return 1;
    }
    return 0;
}

/* The request stays with MPI; a fresh vote serves the next check. */
static void leave_behind(hd_comm *c, uint32_t n, double after)
{
    hd_post *p = c->post;
    vote *fresh = calloc(1, sizeof *fresh);
    if (p->vote->req != MPI_REQUEST_NULL && fresh) {
        p->vote->next = p->left;
        p->left = p->vote;
        p->vote = fresh;
    } else {
        free(fresh);
    }
    send_note(c, GAVE_UP, n, after);
}

static int time_out(hd_comm *c, hd_job *j, uint32_t n, const hd_waiter *w)
{
    char buffer[HD_TEXT];
    const hd_post *p = c->post;
    int missing = 0;
    hd_text t;

    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "timeout after %.3g s in ", hd_waiter_elapsed(w));
    hd_say_call(&t, c, j);
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !p->here[r])
            hd_say(&t, "%s%d", missing++ ? ", " : ": rank ", r);
    hd_say(&t, "%s not joined.", missing > 1 ? " have" : missing ? " has" : ": some rank has");
    for (int r = 0; r < c->size && t.used < 1200; r++)
        if (r != c->rank) {
            hd_say(&t, "\n  rank %d: ", r);
            if (p->here[r])
                hd_say(&t, "waits in the same call");
            else
                hd_session_report(c->session, c->node_slot[r], &t);
        }
    hd_say(&t, "\nNothing was transferred; the group can still be used.");
    hd_fail(j, HD_ERR_TIMEOUT, "%s", buffer);
    leave_behind(c, n, hd_waiter_elapsed(w));
    return j->code;
}

/* Polls req under the job's deadline. n: the check, or 0 where all are known to be inside. */
static int wait_for(hd_comm *c, hd_job *j, MPI_Request *req, uint32_t n)
{
    hd_post *p = c->post;
    hd_waiter w;
    const int spin = hd_session_spin(c->session, !j->inline_);
    hd_waiter_init(&w, spin, j->timeout);
    w.naps = !spin && !j->inline_; /* a lane beside a thread that computes */
    for (;;) {
        int done = 0, ev, rc;
        hd_mpi_lock(c->session);
        rc = MPI_Test(req, &done, MPI_STATUS_IGNORE);
        hd_mpi_unlock(c->session);
        if (hd_mpi_failed(j, rc, "MPI_Test"))
            return j->code;
        if (done)
            return HD_OK;
        ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && n) {
            int late = hd_waiter_elapsed(&w) > 0.5 * j->timeout, called = 0;
            hd_session_note(c->session, j);
            if (j->inline_ && j->code != HD_ERR_INTERRUPT && hd_py.slow && hd_py.slow(j)) {
                j->code = HD_ERR_INTERRUPT;
                leave_behind(c, n, hd_waiter_elapsed(&w));
                return j->code;
            }
            read_notes(c);
            if (abandoned(c, j, n)) {
                leave_behind(c, n, hd_waiter_elapsed(&w));
                return j->code;
            }
            for (int r = 0; r < c->size; r++) {
                const int how = r == c->rank ? 0 : hd_session_gone(c->session, c->node_slot[r]);
                called |= p->here[r];
                if (how && !p->here[r]) {
                    hd_fail_gone(c, j, r, how);
                    leave_behind(c, n, hd_waiter_elapsed(&w));
                    return j->code;
                }
            }
            if (!p->announced && !j->closing && (late || called)) {
                p->announced = 1;
                send_note(c, HERE, n, 0);
            }
        }
        if (ev & HD_WAIT_EXPIRED) {
            /* Once more: the last look may lie a nap back. */
            hd_mpi_lock(c->session);
            rc = MPI_Test(req, &done, MPI_STATUS_IGNORE);
            hd_mpi_unlock(c->session);
            if (!rc && done)
                return HD_OK;
            read_notes(c);
            return n ? time_out(c, j, n, &w) : (hd_fail(j, HD_ERR_MISMATCH, "the ranks of group '%s' disagree about "
                                                        "collective #%u", c->name, j->seq), j->code);
        }
    }
}

int hd_check_mpi(hd_comm *c, hd_job *j, uint64_t hash)
{
    /* A maximum over (x, ~x) tells whether all x are the same. */
    const uint64_t count = (uint64_t)hd_agreed(j);
    const uint32_t n = ++c->check_seq;
    hd_post *p = c->post;
    vote *v = p->vote;
    char *texts, *mine;
    MPI_Request req;
    int rc;

    memset(p->here, 0, (size_t)c->size);
    p->now = n;
    p->announced = 0;
    memcpy(v->v, (uint64_t[VOTE]){hash, ~hash, count, ~count, (uint64_t)j->uneven, (uint64_t)j->polls, ~hd_wall_clock()}, sizeof v->v);
    hd_mpi_lock(c->session);
    rc = MPI_Iallreduce(MPI_IN_PLACE, v->v, VOTE, MPI_UINT64_T, MPI_MAX, p->mpi, &v->req);
    hd_mpi_unlock(c->session);
    if (hd_mpi_failed(j, rc, "MPI_Iallreduce") || wait_for(c, j, &v->req, n))
        return j->code;
    read_notes(c);
    if ((double)(hd_wall_clock() - ~v->v[VOTE - 1]) * 1e-9 > 0.5 * j->timeout)
        for (const int64_t until = hd_now() + 20000000; hd_now() < until && !given_up(p, n);)
            read_notes(c);
    if (abandoned(c, j, n))
        return j->code;
    if (v->v[0] == ~v->v[1] && (j->pairwise || v->v[2] == ~v->v[3])) {
        j->uneven = j->pairwise && (v->v[4] || v->v[2] != ~v->v[3]);
        j->polls = v->v[5] != 0;
        return HD_OK;
    }
    texts = calloc((size_t)c->size + 1, HD_DESC);
    if (!texts) {
        hd_fail(j, HD_ERR_MEMORY, "no memory to describe a mismatch");
        return j->code;
    }
    mine = texts + (size_t)c->size * HD_DESC;
    hd_describe_here(mine, j);
    hd_mpi_lock(c->session);
    rc = MPI_Iallgather(mine, HD_DESC, MPI_CHAR, texts, HD_DESC, MPI_CHAR, p->mpi, &req);
    hd_mpi_unlock(c->session);
    if (!hd_mpi_failed(j, rc, "MPI_Iallgather") && !wait_for(c, j, &req, 0)) {
        hd_fail_mismatch(c, j, texts, HD_DESC);
        free(texts);
    } /* else MPI may still write there */
    return j->code;
}

int64_t hd_post_unread(hd_comm *c)
{
    if (!c->post)
        return 0;
    read_notes(c);
    return c->post->unread;
}

int hd_post_close(hd_comm *c, int together)
{
    hd_post *p = c->post;
    int clean;
    if (!p)
        return 1;
    for (int k = 0; k < 1000 && (p->left || p->sent); k++)
        tidy(p);
    read_notes(c);
    clean = !p->left && !p->sent;
    if (clean) {
        if (together)
            MPI_Comm_free(&p->mpi);
        free(p->vote);
        free(p->here);
        free(p);
        c->post = NULL;
    }
    return clean;
}
