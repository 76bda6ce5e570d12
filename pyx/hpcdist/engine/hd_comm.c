/* Communicators: made from MPI's world, from a user's communicator, or from some members of a group. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "hd_engine.h"

#define ROLL_TAG(t) ((1 + (t) % 1000) * 32 + 31) /* above the tag of data exchanges, in the engine's own residue */
#define CHUNK (8ll << 20)                        /* bytes; measured best between 4 and 16 MiB on both MPIs */
#define NODE_LIMIT (16ll << 20)                  /* bytes; HPCDIST_NODE_MEMORY's default */

/* ---- shared page ---- */

int hd_page_open(hd_comm *c)
{
    void *at = NULL;
    c->page_bytes = hd_page_size(c->size);
    if (hd_session_share(c->mpi, c->page_bytes, &at))
        return HD_ERR_BACKEND;
    c->page = at;
    return HD_OK;
}

void hd_page_close(hd_comm *c)
{
    if (c->page)
        munmap(c->page, c->page_bytes);
    c->page = NULL;
}

/* ---- open ---- */

static void init_locks(hd_comm *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->mu, NULL);
    pthread_cond_init(&c->work_cv, NULL);
    pthread_cond_init(&c->done_cv, &attr);
    pthread_condattr_destroy(&attr);
}

/* Who shares this node, and do all use the same settings? Collective over the new communicator. */
static int meet(hd_comm *c, char *text, size_t room)
{
    struct {
        uint64_t node, slot, uid, check;
    } mine, *all = malloc((size_t)c->size * sizeof *all);
    int slot, rc, wrong = -1;
    const char *transport = getenv("HPCDIST_CHECK_TRANSPORT");

    c->node_slot = malloc((size_t)c->size * sizeof *c->node_slot);
    if (!all || !c->node_slot) {
        free(all);
        snprintf(text, room, "no memory for a group of %d ranks", c->size);
        return HD_ERR_MEMORY;
    }
    mine.node = hd_session_node(c->session, &slot);
    mine.slot = (uint64_t)(int64_t)slot;
    mine.uid = hd_random64();
    mine.check = (uint64_t)c->check;
    rc = MPI_Allgather(&mine, 4, MPI_UINT64_T, all, 4, MPI_UINT64_T, c->mpi);
    if (rc) {
        free(all);
        snprintf(text, room, "MPI_Allgather failed while group '%s' was made (error %d)", c->name, rc);
        return HD_ERR_BACKEND;
    }
    c->uid = all[0].uid;
    c->one_node = 1;
    for (int r = 0; r < c->size; r++) {
        c->one_node &= all[r].node == all[0].node;
        c->node_slot[r] = all[r].node == mine.node ? (int)(int64_t)all[r].slot : -1;
        if (all[r].check != all[0].check && wrong < 0)
            wrong = r;
    }
    if (wrong >= 0) {
        snprintf(text, room, "group '%s': rank 0 has entry check level %d, rank %d has %d; set HPCDIST_CHECK alike on "
                 "all ranks", c->name, (int)all[0].check, wrong, (int)all[wrong].check);
        free(all);
        return HD_ERR_MISMATCH;
    }
    free(all);
    if (c->size == 1)
        return HD_OK;
    if (c->one_node && !(transport && strcmp(transport, "mpi") == 0) && hd_page_open(c))
        return HD_ERR_BACKEND;
    return c->page ? HD_OK : hd_post_open(c);
}

int hd_comm_open(MPI_Comm from, hd_session *s, int dup, const char *name, double timeout, int check, hd_comm **out,
                 char *text, size_t room)
{
    hd_comm *c = calloc(1, sizeof *c);
    int rc = MPI_SUCCESS, found = 0, code;
    void *ub = NULL;

    *out = NULL;
    if (!c) {
        snprintf(text, room, "no memory for a group");
        return HD_ERR_MEMORY;
    }
    init_locks(c);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->timeout = timeout;
    c->check = check;
    c->chunk = CHUNK;
    c->node_limit = NODE_LIMIT;
    c->mpi = from;
    if (dup)
        rc = MPI_Comm_dup(from, &c->mpi);
    if (rc) {
        snprintf(text, room, "MPI_Comm_dup failed for group '%s' (error %d)", name, rc);
        free(c);
        return HD_ERR_BACKEND;
    }
    MPI_Comm_set_errhandler(c->mpi, MPI_ERRORS_RETURN);
    MPI_Comm_rank(c->mpi, &c->rank);
    MPI_Comm_size(c->mpi, &c->size);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &ub, &found);
    c->tag_limit = (found ? *(int *)ub : 32767) / 32 - 1;
    c->session = s;
    hd_session_ref(s);
    hd_session_adopt(s, c);
    if ((code = meet(c, text, room)) != HD_OK) {
        hd_comm_free(c, 1, 1);
        hd_comm_release(c);
        return code;
    }
    *out = c;
    return HD_OK;
}

/* ---- groups of some members ---- */

/* MPI_Comm_create_group blocks for ever when a member never comes. So the members first meet by polled
 * messages under a deadline: hello -> go -> ack -> verdict, through the first of them. A random number
 * in each round keeps a greeting left over from an attempt that timed out from being taken for a new one. */
typedef struct roll {
    uint64_t list, nonce;
    uint64_t until;   /* CLOCK_REALTIME ns: a greeting older than that is left over */
    int64_t verdict;  /* enum hd_code */
    char text[224];
} roll;

static int roll_wait(hd_comm *p, MPI_Request *req, const hd_waiter *limit)
{
    hd_waiter w = *limit;
    for (;;) {
        int done = 0, ev;
        hd_mpi_lock(p->session);
        if (MPI_Test(req, &done, MPI_STATUS_IGNORE))
            done = -1;
        hd_mpi_unlock(p->session);
        if (done)
            return done > 0 ? HD_OK : HD_ERR_BACKEND;
        ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(NULL))
            return HD_ERR_INTERRUPT;
        if (ev & HD_WAIT_EXPIRED)
            return HD_ERR_TIMEOUT;
    }
}

static void drop(MPI_Request *req)
{
    MPI_Status st;
    int done = 0;
    if (*req == MPI_REQUEST_NULL)
        return;
    MPI_Cancel(req);
    for (int k = 0; k < 1000 && !done; k++)
        MPI_Test(req, &done, &st);
}

static void seconds_left(hd_waiter *w, int64_t until)
{
    double left = (double)(until - hd_now()) * 1e-9;
    hd_waiter_init(w, 0, left > 0 ? left : 0);
}

static int roll_leader(hd_comm *p, const int *ranks, int n, int tag, roll *mine, int64_t until)
{
    roll *in = calloc((size_t)n, sizeof *in), *go = calloc((size_t)n, sizeof *go);
    MPI_Request *req = malloc((size_t)n * sizeof *req), s;
    int code = in && go && req ? HD_OK : HD_ERR_MEMORY;
    hd_text t;

    hd_text_init(&t, mine->text, sizeof mine->text);
    for (int phase = 0; phase < 2 && code == HD_OK; phase++) { /* hello, then ack */
        for (int i = 1; i < n; i++)
            MPI_Irecv(&in[i], (int)sizeof *in, MPI_BYTE, ranks[i], tag + 32 * phase, p->mpi, &req[i]);
        for (int i = 1; i < n; i++) {
            hd_waiter w;
            int rc;
            do {
                seconds_left(&w, until);
                rc = code == HD_ERR_INTERRUPT ? code : roll_wait(p, &req[i], &w);
                if (rc == HD_OK && (phase ? in[i].nonce != go[i].nonce : in[i].until < hd_wall_clock()))
                    MPI_Irecv(&in[i], (int)sizeof *in, MPI_BYTE, ranks[i], tag + 32 * phase, p->mpi, &req[i]);
                else
                    break;
            } while (1);
            if (rc) {
                drop(&req[i]);
                if (code == HD_OK && rc == HD_ERR_TIMEOUT)
                    hd_say(&t, "no word from rank %d", ranks[i]);
                else if (rc == HD_ERR_TIMEOUT)
                    hd_say(&t, ", %d", ranks[i]);
                code = rc;
            } else if (phase == 0) {
                if (in[i].list != mine->list && code == HD_OK) {
                    code = HD_ERR_MISMATCH;
                    hd_say(&t, "rank %d names other members, or another order, than rank %d", ranks[i], ranks[0]);
                }
                go[i] = in[i];
                go[i].verdict = HD_OK;
                MPI_Isend(&go[i], (int)sizeof *go, MPI_BYTE, ranks[i], tag + 64, p->mpi, &s);
                MPI_Request_free(&s);
            }
        }
    }
    /* The verdict: small, so sent eagerly; the buffer stays until MPI has taken it. */
    mine->verdict = code == HD_ERR_INTERRUPT ? HD_ERR_TIMEOUT : code;
    if (code == HD_ERR_INTERRUPT)
        hd_say(&t, "rank %d was interrupted", ranks[0]);
    for (int i = 1; i < n && go; i++)
        if (in[i].nonce) {
            go[i] = *mine;
            go[i].nonce = in[i].nonce;
            MPI_Send(&go[i], (int)sizeof *go, MPI_BYTE, ranks[i], tag + 96, p->mpi);
        }
    free(in);
    free(req);
    free(go); /* MPI_Send above is ordered behind the freed Isend on the same pair: that one is gone too */
    return code;
}

static int roll_member(hd_comm *p, const int *ranks, int tag, roll *mine, int64_t until)
{
    roll in;
    MPI_Request req, s[2];
    int code = HD_OK;

    mine->nonce = hd_random64() | 1;
    mine->until = hd_wall_clock() + (uint64_t)(until - hd_now());
    MPI_Isend(mine, (int)sizeof *mine, MPI_BYTE, ranks[0], tag, p->mpi, &s[0]);
    for (int phase = 0; phase < 2 && code == HD_OK; phase++) { /* go, then verdict */
        do {
            hd_waiter w;
            MPI_Irecv(&in, (int)sizeof in, MPI_BYTE, ranks[0], tag + (phase ? 96 : 64), p->mpi, &req);
            seconds_left(&w, until + (phase ? 500000000 : 300000000)); /* the leader's word, if it is late by a little */
            code = roll_wait(p, &req, &w);
            if (code)
                drop(&req);
        } while (code == HD_OK && in.nonce != mine->nonce);
        if (code == HD_OK && phase == 0) {
            MPI_Isend(mine, (int)sizeof *mine, MPI_BYTE, ranks[0], tag + 32, p->mpi, &s[1]);
            MPI_Wait(&s[1], MPI_STATUS_IGNORE); /* 256 bytes: eager */
        }
    }
    if (code == HD_OK) {
        MPI_Wait(&s[0], MPI_STATUS_IGNORE);
        memcpy(mine->text, in.text, sizeof mine->text);
        return (int)in.verdict;
    }
    MPI_Request_free(&s[0]);
    snprintf(mine->text, sizeof mine->text, "no word from rank %d, the group's first member", ranks[0]);
    return code;
}

int hd_comm_create_group(hd_comm *p, const int *ranks, int n, int tag, const char *name, double timeout, hd_comm **out,
                         char *text, size_t room)
{
    /* Kept for ever when a send could not be taken back: MPI may still read it. */
    roll *mine = calloc(1, sizeof *mine);
    const int64_t until = hd_now() + (int64_t)(timeout * 1e9);
    MPI_Group all, some;
    MPI_Comm made = MPI_COMM_NULL;
    int code = HD_OK, rc;

    *out = NULL;
    if (!mine)
        return HD_ERR_MEMORY;
    mine->list = hd_hash_text(name);
    for (int i = 0; i < n; i++)
        mine->list = hd_mix(mine->list, (uint64_t)(uint32_t)ranks[i]);
    if (n > 1)
        code = p->rank == ranks[0] ? roll_leader(p, ranks, n, ROLL_TAG(tag * 4), mine, until)
                                   : roll_member(p, ranks, ROLL_TAG(tag * 4), mine, until);
    if (code) {
        char within[48] = "";
        __atomic_add_fetch(&p->unread, 1, __ATOMIC_RELAXED); /* greetings may be left that nobody receives */
        if (code == HD_ERR_TIMEOUT)
            snprintf(within, sizeof within, " within %.3g s", timeout);
        snprintf(text, room, "group '%s' of %d ranks was not made%s (this is rank %d of '%s'): %s. All its members "
                 "must call new_group with the same ranks.", name, n, within, p->rank, p->name, mine->text);
        return code;
    }
    free(mine);
    MPI_Comm_group(p->mpi, &all);
    MPI_Group_incl(all, n, ranks, &some);
    rc = MPI_Comm_create_group(p->mpi, some, tag % 1000, &made);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    if (rc || made == MPI_COMM_NULL) {
        snprintf(text, room, "MPI_Comm_create_group failed for group '%s' (error %d)", name, rc);
        return HD_ERR_BACKEND;
    }
    code = hd_comm_open(made, p->session, 0, name, timeout, p->check, out, text, room);
    if (code == HD_OK)
        (*out)->node_limit = p->node_limit;
    return code;
}

/* ---- free ---- */

void hd_comm_release(hd_comm *c)
{
    if (!c->freed || c->session)
        return; /* never freed, or not cleanly: threads may still look at it */
    free(c->node_slot);
    pthread_mutex_destroy(&c->mu);
    pthread_cond_destroy(&c->work_cv);
    pthread_cond_destroy(&c->done_cv);
    free(c);
}

int64_t hd_comm_unread(hd_comm *c)
{
    return __atomic_load_n(&c->unread, __ATOMIC_ACQUIRE) + hd_post_unread(c);
}

void hd_comm_close(hd_comm *c, int how)
{
    pthread_mutex_lock(&c->mu); /* between two submissions to the lane */
    __atomic_store_n(&c->closing, how, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&c->mu);
}

int hd_comm_drain(hd_comm *c, double seconds)
{
    int down = 0;
    MPI_Finalized(&down);
    if (down || hd_in_child() || !hd_lane_drain(c, seconds))
        return 0;
    if (hd_p2p_drain(c, seconds))
        return 1;
    hd_comm_close(c, 2);
    return hd_p2p_close(c);
}

int hd_comm_free(hd_comm *c, int drained, int together)
{
    if (c->freed)
        return HD_OK;
    c->freed = 1;
    hd_comm_close(c, 2); /* nobody comes in any more, and who has come leaves */
    if (!drained || !hd_p2p_drain(c, 1.0)) {
        hd_session_poisoned(c->session);
        return HD_ERR_TIMEOUT; /* threads may still use everything: nothing is freed */
    }
    if (!hd_post_close(c, together))
        hd_session_poisoned(c->session);
    hd_lane_close(c);
    hd_session_forget(c->session, c);
    if (together)
        MPI_Comm_free(&c->mpi);
    hd_page_close(c);
    hd_node_close(c);
    free(c->staging);
    c->staging = NULL;
    hd_session_unref(c->session);
    c->session = NULL;
    return HD_OK;
}
