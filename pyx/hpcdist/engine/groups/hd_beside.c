/* Operations that another library moves: see hd_beside.h. */
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_beside.h"
#include "hd_comm.h"
#include "hd_comm_life.h"
#include "hd_hang.h"
#include "hd_job.h"
#include "hd_recorder.h"
#include "hd_recorder_file.h"
#include "hd_session.h"
#include "hd_status.h"
#include "hd_types.h"
#include "hd_view.h"

#define SHOWN 8  /* other ranks in a text */
#define TRIES 64 /* collectives that are looked at */

static uint64_t begin(hd_beside *b, const hd_beside_call *call)
{
    hd_record *r;
    uint64_t id;
    if (!hd_rec.ring || !b->group)
        return 0;
    id = ++hd_rec.next;
    r = &hd_rec.ring[id & hd_rec.mask];
    __atomic_store_n(&r->id, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    *r = (hd_record){.call = hd_rec_ticks(),
                     .count = call->count,
                     .seq = call->seq,
                     .site = b->site(),
                     .name = call->name,
                     .group = b->group,
                     .peer = call->peer,
                     .kind = call->kind,
                     .dtype = call->dtype,
                     .redop = call->redop,
                     .ndim = 1,
                     .state = HD_REC_RUNNING,
                     .wide = 1,
                     .queued = 1,
                     .in_n = call->in_n,
                     .out_n = call->out_n,
                     .dims = {call->count}};
    r->start = r->call;
    __atomic_store_n(&r->id, id, __ATOMIC_RELEASE);
    __builtin_prefetch(&hd_rec.ring[(id + 1) & hd_rec.mask], 1);
    return id;
}

static void end(uint64_t record, int code)
{
    hd_record *r = hd_rec.ring ? &hd_rec.ring[record & hd_rec.mask] : NULL;
    if (!record || !r || __atomic_load_n(&r->id, __ATOMIC_ACQUIRE) != record)
        return;
    r->end = hd_rec_ticks();
    r->code = (uint8_t)code;
    __atomic_store_n(&r->state, code ? HD_REC_FAILED : HD_REC_DONE, __ATOMIC_RELEASE);
    if (code && code != HD_ERR_CLOSED)
        hd_rec.failures++; /* the watchdog writes a copy of the file */
}

/* ---- its errors ---- */

static void say_call(const hd_view *v, const hd_record *r, hd_text *t)
{
    hd_view_say(v, r, t);
    if (r->redop >= 0)
        hd_say(t, ", %s", hd_op_name(r->redop));
    if (r->peer >= 0 && r->kind < HD_SEND)
        hd_say(t, ", root %d", r->peer);
}

static int same(const hd_view *v, const hd_record *r, const hd_view *w, const hd_record *q)
{
    char a[HD_NAME + 16], b[HD_NAME + 16];
    hd_view_name(v, r->name, a, sizeof a);
    hd_view_name(w, q->name, b, sizeof b);
    return strcmp(a, b) == 0 && r->kind == q->kind && r->dtype == q->dtype &&
           r->redop == q->redop && r->peer == q->peer &&
           (r->count == q->count || (r->kind != HD_ALL_REDUCE && r->kind != HD_BROADCAST &&
                                     r->kind != HD_ALL_GATHER && r->kind != HD_REDUCE));
}

/* What the member of this rank does about the collective `r` of this process; 0: the same, -1: its
 * recorder cannot be read. */
static int say_other(const hd_beside *b, const hd_view *mine, const hd_record *r, int rank,
                     hd_text *t)
{
    hd_comm *c = b->comm;
    const int slot = c->node_slot[rank];
    hd_record at, last;
    hd_view v;
    int differs = 1;
    if (r->kind >= HD_SEND || slot < 0 || !c->session->page ||
        !hd_view_open(&v, c->session->page[slot].record)) {
        hd_say(t, "\n  rank %d ", rank);
        hd_session_report(c->session, slot, t);
        hd_hang_say_where(c->session, slot, t);
        return -1;
    }
    if (hd_view_find(&v, hd_view_group(&v, b->uid), r->seq, &at, &last)) {
        differs = !same(mine, r, &v, &at);
        if (differs) {
            hd_say(t, "\n  rank %d called as collective #%u: ", rank, r->seq);
            say_call(&v, &at, t);
        }
    } else if (last.id && last.seq > r->seq) {
        differs = 0; /* its recorder has overwritten it */
    } else {
        hd_say(t, "\n  rank %d has not called it: ", rank);
        hd_session_report(c->session, slot, t);
        hd_hang_say_where(c->session, slot, t);
        if (last.id) {
            hd_say(t, "; its last one: ");
            say_call(&v, &last, t);
        }
    }
    hd_view_close(&v);
    return differs;
}

/* The collective `r`; returns how many of the other ranks do something else. */
static int say_one(const hd_beside *b, const hd_view *mine, const hd_record *r, hd_text *t)
{
    const hd_comm *c = b->comm;
    int others = 0, told = 0;
    hd_say(t, "\n  rank %d called", c->rank);
    if (r->kind < HD_SEND)
        hd_say(t, " as collective #%u", r->seq);
    hd_say(t, ": ");
    say_call(mine, r, t);
    for (int k = 0; k < c->size && told < SHOWN && t->used + 400 < t->room; k++)
        if (k != c->rank && (r->kind < HD_SEND || r->peer == k)) {
            const int differs = say_other(b, mine, r, k, t);
            told += differs != 0;
            others += differs > 0;
        }
    if (!told)
        hd_say(t, "\n  the other ranks have made the same call");
    return others;
}

/* The first one on which the ranks differ, or else `record`. (That an operation has ended is noted
 * with a delay: the oldest that has no end may be done.) */
static void say_all(const hd_beside *b, uint64_t record, hd_text *t)
{
    const size_t before = t->used;
    uint64_t after = 0;
    hd_view mine;
    hd_record r;
    if (!hd_view_open(&mine, hd_rec_path()))
        return;
    if (hd_view_next(&mine, b->group, record - 1, record, &r) && r.kind >= HD_SEND)
        after = record - 1;
    for (int tries = TRIES; hd_view_next(&mine, b->group, tries ? after : record - 1, record, &r);
         tries--) {
        t->used = before;
        if (say_one(b, &mine, &r, t) || r.id == record)
            break;
        after = r.id;
    }
    if (t->used > before)
        hd_say(t, "\n");
    hd_view_close(&mine);
}

/* Its communicator, which is not freed before leave(); NULL: it is gone. */
static hd_comm *enter(hd_beside *b)
{
    pthread_mutex_lock(&b->mu);
    if (b->comm && b->comm->session && hd_comm_enter(b->comm, 0))
        return b->comm;
    pthread_mutex_unlock(&b->mu);
    return NULL;
}

static void leave(hd_beside *b)
{
    hd_comm_exit(b->comm);
    pthread_mutex_unlock(&b->mu);
}

static void expect(hd_beside *b, double left)
{
    hd_comm *c = enter(b);
    if (c) {
        hd_hang_expect(c->session, left);
        leave(b);
    }
}

static void explain(hd_beside *b, uint64_t record, char *text, size_t room)
{
    hd_text t = {.at = text, .room = room, .used = strlen(text)};
    if (record && enter(b)) {
        say_all(b, record, &t);
        leave(b);
    }
}

static void report(hd_beside *b, const char *why)
{
    hd_comm *c = enter(b);
    if (c) {
        hd_hang_report(c->session, why, 0);
        leave(b);
    }
}

/* ---- life ---- */

static void put(hd_beside *b)
{
    if (!b || __atomic_sub_fetch(&b->refs, 1, __ATOMIC_ACQ_REL))
        return;
    pthread_mutex_destroy(&b->mu);
    free(b);
}

hd_beside *hd_beside_new(hd_comm *c, const char *name, const int32_t *ranks, uint32_t (*site)(void))
{
    hd_beside *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    *b = (hd_beside){.begin = begin,
                     .end = end,
                     .name = hd_rec_name,
                     .expect = expect,
                     .explain = explain,
                     .report = report,
                     .put = put,
                     .site = site,
                     .refs = 1,
                     .comm = c,
                     .uid = hd_mix(c->uid, hd_hash_text(name))};
    pthread_mutex_init(&b->mu, NULL);
    b->group = hd_rec_group_of(c->rank, c->size, b->uid, name, ranks);
    return b;
}

void hd_beside_part(hd_beside *b)
{
    hd_comm *before;
    pthread_mutex_lock(&b->mu);
    before = b->comm;
    b->comm = NULL;
    pthread_mutex_unlock(&b->mu);
    if (before)
        hd_rec_forget(b->group);
}
