/* The functions of libnccl.so.2. What is checked here NCCL checks too, or breaks without. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    char bytes[128];
} unique;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min, max;
    const char *net;
    int split_share;
} config;

#ifdef STANDIN_OLD
#define DEFAULT_VERSION 21805
#else
#define DEFAULT_VERSION 22809
#endif

static _Thread_local char last[256];
static _Thread_local int depth;
static _Thread_local struct pending {
    op *first, *last;
    void *stream;
    struct pending *next;
} *group;

int standin_version(void)
{
    const char *given = getenv("NCCL_STANDIN_VERSION");
    return given ? atoi(given) : DEFAULT_VERSION;
}

__attribute__((format(printf, 2, 3))) static int refuse(int code, const char *text, ...)
{
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(last, sizeof last, text, arguments);
    va_end(arguments);
    return code;
}

/* What would be a use of freed memory in NCCL: counted, and told. */
static _Atomic int misuses, calls;
static _Atomic int64_t slow; /* ns that each call takes */

static int misused(const char *what)
{
    atomic_fetch_add(&misuses, 1);
    fprintf(stderr, "stand-in for NCCL: %s\n", what);
    return INTERNAL;
}

PUBLIC int standin_misuses(void) { return atomic_load(&misuses); }
PUBLIC int standin_calls(void) { return atomic_load(&calls); } /* of functions of a communicator */
static _Atomic int abort_waits; /* for the operations of all communicators */
PUBLIC void standin_abort_waits(int yes) { atomic_store(&abort_waits, yes); }
PUBLIC void standin_slow(double seconds) { atomic_store(&slow, (int64_t)(seconds * 1e9)); }

/* Around each function of a communicator. */
static int come_in(comm *c, const char *function)
{
    if (!c)
        return refuse(ARGUMENT, "the communicator is NULL");
    atomic_fetch_add(&c->calls, 1);
    atomic_fetch_add(&calls, 1);
    if (atomic_load(&slow))
        nap(atomic_load(&slow));
    if (!atomic_load(&c->freed))
        return OK;
    atomic_fetch_sub(&c->calls, 1);
    return misused(function);
}

static int go_out(comm *c, int rc)
{
    if (atomic_load(&c->freed) && !atomic_load(&c->blocked))
        misused("a call was inside while its communicator was freed");
    atomic_fetch_sub(&c->calls, 1);
    return rc;
}

#define WITHIN(c, call) \
    do { \
        int entered = come_in(c, __func__); \
        return entered != OK ? entered : go_out(c, call); \
    } while (0)

static int freed(comm *c, const char *function)
{
    if (!c)
        return refuse(ARGUMENT, "the communicator is NULL");
    atomic_fetch_add(&calls, 1);
    if (atomic_exchange(&c->freed, 1))
        return misused(function);
    if (atomic_load(&c->calls) && !atomic_load(&c->blocked))
        misused("a communicator is freed while a call is inside");
    return OK;
}

PUBLIC const char *ncclGetErrorString(int code)
{
    static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                  "invalid argument", "invalid usage", "remote process exited or there was a "
                                  "network error", "NCCL operation in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

PUBLIC const char *ncclGetLastError(comm *c)
{
    if (c && come_in(c, __func__) == OK)
        go_out(c, OK);
    return c && c->error[0] ? c->error : last;
}

PUBLIC int ncclGetVersion(int *version)
{
    *version = standin_version();
    return OK;
}

PUBLIC int ncclGetUniqueId(unique *id)
{
    static _Atomic int count;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/nccl-standin-%d-%d-%lx%lx", (int)getpid(), atomic_fetch_add(&count, 1),
             (long)t.tv_sec, t.tv_nsec);
    return OK;
}

static void *join_later(void *arg)
{
    comm *c = arg;
    int rc = comm_join(c), expected = IN_PROGRESS;
    atomic_compare_exchange_strong(&c->async, &expected, rc);
    comm_put(c);
    return NULL;
}

static int begin(comm *c, comm **to)
{
    *to = c;
    if (capture_refuses()) {
        *to = NULL;
        comm_put(c);
        return refuse(CUDA, "a communicator allocates memory, and a stream is being captured");
    }
    if (c->blocking) {
        int rc = comm_join(c);
        if (rc != OK) {
            snprintf(last, sizeof last, "%s", c->error);
            *to = NULL;
            comm_put(c);
        }
        return rc;
    }
    pthread_t thread;
    atomic_fetch_add(&c->refs, 1);
    atomic_store(&c->async, IN_PROGRESS);
    pthread_create(&thread, NULL, join_later, c);
    pthread_detach(thread);
    return IN_PROGRESS;
}

static int checked(const config *cfg, int inherited, int *blocking)
{
    *blocking = inherited;
    if (!cfg)
        return OK;
    if (cfg->magic != 0xcafebeef || cfg->size < sizeof *cfg)
        return refuse(ARGUMENT, "the configuration was not initialized");
    if (cfg->version > 30000 || cfg->version < 21700)
        return refuse(ARGUMENT, "the configuration has version %u", cfg->version);
    if (cfg->blocking == 0 || cfg->blocking == 1)
        *blocking = cfg->blocking;
    return OK;
}

PUBLIC int ncclCommInitRankConfig(comm **to, int size, unique id, int rank, const config *cfg)
{
    int blocking, rc = checked(cfg, 1, &blocking);
    if (rc != OK)
        return rc;
    if (size < 1 || size > RANKS || rank < 0 || rank >= size || memcmp(id.bytes, "/nccl-standin-", 14))
        return refuse(ARGUMENT, "rank %d of %d, or the identity, is not valid", rank, size);
    return begin(comm_new(id.bytes, size, rank, blocking), to);
}

static int usable(comm *c)
{
    if (!c)
        return refuse(ARGUMENT, "the communicator is NULL");
    int async = atomic_load(&c->async);
    if (async == IN_PROGRESS)
        return refuse(USAGE, "the communicator is in progress: ncclCommGetAsyncError has to say so first");
    return async;
}

PUBLIC int ncclCommGetAsyncError(comm *c, int *state)
{
    WITHIN(c, (*state = atomic_load(&c->async), OK));
}
PUBLIC int ncclCommCount(comm *c, int *n) { WITHIN(c, (*n = c->size, OK)); }
PUBLIC int ncclCommUserRank(comm *c, int *n) { WITHIN(c, (*n = c->rank, OK)); }
PUBLIC int ncclCommCuDevice(comm *c, int *n) { WITHIN(c, (*n = c->rank, OK)); }

static int divide(comm *c, int color, int key, comm **to, const config *cfg)
{
    int blocking, size = 0, rank = 0, rc = usable(c);
    char name[sizeof c->name];
    if (rc != OK || (rc = checked(cfg, c->blocking, &blocking)) != OK)
        return rc;
    if (comm_control(c, color, key) < 0)
        return atomic_load(&c->async);
    c->children++;
    for (int i = 0; i < c->size; i++) {
        place *other = &c->mem->at[i];
        if (other->color != color)
            continue;
        size++;
        rank += other->key < key || (other->key == key && i < c->rank);
    }
    if (comm_control_done(c) < 0)
        return atomic_load(&c->async);
    *to = NULL;
    if (color < 0)
        return OK;
    snprintf(name, sizeof name, "%.70s-%d-%d", c->name, c->children, color);
    return begin(comm_new(name, size, rank, blocking), to);
}

PUBLIC int ncclCommSplit(comm *c, int color, int key, comm **to, const config *cfg)
{
    WITHIN(c, divide(c, color, key, to, cfg));
}

static int finalize(comm *c)
{
    int rc = usable(c);
    if (rc != OK)
        return rc;
    while (atomic_load(&c->busy) && !atomic_load(&c->stop))
        nap(50000);
    return atomic_load(&c->async);
}

PUBLIC int ncclCommFinalize(comm *c) { WITHIN(c, finalize(c)); }

static void leave(comm *c)
{
    if (c->mem)
        atomic_store(&c->mem->at[c->rank].left, 1);
    comm_put(c);
}

PUBLIC int ncclCommDestroy(comm *c)
{
    int rc = freed(c, __func__);
    if (rc != OK)
        return rc;
    while (atomic_load(&c->busy) && !atomic_load(&c->async))
        nap(50000);
    comm_stop(c);
    leave(c);
    return OK;
}

PUBLIC int ncclCommAbort(comm *c)
{
    int rc = freed(c, __func__);
    if (rc != OK)
        return rc;
    comm_stop(c);
    while (atomic_load(&abort_waits) && comm_others_busy(c))
        nap(50000);
    leave(c);
    return OK;
}

#ifndef STANDIN_OLD
static int shrink(comm *c, int *gone, int n, comm **to, const config *cfg, int flags)
{
    int blocking, rank = c->rank, rc = checked(cfg, c->blocking, &blocking);
    char name[sizeof c->name];
    if (rc != OK)
        return rc;
    if (!(flags & 1) && (rc = usable(c)) != OK)
        return rc;
    if (flags & 1)
        comm_stop(c);
    for (int i = 0; i < n; i++) {
        if (gone[i] == c->rank)
            return refuse(ARGUMENT, "a rank that is left out must not call ncclCommShrink");
        rank -= gone[i] < c->rank;
    }
    snprintf(name, sizeof name, "%.70s-k%d", c->name, ++c->children);
    return begin(comm_new(name, c->size - n, rank, blocking), to);
}

PUBLIC int ncclCommShrink(comm *c, int *gone, int n, comm **to, const config *cfg, int flags)
{
    WITHIN(c, shrink(c, gone, n, to, cfg, flags));
}

PUBLIC int ncclCommRegister(comm *c, void *data, size_t size, void **handle)
{
    *handle = data;
    WITHIN(c, size && data ? usable(c) : refuse(ARGUMENT, "there is nothing to register"));
}
PUBLIC int ncclCommDeregister(comm *c, void *handle) { WITHIN(c, handle ? usable(c) : ARGUMENT); }

/* All ranks register a window together, of one size. */
static int window_register(comm *c, void *data, size_t size, void **window, int flags)
{
    int rc = usable(c);
    if (rc != OK || !size || !data || flags < 0 || flags > 1)
        return rc != OK ? rc : refuse(ARGUMENT, "there is no window to register");
    if (comm_control(c, (int)size, flags) < 0)
        return atomic_load(&c->async);
    for (int i = 0; i < c->size; i++)
        if (c->mem->at[i].color != (int)size)
            comm_fail(c, USAGE, "rank %d registers a window of %d bytes, rank %d of %d", c->rank, (int)size, i,
                      c->mem->at[i].color);
    if (comm_control_done(c) < 0)
        return atomic_load(&c->async);
    *window = data;
    return atomic_load(&c->async);
}
PUBLIC int ncclCommWindowRegister(comm *c, void *data, size_t size, void **window, int flags)
{
    WITHIN(c, window_register(c, data, size, window, flags));
}
PUBLIC int ncclCommWindowDeregister(comm *c, void *window) { WITHIN(c, window ? usable(c) : ARGUMENT); }

static int take_back(comm *c, int flags)
{
    int rc = usable(c);
    if (rc != OK || flags)
        return rc != OK ? rc : refuse(ARGUMENT, "flags %d", flags);
    comm_fail(c, USAGE, "the communicator was revoked");
    return OK;
}
PUBLIC int ncclCommRevoke(comm *c, int flags) { WITHIN(c, take_back(c, flags)); }

PUBLIC int ncclMemAlloc(void **made, size_t size)
{
    *made = size ? malloc(size) : NULL;
    return *made ? OK : refuse(ARGUMENT, "there is no memory of %zu bytes", size);
}
PUBLIC int ncclMemFree(void *made)
{
    free(made);
    return OK;
}

/* Each root's ranks must know it; they meet under the first one's name. */
PUBLIC int ncclCommInitRankScalable(comm **to, int size, int rank, int n, unique *ids, const config *cfg)
{
    if (n < 1 || n > size)
        return refuse(ARGUMENT, "%d identities for %d ranks", n, size);
    for (int i = 0; i < n; i++)
        if (memcmp(ids[i].bytes, "/nccl-standin-", 14))
            return refuse(ARGUMENT, "identity %d is not valid", i);
    return ncclCommInitRankConfig(to, size, ids[0], rank, cfg);
}
#endif

static int premul_sum(int *made, void *scalar, int type, int residence, comm *c)
{
    int rc = usable(c);
    if (rc != OK)
        return rc;
    if (residence != 1 || type < 0 || type >= TYPES || c->nfactors == CREATED)
        return refuse(ARGUMENT, "residence %d, type %d", residence, type);
    c->factor[c->nfactors] = scalar_value(scalar, type);
    c->factor_type[c->nfactors] = type;
    *made = OPS + c->nfactors++;
    return OK;
}
PUBLIC int ncclRedOpCreatePreMulSum(int *made, void *scalar, int type, int residence, comm *c)
{
    WITHIN(c, premul_sum(made, scalar, type, residence, c));
}
PUBLIC int ncclRedOpDestroy(int made, comm *c)
{
    if (atomic_load(&c->freed))
        return misused(__func__);
    if (made < OPS || made >= OPS + c->nfactors || c->factor_type[made - OPS] < 0)
        return refuse(ARGUMENT, "there is no operation %d", made);
    c->factor_type[made - OPS] = -1;
    return OK;
}

/* --- operations --- */
typedef struct {
    op *list;
    void *stream;
    comm *comm;
} launch;

static void run(void *list) { run_ops(list); }

/* For a replay: operations of a graph are launched anew each time. */
static void *copy_ops(void *arg)
{
    op *first = NULL, **end = &first;
    for (op *o = arg; o; o = o->next) {
        op *made = malloc(sizeof *made);
        *made = *o;
        made->next = NULL;
        *end = made;
        end = &made->next;
        atomic_fetch_add(&o->comm->refs, 1);
        comm_busy(o->comm, 1);
    }
    first->turn = first->comm->launched++;
    return first;
}

static void *launch_later(void *arg)
{
    launch *l = arg;
    comm *c = l->comm;
    int expected = IN_PROGRESS;
    nap(100000);
    stream_push(l->stream, run, l->list, copy_ops);
    atomic_compare_exchange_strong(&c->async, &expected, OK);
    comm_put(c);
    free(l);
    return NULL;
}

/* Ranks that have to be connected first, and one of them does not come. */
static int block(op *list)
{
    comm *c = list->comm;
    atomic_store(&c->blocked, 1);
    while (!comm_lost(c))
        nap(50000);
    while (list) {
        op *after = list->next;
        comm_busy(c, -1);
        comm_put(c);
        free(list);
        list = after;
    }
    return refuse(INTERNAL, "the communicator was aborted");
}

static int start(void)
{
    int rc = OK;
    while (group) {
        struct pending *p = group;
        group = p->next;
        comm *c = p->first->comm;
        if (atomic_load(&c->freed)) {
            rc = misused("a group of operations ends after its communicator was freed");
            free(p);
            continue;
        }
        if (p->first->fault == 6) {
            rc = block(p->first);
            free(p);
            continue;
        }
        if (stream_captures(p->stream)) {
            for (op *o = p->first; o; o = o->next)
                comm_busy(o->comm, -1);
            stream_push(p->stream, run, p->first, copy_ops);
            free(p);
            continue;
        }
        p->first->turn = c->launched++;
        if (c->blocking) {
            stream_push(p->stream, run, p->first, copy_ops);
        } else {
            launch *l = malloc(sizeof *l);
            pthread_t thread;
            *l = (launch){p->first, p->stream, c};
            atomic_fetch_add(&c->refs, 1);
            atomic_store(&c->async, IN_PROGRESS);
            pthread_create(&thread, NULL, launch_later, l);
            pthread_detach(thread);
            rc = IN_PROGRESS;
        }
        free(p);
    }
    return rc;
}

PUBLIC int ncclGroupStart(void)
{
    depth++;
    return OK;
}

PUBLIC int ncclGroupEnd(void)
{
    if (depth == 0)
        return refuse(USAGE, "ncclGroupEnd without ncclGroupStart");
    return --depth ? OK : start();
}

/* NCCL_STANDIN_FAULT=kind:rank:number[:seconds]; the number counts a communicator's operations from 1. */
static void fault_of(op *o)
{
    static const char *kinds[] = {"", "fail", "hang", "delay", "die", "remote", "block"};
    const char *given = getenv("NCCL_STANDIN_FAULT");
    char kind[16];
    int rank;
    unsigned long long number;
    double seconds = 0.2;
    if (!given || sscanf(given, "%15[a-z]:%d:%llu:%lf", kind, &rank, &number, &seconds) < 3)
        return;
    if (rank != o->comm->rank || number != o->number)
        return;
    for (int i = 1; i < 7; i++)
        if (!strcmp(kind, kinds[i]))
            o->fault = i;
    o->seconds = seconds;
}

static int take_in(comm *c, int kind, const void *send, void *recv, size_t count, int type, int how, int root,
                   int peer, void *stream)
{
    int rc = usable(c);
    double factor = 1.0;
    if (rc != OK)
        return rc;
    if (type < 0 || type >= TYPES)
        return refuse(ARGUMENT, "there is no type %d", type);
    if (how >= OPS) {
        if (how - OPS >= c->nfactors || c->factor_type[how - OPS] != type)
            return refuse(ARGUMENT, "operation %d does not exist or is of another type than %d", how, type);
        factor = c->factor[how - OPS];
        how = SUM;
    }
    if (how < 0 || root < 0 || root >= c->size || peer < 0 || peer >= c->size)
        return refuse(ARGUMENT, "operation %d, root %d or peer %d", how, root, peer);
    if (kind == SEND && peer == c->rank && !depth)
        return refuse(USAGE, "a send to this rank itself needs its receive in the same group");
    op *o = calloc(1, sizeof *o);
    *o = (op){.comm = c, .send = send, .recv = recv, .factor = factor, .peer = peer};
    o->call.kind = kind;
    o->call.type = type;
    o->call.op = how;
    o->call.root = root;
    o->call.count = count;
    o->number = ++c->number;
    fault_of(o);
    if (o->fault == 1) {
        free(o);
        return refuse(INTERNAL, "a fault was asked for");
    }
    atomic_fetch_add(&c->refs, 1);
    comm_busy(c, 1);
    struct pending *p = group;
    while (p && (p->stream != stream || p->first->comm != c))
        p = p->next;
    if (!p) {
        struct pending **end = &group;
        while (*end)
            end = &(*end)->next;
        p = *end = calloc(1, sizeof *p);
        p->stream = stream;
        p->first = o;
    } else {
        p->last->next = o;
    }
    p->last = o;
    return depth ? OK : start();
}

static int enqueue(comm *c, int kind, const void *send, void *recv, size_t count, int type, int how, int root,
                   int peer, void *stream)
{
    WITHIN(c, take_in(c, kind, send, recv, count, type, how, root, peer, stream));
}

PUBLIC int ncclAllReduce(const void *s, void *r, size_t n, int type, int how, comm *c, void *stream)
{
    return enqueue(c, ALL_REDUCE, s, r, n, type, how, 0, 0, stream);
}
PUBLIC int ncclReduce(const void *s, void *r, size_t n, int type, int how, int root, comm *c, void *stream)
{
    return enqueue(c, REDUCE, s, r, n, type, how, root, 0, stream);
}
PUBLIC int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, comm *c, void *stream)
{
    return enqueue(c, BROADCAST, s, r, n, type, 0, root, 0, stream);
}
PUBLIC int ncclAllGather(const void *s, void *r, size_t n, int type, comm *c, void *stream)
{
    return enqueue(c, ALL_GATHER, s, r, n, type, 0, 0, 0, stream);
}
PUBLIC int ncclReduceScatter(const void *s, void *r, size_t n, int type, int how, comm *c, void *stream)
{
    return enqueue(c, REDUCE_SCATTER, s, r, n, type, how, 0, 0, stream);
}
PUBLIC int ncclSend(const void *s, size_t n, int type, int peer, comm *c, void *stream)
{
    return enqueue(c, SEND, s, NULL, n, type, 0, 0, peer, stream);
}
PUBLIC int ncclRecv(void *r, size_t n, int type, int peer, comm *c, void *stream)
{
    return enqueue(c, RECV, NULL, r, n, type, 0, 0, peer, stream);
}
#ifndef STANDIN_OLD
PUBLIC int ncclAlltoAll(const void *s, void *r, size_t n, int type, comm *c, void *stream)
{
    return enqueue(c, ALL_TO_ALL, s, r, n, type, 0, 0, 0, stream);
}
PUBLIC int ncclGather(const void *s, void *r, size_t n, int type, int root, comm *c, void *stream)
{
    return enqueue(c, GATHER, s, r, n, type, 0, root, 0, stream);
}
PUBLIC int ncclScatter(const void *s, void *r, size_t n, int type, int root, comm *c, void *stream)
{
    return enqueue(c, SCATTER, s, r, n, type, 0, root, 0, stream);
}
#endif

/* What a program in C pays: `calls` all-reduces in place, enqueued one after the other, each with an event behind it
 * or without; seconds. */
PUBLIC double standin_loop(comm *c, void *data, size_t n, int type, int how, void *stream, int calls, int events)
{
    int64_t began;
    void *event;
    standin_event_create(&event, 0);
    began = nanoseconds();
    for (int i = 0; i < calls; i++) {
        if (ncclAllReduce(data, data, n, type, how, c, stream) != OK)
            return -1.0;
        if (events)
            standin_event_record(event, stream);
    }
    began = nanoseconds() - began;
    standin_event_destroy(event);
    return 1e-9 * (double)began;
}

/* The same on a stream that waits for another, which waits for it. */
PUBLIC double standin_loop_apart(comm *c, void *data, size_t n, int type, int how, void *current, void *other, int calls)
{
    int64_t began;
    void *event;
    standin_event_create(&event, 0);
    began = nanoseconds();
    for (int i = 0; i < calls; i++) {
        standin_event_record(event, current);
        standin_stream_wait_event(other, event, 0);
        if (ncclAllReduce(data, data, n, type, how, c, other) != OK)
            return -1.0;
        standin_event_record(event, other);
        standin_stream_wait_event(current, event, 0);
    }
    began = nanoseconds() - began;
    standin_event_destroy(event);
    return 1e-9 * (double)began;
}
