/* The flight recorder: the last operations of this process, always on. They lie in a ring in a file
 * of memory, so that other processes of the node can read them, also after this one has crashed
 * (hd_recorder_file.c). hpcdist/recordings/read.py reads the format.
 *
 * An operation of a few bytes writes one cache line, and reads one clock: when it is called. It
 * takes no lock: it is noted under the GIL, and only its own thread adds to it. Its end has a time
 * of its own only if it waited or moved much; otherwise it took less than a wait spins (50 us). */
#ifndef HD_RECORDER_H
#define HD_RECORDER_H

#include <stdint.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#define HD_REC_VERSION 3
#define HD_REC_LOG (256 << 10)   /* bytes for tables, names, groups and lines */
#define HD_REC_LINES (192 << 10) /* of these at most for lines: groups have the rest */
#define HD_REC_STACKS (32 << 10) /* bytes for the stacks of this process */
#define HD_REC_MUCH 16384        /* elements: the steps of such an operation are timed */

#define HD_REC_STATES(X)                                                                           \
    X(QUEUED, "queued")                                                                            \
    X(RUNNING, "running")                                                                          \
    X(DONE, "done")                                                                                \
    X(FAILED, "failed")

enum hd_rec_state {
    HD_REC_NONE = 0,
#define X(NAME, text) HD_REC_##NAME,
    HD_REC_STATES(X)
#undef X
};

/* One operation. The second half is valid if `wide`, each of its times if it is not 0. */
typedef struct hd_record {
    uint64_t id;  /* its number in this process, from 1 on; 0 while it is being written */
    int64_t call; /* ticks: when it was called */
    int64_t end;  /* ticks, 0: not timed */
    int64_t count;
    uint32_t seq, site;
    uint16_t name, group;
    int32_t peer; /* of a message, or the root; -1: none */
    int32_t tag;
    int8_t kind, dtype, redop, ndim;
    uint8_t state, code, wide, queued;
    uint32_t unused;
    /* -- the second half */
    int64_t start;       /* ticks: the lane has begun it */
    int64_t agreed;      /* ticks: all ranks have arrived, data begins to move */
    int64_t in_n, out_n; /* elements of all inputs and of all outputs */
    int64_t dims[4];
} __attribute__((aligned(64))) hd_record;

_Static_assert(sizeof(hd_record) == 128, "two cache lines");

/* A moment on three clocks. */
typedef struct hd_rec_clock {
    int64_t ticks, mono, real; /* ns of CLOCK_MONOTONIC, ns since 1970 */
} hd_rec_clock;

/* What has become of a job that goes on when a rank dies. */
typedef struct hd_rec_survival {
    uint32_t waits;  /* this process is a spare: its rank is the number of ranks or more */
    uint32_t spares; /* how many there are */
    uint32_t deaths, recoveries;
    int64_t took; /* ns: all recoveries, where this process was a rank */
    int64_t last; /* ns since 1970: when the last one ended */
} hd_rec_survival;

/* The first page of the file. */
typedef struct hd_rec_head {
    char magic[8];
    uint32_t version, head_bytes, record_bytes, records;
    uint32_t log_bytes, stack_bytes, pid, uid;
    int32_t rank, size;          /* of the job, as it has them now */
    uint64_t job;                /* the same on all ranks; that of its first groups */
    hd_rec_clock first, last[2]; /* last[turn & 1] is complete: the watchdog writes the other one */
    uint32_t turn;
    uint32_t log_used;
    uint32_t left; /* the process has ended in order */
    uint32_t ask,
        answered;    /* another process asks for stacks; up to which question they are there */
    uint32_t native; /* the question is for native stacks too, which interrupts a thread */
    uint32_t stack_used;
    int64_t stack_real; /* ns since 1970 */
    char host[64], launch[64], program[192];
    hd_rec_survival survival;
} hd_rec_head;

struct hd_recorder {
    hd_record *ring; /* NULL: off */
    uint64_t mask, next;
    uint32_t failures; /* operations that failed; if two do at once, one may be lost */
    uint32_t drops;    /* how often lines have been dropped: their numbers are void */
    hd_rec_head *head;
    char *log, *stacks;
    size_t bytes;
};
extern struct hd_recorder hd_rec;

/* A cheap clock, which all cores agree on: 20 ns here, where clock_gettime takes 43. */
int64_t hd_rec_slow_ticks(void);
extern int hd_rec_tsc; /* the processor's counter runs evenly */
static inline int64_t hd_rec_ticks(void)
{
#if defined(__x86_64__)
    if (__builtin_expect(hd_rec_tsc, 1))
        return (int64_t)__rdtsc();
    return hd_rec_slow_ticks();
#elif defined(__aarch64__)
    int64_t t;
    __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(t));
    return t;
#else
    return hd_rec_slow_ticks();
#endif
}

void hd_rec_clock_now(hd_rec_clock *c);
void hd_rec_clock_start(void);
void hd_rec_beat(void); /* by the watchdog: this process lives, and how its clocks run */

/* Begins the log of a new file with the meaning of all numbers that a build of hpcdist fixes: of
 * kinds, states, codes, element types and operations. */
void hd_rec_tables(void);

/* What records refer to by number: written once. 0: there is no room for more, or it is off. */
uint16_t hd_rec_name(const char *api);
uint16_t hd_rec_group(const hd_comm *c, const int32_t *world); /* world: the members' ranks */
uint16_t hd_rec_group_of(int rank, int size, uint64_t uid, const char *name, const int32_t *world);
void hd_rec_forget(uint16_t group); /* it is gone: where room is needed, so is its name */
/* With the GIL. It may drop older lines: see `drops`. */
uint32_t hd_rec_site(int line, const char *function, const char *file);

void hd_rec_begin_wide(hd_record *r, const hd_job *j);

/* With the GIL, which makes the numbers unique. */
static inline void hd_rec_begin(hd_job *j, int queued)
{
    uint64_t id;
    hd_record *r;
    if (!hd_rec.ring)
        return;
    id = ++hd_rec.next;
    r = &hd_rec.ring[id & hd_rec.mask];
    __atomic_store_n(&r->id, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    r->call = hd_rec_ticks();
    r->end = 0;
    r->count = j->count;
    r->seq = j->seq;
    r->site = j->site_id;
    r->name = j->name_id;
    r->group = j->comm->rec_group;
    r->peer = j->kind >= HD_SEND ? j->message.peer : j->root;
    r->tag = j->message.tag;
    r->kind = (int8_t)j->kind;
    r->dtype = (int8_t)j->dtype;
    r->redop = (int8_t)j->redop;
    r->ndim = (int8_t)j->ndim;
    r->state = queued ? HD_REC_QUEUED : HD_REC_RUNNING;
    r->code = HD_OK;
    r->queued = (uint8_t)queued;
    r->wide = queued || j->ndim != 1 || j->nin + j->nout > 1 || j->count >= HD_REC_MUCH;
    if (r->wide)
        hd_rec_begin_wide(r, j);
    __atomic_store_n(&r->id, id, __ATOMIC_RELEASE);
    j->rec = id;
    __builtin_prefetch(&hd_rec.ring[(id + 1) & hd_rec.mask], 1);
}

/* Its record, unless it has been overwritten. (If 1,000 others are noted just while this one is
 * written to, one of them shows a wrong time.) */
static inline hd_record *hd_rec_of(const hd_job *j)
{
    hd_record *r = j->rec ? &hd_rec.ring[j->rec & hd_rec.mask] : NULL;
    return r && r->id == j->rec ? r : NULL;
}

/* The lane's thread begins it. */
static inline void hd_rec_start(const hd_job *j)
{
    hd_record *r = j->inline_ ? NULL : hd_rec_of(j);
    if (r) {
        r->start = hd_rec_ticks();
        __atomic_store_n(&r->state, HD_REC_RUNNING, __ATOMIC_RELEASE);
    }
}

/* All ranks have arrived. */
static inline void hd_rec_agreed(const hd_job *j)
{
    hd_record *r = hd_rec_of(j);
    if (r && r->wide && (j->begun || j->count >= HD_REC_MUCH))
        r->agreed = hd_rec_ticks();
}

static inline void hd_rec_end(hd_job *j)
{
    hd_record *r = hd_rec_of(j);
    int code = j->code;
    if (!r)
        return;
    if (j->kind == HD_RECV && j->message.source >= 0)
        r->peer = j->message.source; /* of a message from any rank */
    /* `begun` is set by a wait that has looked at a clock. */
    if (j->refusal.why && !j->code)
        code = j->refusal.code ? j->refusal.code : HD_ERR_MISMATCH;
    if (j->begun || code || !j->comm->page || !(j->checked.carried || j->kind == HD_BARRIER))
        r->end = hd_rec_ticks();
    r->code = (uint8_t)code;
    __atomic_store_n(&r->state, code ? HD_REC_FAILED : HD_REC_DONE, __ATOMIC_RELEASE);
    j->rec = 0;
    if (__builtin_expect(code != HD_OK && code != HD_ERR_CLOSED && code != HD_ERR_INTERRUPT, 0))
        hd_rec.failures++; /* the watchdog writes a copy of the file */
}

#endif
