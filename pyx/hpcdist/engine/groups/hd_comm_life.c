/* Communicators: made from MPI's world, from a user's communicator, or from some members of a
 * group. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "hd_base.h"
#include "hd_block.h"
#include "hd_caucus_life.h"
#include "hd_comm.h"
#include "hd_comm_life.h"
#include "hd_exit.h"
#include "hd_ft.h"
#include "hd_graves.h"
#include "hd_lane.h"
#include "hd_levels.h"
#include "hd_making.h"
#include "hd_node.h"
#include "hd_ordered.h"
#include "hd_page_life.h"
#include "hd_poller.h"
#include "hd_post.h"
#include "hd_recorder.h"
#include "hd_roll.h"
#include "hd_roll_desk.h"
#include "hd_roll_words.h"
#include "hd_session.h"
#include "hd_session_life.h"
#include "hd_settings.h"
#include "hd_spares.h"
#include "hd_split.h"
#include "hd_status.h"
#include "hd_stopped.h"
#include "hd_threads.h"
#include "hd_unsent.h"
#include "hd_window.h"

/* Above the tag of data exchanges, in the engine's own residue. */
#define OWN_TAG(t) ((t) * 32 + 31)
#define ROLL_TAG(t) OWN_TAG(1 + (t) % 1000)
/* Groups that threads make at the same time need tags of their own: MPI 4.1, 7.4.2. Above those. */
#define MAKING 1002
/* Bytes; measured best between 4 and 16 MiB on both MPIs. */
#define CHUNK (8ll << 20)
#define NODE_LIMIT (16ll << 20) /* bytes; HPCDIST_NODE_MEMORY's default */

/* ---- open ---- */

static void init_locks(hd_comm *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->mu, NULL);
    pthread_cond_init(&c->lane.work_cv, NULL);
    pthread_cond_init(&c->lane.done_cv, &attr);
    pthread_condattr_destroy(&attr);
}

static int groups_of(hd_session *s)
{
    int n = 0;
    pthread_mutex_lock(&s->mu);
    for (const hd_comm *c = s->comms; c; c = c->next)
        n += c->size == 1 || c->page || (c->post && c->post->mpi != MPI_COMM_NULL);
    pthread_mutex_unlock(&s->mu);
    return n;
}

/* some: it consists of members of a group of this session, else NULL. */
static int failed(hd_session *some, const char *call, const char *name, int rc, char *text,
                  size_t room)
{
    char what[MPI_MAX_ERROR_STRING] = "";
    int len = 0;
    if (some && hd_ft_on(some))
        hd_ft_explains(some, rc);
    MPI_Error_string(rc, what, &len);
    /* MPICH has 2048 per process, and says the second where the members have none in common. */
    if (some && (strstr(what, "Too many communicators") || strstr(what, "of fragmentation"))) {
        snprintf(text, room,
                 "group '%s' was not made: MPI has no communicator left; this rank has %d groups. "
                 "Call destroy_process_group(group) on all members of those that are not used any "
                 "more, or drop all references to them on all members.",
                 name, groups_of(some));
        return HD_ERR_BACKEND;
    }
    snprintf(text, room, "%s failed while group '%s' was made: %s", call, name, what);
    return HD_ERR_BACKEND;
}

/* A group of some members of another one: what they know of each other already. */
typedef struct birth {
    const hd_comm *parent;
    const int *ranks;
    uint64_t uid;
} birth;

/* Exchanges which ranks share this node, and whether all use the same settings. Collective over the
 * new communicator. */
static int meet(hd_comm *c, char *text, size_t room)
{
    struct {
        uint64_t node, slot, uid, check, world;
    } mine, *all = malloc((size_t)c->size * sizeof *all);
    int slot, rc, wrong = -1;

    if (!all) {
        snprintf(text, room, "no memory for a group of %d ranks", c->size);
        return HD_ERR_MEMORY;
    }
    mine.node = hd_session_node(c->session, &slot);
    mine.slot = (uint64_t)(int64_t)slot;
    mine.uid = hd_random64();
    mine.check = hd_settings_own(c);
    mine.world = (uint64_t)hd_session_rank(c->session);
    rc = MPI_Allgather(&mine, 5, MPI_UINT64_T, all, 5, MPI_UINT64_T, c->mpi);
    if (rc) {
        free(all);
        return failed(NULL, "MPI_Allgather", c->name, rc, text, room);
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
        hd_settings_disagree(c, all[0].check, wrong, all[wrong].check, text, room);
        free(all);
        return HD_ERR_MISMATCH;
    }
    c->two_level = hd_levels_wanted();
    c->ordered = hd_ordered_wanted();
    c->as_world = 1;
    for (int r = 0; r < c->size; r++)
        c->as_world &= all[r].world == (uint64_t)r;
    for (int r = 0; r < c->size; r++) /* in place: the first numbers of `all` are shorter */
        ((int32_t *)all)[r] = (int32_t)all[r].world;
    c->rec_group = hd_rec_group(c, (int32_t *)all);
    free(all);
    return HD_OK;
}

/* The same without a message: the roll call has compared the settings. */
static void inherit(hd_comm *c, const birth *b)
{
    c->uid = b->uid;
    c->two_level = b->parent->two_level;
    c->ordered = b->parent->ordered;
    c->one_node = 1;
    for (int r = 0; r < c->size; r++) {
        c->node_slot[r] = b->parent->node_slot[b->ranks[r]];
        c->one_node &= b->parent->one_node || c->node_slot[r] >= 0;
    }
    c->rec_group = hd_rec_group(c, b->parent->as_world ? b->ranks : NULL);
}

/* What the ranks of a node share in a group between nodes. Returns MPI's code. Where a spare may
 * take the place of a rank of another node, sums must not depend on the nodes. */
static int part(hd_comm *c)
{
    int rc = MPI_SUCCESS;
    if (hd_spares_wanted() && !c->ordered)
        return rc;
    if (!hd_checks_by_mpi() || (c->two_level && !c->one_node))
        rc = hd_split_open(c);
    if (!rc && c->split && !hd_checks_by_mpi())
        rc = hd_caucus_open(c, &c->post->caucus);
    return rc;
}

/* Collective over the new communicator. */
static int furnish(hd_comm *c, const birth *b, char *text, size_t room)
{
    int code, rc;

    c->node_slot = malloc((size_t)c->size * sizeof *c->node_slot);
    if (!c->node_slot) {
        snprintf(text, room, "no memory for a group of %d ranks", c->size);
        return HD_ERR_MEMORY;
    }
    if (b)
        inherit(c, b);
    else if ((code = meet(c, text, room)))
        return code;
    if (c->size == 1)
        return HD_OK;
    if (c->one_node && !hd_checks_by_mpi() && (rc = hd_page_open(c)))
        return failed(b ? c->session : NULL, "MPI_Bcast", c->name, rc, text, room);
    if (c->page)
        return HD_OK;
    code = hd_post_open(c, &rc);
    if (code == HD_OK && !(rc = part(c)))
        return HD_OK;
    if (code == HD_OK)
        return failed(b ? c->session : NULL, "MPI_Comm_split", c->name, rc, text, room);
    if (rc)
        return failed(b ? c->session : NULL, "MPI_Comm_dup", c->name, rc, text, room);
    snprintf(text, room, "no memory for a group of %d ranks", c->size);
    return code;
}

static int open_comm(MPI_Comm from, hd_session *s, const birth *b, const char *name, double timeout,
                     int check, hd_comm **out, char *text, size_t room)
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
    hd_copy_text(c->name, sizeof c->name, name);
    c->timeout = timeout;
    c->check = check;
    c->chunk = CHUNK;
    c->node_limit = NODE_LIMIT;
    c->mpi = from;
    c->parts[HD_RAIL] = c->parts[HD_NODE] = MPI_COMM_NULL;
    if (!b)
        rc = MPI_Comm_dup(from, &c->mpi);
    if (s->remade && !b)
        rc = hd_ft_made_all(from, rc, &c->mpi);
    if (rc) {
        free(c);
        return failed(NULL, "MPI_Comm_dup", name, rc, text, room);
    }
    MPI_Comm_set_errhandler(c->mpi, MPI_ERRORS_RETURN);
    MPI_Comm_rank(c->mpi, &c->rank);
    MPI_Comm_size(c->mpi, &c->size);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &ub, &found);
    c->tag_limit = (found ? *(int *)ub : 32767) / 32 - 1;
    c->session = s;
    hd_session_ref(s);
    hd_session_adopt(s, c);
    if ((code = furnish(c, b, text, room)) != HD_OK) {
        hd_comm_free(c, 1, hd_ft_on(s) ? HD_KEEP : HD_TOGETHER); /* others may have made theirs */
        hd_comm_release(c);
        return code;
    }
    *out = c;
    return HD_OK;
}

int hd_comm_open(MPI_Comm from, hd_session *s, const char *name, double timeout, int check,
                 hd_comm **out, char *text, size_t room)
{
    return open_comm(from, s, NULL, name, timeout, check, out, text, room);
}

int hd_comm_open_part(hd_comm *p, MPI_Comm made, const int *ranks, const char *name, double timeout,
                      int check, hd_comm **out, char *text, size_t room)
{
    const birth b = {p, ranks, hd_mix(p->uid, hd_hash_text(name))};
    const int code = open_comm(made, p->session, &b, name, timeout, check, out, text, room);
    if (code == HD_OK)
        (*out)->node_limit = p->node_limit;
    return code;
}

/* ---- groups of some members ---- */

/* The members have met: a call that blocks until all have arrived will not block for long. */
static int make_group(hd_comm *p, const int *ranks, int n, uint64_t uid, MPI_Comm *made,
                      const char *name, char *text, size_t room)
{
    MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
    const char *call = "MPI_Comm_group";
    const int span = p->tag_limit > MAKING ? p->tag_limit - MAKING : 1;
    const int tag = p->tag_limit > MAKING ? OWN_TAG(MAKING + (int)(uid % (uint64_t)span)) : 0;
    int rc;
    hd_mpi_lock(p->session);
    if (!(rc = MPI_Comm_group(p->mpi, &all))) {
        call = "MPI_Group_incl";
        rc = MPI_Group_incl(all, n, ranks, &some);
    }
    if (!rc) {
        call = "MPI_Comm_create_group";
        rc = hd_ft_on(p->session) ? hd_ft_create_group(p->session, p->mpi, some, tag, made)
                                  : MPI_Comm_create_group(p->mpi, some, tag, made);
    }
    if (rc && hd_session_broken(p->session))
        some = MPI_GROUP_NULL; /* hd_ft_create_group may still use it */
    if (some != MPI_GROUP_NULL)
        MPI_Group_free(&some);
    if (all != MPI_GROUP_NULL)
        MPI_Group_free(&all);
    hd_mpi_unlock(p->session);
    if (!rc && *made != MPI_COMM_NULL)
        return HD_OK;
    return failed(p->session, call, name, rc, text, room);
}

static int is_vain(const hd_comm *p)
{
    if (hd_ft_on(p->session) && hd_making_is_vain(p->session))
        return HD_ROLL_VAIN;
    return __atomic_load_n(&p->closing, __ATOMIC_ACQUIRE) ? HD_ROLL_CLOSED : 0;
}

static int assemble(hd_comm *p, const int *ranks, int n, int tag, const char *name, double timeout,
                    int check, int *met, hd_comm **out, char *text, size_t room)
{
    hd_roll roll = {.mpi = p->mpi,
                    .session = p->session,
                    .unread = &p->unread,
                    .ranks = ranks,
                    .n = n,
                    .rank = p->rank,
                    .tag = ROLL_TAG(tag * 2),
                    .list = hd_hash_text(name),
                    .level = check,
                    .desk = hd_desk_of(p),
                    .until = hd_until(timeout),
                    .vain = is_vain,
                    .parent = p};
    MPI_Comm made = MPI_COMM_NULL;
    int code;

    if (!roll.desk) {
        snprintf(text, room, "no memory for a group of %d ranks", n);
        return HD_ERR_MEMORY;
    }
    for (int i = 0; i < n; i++)
        roll.list = hd_mix(roll.list, (uint64_t)(uint32_t)ranks[i]);
    if ((code = hd_roll_call(&roll))) {
        char within[48] = "";
        if (code == HD_ERR_TIMEOUT)
            snprintf(within, sizeof within, " within %.3g s", timeout);
        snprintf(text, room,
                 "group '%s' of %d ranks was not made%s (this is rank %d of '%s'): %s.%s", name, n,
                 within, p->rank, p->name, roll.text,
                 roll.advised ? "" : " All its members must call new_group with the same ranks.");
        if (code == HD_ERR_BACKEND)
            (void)hd_ft_explains(p->session, roll.mpi_error);
        else if (code == HD_ERR_TIMEOUT)
            (void)hd_stopped_explains(p->session);
        return code;
    }
    *met = 1;
    hd_graves_visit(p->session);
    if ((code = make_group(p, ranks, n, roll.uid, &made, name, text, room)))
        return code;
    code = open_comm(made, p->session, &(birth){p, ranks, roll.uid}, name, timeout, check, out,
                     text, room);
    if (code == HD_OK)
        (*out)->node_limit = p->node_limit;
    return code;
}

int hd_comm_create_group(hd_comm *p, const int *ranks, int n, int tag, const char *name,
                         double within, int check, int *met, hd_comm **out, char *text, size_t room)
{
    hd_session *s = p->session;
    int code;

    *out = NULL;
    *met = 0;
    if (hd_ft_on(s) && (code = hd_making_begin(s))) {
        snprintf(text, room, "group '%s' was not made: the default group is being reconfigured",
                 name);
        return code;
    }
    code = assemble(p, ranks, n, tag, name, within, check, met, out, text, room);
    if (hd_ft_on(s))
        hd_making_end(s);
    return code;
}

/* ---- free ---- */

void hd_comm_release(hd_comm *c)
{
    if (!c->freed || hd_grave_inherits(c) || c->session)
        return; /* never freed, or not cleanly: threads may still use it */
    hd_comm_dispose(c);
}

int64_t hd_comm_unread(hd_comm *c)
{
    hd_unsent_take(c->post);
    hd_mpi_lock(c->session);
    __atomic_sub_fetch(&c->unread, hd_roll_sweep(c->mpi, ROLL_TAG(0)), __ATOMIC_ACQ_REL);
    hd_mpi_unlock(c->session);
    return __atomic_load_n(&c->unread, __ATOMIC_ACQUIRE) + hd_post_unread(c);
}

void hd_comm_close(hd_comm *c, enum hd_closing how)
{
    pthread_mutex_lock(&c->mu); /* between two submissions to the lane */
    __atomic_store_n(&c->closing, how, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&c->mu);
}

int hd_comm_drain(hd_comm *c, double seconds)
{
    const int64_t until = hd_until(seconds);
    int64_t now;
    int down = 0;
    MPI_Finalized(&down); /* by the program: what was in flight has ended there */
    if (hd_in_child() || !hd_lane_drain(c, down ? 0 : seconds))
        return 0;
    now = hd_now();
    if (hd_p2p_drain(c, until > now ? (double)(until - now) * 1e-9 : 0))
        return 1;
    hd_comm_close(c, HD_COMM_CLOSED);
    return hd_p2p_close(c);
}

int hd_comm_free(hd_comm *c, int drained, enum hd_parting how)
{
    hd_session *s = c->session;
    if (__atomic_exchange_n(&c->freed, 1, __ATOMIC_SEQ_CST)) /* by another thread, at the end */
        return HD_OK;
    hd_comm_close(c, HD_COMM_CLOSED); /* no new caller gets in, and those inside leave */
    /* a rank has died, and the others did not reconfigure: each ends when it likes */
    if (hd_session_broken(s) && !__atomic_load_n(&c->replaced, __ATOMIC_ACQUIRE))
        hd_exit_unmet(1);
    if (!drained || !hd_p2p_drain(c, 1.0)) {
        hd_session_poisoned(s);
        return HD_ERR_TIMEOUT; /* threads may still use everything: nothing is freed */
    }
    hd_unsent_take(c->post);
    if (how != HD_LATER && !hd_post_close(c, how == HD_TOGETHER))
        hd_session_poisoned(s);
    hd_lane_close(c);
    hd_session_forget(s, c);
    hd_node_close(c);
    hd_levels_close(c);
    hd_windows_close(c);
    hd_blocks_close(c);
    free(c->staging);
    c->staging = NULL;
    if (how == HD_LATER) {
        if (c->post && c->post->caucus)
            hd_caucus_close(c->post->caucus);
        hd_grave_dig(c);
    } else {
        hd_levels_free(c);
        hd_split_free(c, how == HD_TOGETHER && !c->post); /* the post's requests may use it */
        if (how == HD_TOGETHER)
            MPI_Comm_free(&c->mpi);
        hd_page_close(c);
        c->session = NULL;
    }
    if (hd_session_is_last(s))
        hd_graves_close(s);
    else
        hd_graves_visit(s);
    hd_session_unref(s);
    return HD_OK;
}
