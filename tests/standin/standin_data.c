/* What moves: collectives step by step through each rank's place, messages through mailboxes. */
#define _GNU_SOURCE
#include "standin.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NO_FAULT, FAIL, HANG, DELAY, DIE, REMOTE_FAULT };

static const char *names[] = {"", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
                              "gather", "scatter", "send", "recv"};

/* Everybody has come here. */
static int step(comm *c)
{
    place *own = &c->mem->at[c->rank];
    uint64_t phase = atomic_load(&own->phase) + 1;
    atomic_store(&own->phase, phase);
    for (int i = 0; i < c->size; i++)
        if (comm_wait(c, &c->mem->at[i].phase, phase, i) < 0)
            return -1;
    return 0;
}

static int agree(op *o)
{
    comm *c = o->comm;
    c->mem->at[c->rank].call = o->call;
    if (step(c) < 0)
        return -1;
    for (int i = 0; i < c->size; i++) {
        about *theirs = &c->mem->at[i].call;
        if (memcmp(theirs, &o->call, sizeof o->call)) {
            comm_fail(c, USAGE, "rank %d calls %s (type %d, op %d, root %d, count %llu), rank %d calls %s (%d, %d, "
                      "%d, %llu)", c->rank, names[o->call.kind], o->call.type, o->call.op, o->call.root,
                      (unsigned long long)o->call.count, i, names[theirs->kind], theirs->type, theirs->op,
                      theirs->root, (unsigned long long)theirs->count);
            return -1;
        }
    }
    return step(c);
}

/* One piece: those that send put it into their places, then those that receive take it. */
static int piece(op *o, const char *give, size_t n, char *take, int from, int reduce)
{
    comm *c = o->comm;
    size_t size = type_size(o->call.type);
    static _Thread_local wide acc[CHUNK];

    if (give)
        memcpy(c->mem->at[c->rank].data, give, n * size);
    if (step(c) < 0)
        return -1;
    if (take && reduce) {
        /* each rank's own factor has been multiplied in where it put its data: a sum is all that is left */
        for (int i = 0; i < c->size; i++)
            accumulate(acc, c->mem->at[i].data, n, o->call.type, o->call.op, i == 0, 1.0);
        finish(take, acc, n, o->call.type, o->call.op == AVG ? c->size : 1);
    } else if (take) {
        memcpy(take, c->mem->at[from].data, n * size);
    }
    return step(c);
}

static int collective(op *o)
{
    comm *c = o->comm;
    size_t size = type_size(o->call.type), count = o->call.count, most = CHUNK / size;
    int kind = o->call.kind, root = o->call.root, own = c->rank;
    static _Thread_local char scaled[CHUNK];
    static _Thread_local wide acc[CHUNK];

    if (agree(o) < 0)
        return -1;
    int reduces = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
    int parts = kind == REDUCE_SCATTER || kind == ALL_TO_ALL || kind == SCATTER ? c->size : 1;
    for (int part = 0; part < parts; part++) {
        for (size_t at = 0; at < count; at += most) {
            size_t n = count - at < most ? count - at : most;
            const char *give = o->send ? o->send + (size * ((size_t)part * count + at)) : NULL;
            char *take = o->recv ? o->recv + size * at : NULL;
            if (reduces && o->factor != 1.0) {
                accumulate(acc, give, n, o->call.type, SUM, 1, o->factor);
                finish(scaled, acc, n, o->call.type, 1);
                give = scaled;
            }
            int rc = 0;
            switch (kind) {
            case ALL_REDUCE: rc = piece(o, give, n, take, 0, 1); break;
            case REDUCE: rc = piece(o, give, n, own == root ? take : NULL, 0, 1); break;
            case REDUCE_SCATTER: rc = piece(o, give, n, own == part ? take : NULL, 0, 1); break;
            case BROADCAST: rc = piece(o, own == root ? give : NULL, n, take, root, 0); break;
            case SCATTER: rc = piece(o, own == root ? give : NULL, n, own == part ? take : NULL, root, 0); break;
            case ALL_TO_ALL:
            case ALL_GATHER:
            case GATHER:
                /* all ranks' pieces lie there at once: take them one after the other */
                memcpy(c->mem->at[own].data, give, n * size);
                if (step(c) < 0)
                    return -1;
                if ((kind == ALL_TO_ALL && own == part) || kind == ALL_GATHER || (kind == GATHER && own == root))
                    for (int i = 0; i < c->size; i++)
                        memcpy(o->recv + size * ((size_t)i * count + at), c->mem->at[i].data, n * size);
                rc = step(c);
                break;
            }
            if (rc < 0)
                return -1;
        }
    }
    return 0;
}

/* A bit of a message: 1 done, 0 moved or waits, -1 lost. */
static int some_of_message(op *o, int *moved)
{
    comm *c = o->comm;
    int sends = o->call.kind == SEND, own = c->rank;
    mailbox *box = sends ? &c->mem->box[own][o->peer] : &c->mem->box[o->peer][own];
    uint64_t bytes = o->call.count * type_size(o->call.type);
    uint64_t written = atomic_load(&box->written), taken = atomic_load(&box->taken);

    if (sends && written == taken) {
        uint64_t n = bytes - o->done < MESSAGE ? bytes - o->done : MESSAGE;
        box->total = bytes;
        box->type = o->call.type;
        box->bytes = (int32_t)n;
        memcpy(box->data, o->send + o->done, n);
        o->done += n;
        atomic_store(&box->written, written + 1);
        *moved = 1;
        return o->done == bytes;
    }
    if (!sends && written > taken) {
        if (box->total != bytes || box->type != o->call.type) {
            comm_fail(c, USAGE, "rank %d sends %llu bytes of type %d, rank %d receives %llu of type %d", o->peer,
                      (unsigned long long)box->total, box->type, own, (unsigned long long)bytes, o->call.type);
            return -1;
        }
        memcpy(o->recv + o->done, box->data, (size_t)box->bytes);
        o->done += (uint64_t)box->bytes;
        atomic_store(&box->taken, taken + 1);
        *moved = 1;
        return o->done == bytes;
    }
    return 0;
}

static int message(op *o, int *moved)
{
    if (comm_hold(o->comm) < 0)
        return -1;
    int got = some_of_message(o, moved);
    comm_release(o->comm);
    return got;
}

/* The messages of a group at once; of two between the same ranks in one direction the first goes first. */
static void messages(op **all, int n)
{
    int64_t pause = 5000, looked = nanoseconds();
    int left = n;
    while (left) {
        int moved = 0;
        for (int i = 0; i < n; i++) {
            int behind = 0;
            if (!all[i])
                continue;
            for (int j = 0; j < i && !behind; j++)
                behind = all[j] && all[j]->comm == all[i]->comm && all[j]->peer == all[i]->peer &&
                         all[j]->call.kind == all[i]->call.kind;
            if (behind)
                continue;
            int got = comm_lost(all[i]->comm) ? -1 : message(all[i], &moved);
            if (got) {
                all[i] = NULL;
                left--;
            }
        }
        if (moved || !left) {
            pause = 5000;
            continue;
        }
        nap(pause);
        if (pause < 200000)
            pause *= 2;
        if (nanoseconds() - looked < 20000000)
            continue;
        looked = nanoseconds();
        for (int i = 0; i < n; i++)
            if (all[i] && comm_gone(all[i]->comm, all[i]->peer)) {
                int again = 0; /* what it left behind still counts */
                if (message(all[i], &again) > 0) {
                    all[i] = NULL;
                    left--;
                } else if (!again) {
                    comm_fail(all[i]->comm, REMOTE, "rank %d has left or died", all[i]->peer);
                }
            }
    }
}

static int faulty(op *o)
{
    comm *c = o->comm;
    switch (o->fault) {
    case HANG:
        while (!atomic_load(&c->stop))
            nap(1000000);
        return -1;
    case DELAY: nap((int64_t)(o->seconds * 1e9)); return 0;
    case DIE: kill(getpid(), SIGKILL); return -1;
    case REMOTE_FAULT: comm_fail(c, REMOTE, "a fault was asked for"); return -1;
    }
    return 0;
}

/* As in NCCL, what is launched on a communicator runs in that order, on whatever streams. */
static void wait_for_turn(const op *first)
{
    comm *c = first->comm;
    while (atomic_load(&c->ran) != first->turn && !atomic_load(&c->stop))
        nap(20000);
}

void run_ops(op *list)
{
    int n = 0, most = 0;
    op **waiting;
    wait_for_turn(list);
    for (op *o = list; o; o = o->next)
        most++;
    waiting = calloc((size_t)most + 1, sizeof *waiting);
    for (op *o = list; o; o = o->next) {
        int lost = (o->fault && faulty(o) < 0) || atomic_load(&o->comm->stop);
        if (lost)
            continue;
        if (o->call.kind == SEND || o->call.kind == RECV) {
            waiting[n++] = o;
        } else if (comm_hold(o->comm) == 0) {
            collective(o);
            comm_release(o->comm);
        }
    }
    messages(waiting, n);
    free(waiting);
    atomic_store(&list->comm->ran, list->turn + 1);
    while (list) {
        op *after = list->next;
        comm_busy(list->comm, -1);
        comm_put(list->comm);
        free(list);
        list = after;
    }
}
