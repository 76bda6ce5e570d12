/* Clock, waiting, threads, hashing and error text: the base of every other file of the engine. */
#ifndef HD_BASE_H
#define HD_BASE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes between what two processes write: a cache line, or the largest of an architecture (Power
 * 128; most of Arm 64, some 128). */
#if defined(__x86_64__) || defined(__i386__)
#define HD_LINE 64
#else
#define HD_LINE 128
#endif
#define HD_TEXT 2048    /* bytes of an error text */
#define HD_REC_PATH 160 /* bytes of the path of a flight recorder's file */

/* How a call ended, with the recordings' word for it; errors.pxi maps each code to an exception. */
#define HD_CODES(X)                                                                                \
    X(OK, "")                                                                                      \
    X(ERR_BACKEND, "MPI error")     /* MPI returned an error                */                     \
    X(ERR_MISMATCH, "mismatch")     /* ranks disagree about the call        */                     \
    X(ERR_TIMEOUT, "timeout")       /* a peer did not arrive in time        */                     \
    X(ERR_FAILED, "rank failed")    /* a peer has left the job              */                     \
    X(ERR_MEMORY, "no memory")      /* no memory for a staging buffer       */                     \
    X(ERR_UNDONE, "undone")         /* a rank stopped between the parts     */                     \
    X(ERR_NAN, "NaN")               /* a rank's input contains a NaN        */                     \
    X(ERR_CLOSED, "closed")         /* the group was destroyed meanwhile    */                     \
    X(ERR_INTERRUPT, "interrupted") /* a Python signal handler raised: the exception is set */

enum hd_code {
#define X(NAME, text) HD_##NAME,
    HD_CODES(X)
#undef X
};

/* Nanoseconds of CLOCK_MONOTONIC: one clock for all processes of a node. */
int64_t hd_uptime(void);
/* The same, less the time for which this process was stopped: for its own deadlines. A scheduler
 * may suspend a job for longer than its timeouts, and its ranks are not to blame for that. Stops of
 * less than a second count. */
int64_t hd_now(void);
/* A thread begins (1) or ends (-1) to call hd_now() several times a second, whatever the others do:
 * while there is one, a second without a look at the clock was a stop. */
void hd_now_watched(int more);

/* Converts seconds to nanoseconds. HD_NEVER means no limit: for a negative number, NaN, or more
 * than the clock counts. */
#define HD_NEVER INT64_MAX
int64_t hd_ns(double seconds);
/* The moment `ns` after another moment of hd_now(), or HD_NEVER. */
int64_t hd_later(int64_t from, int64_t ns);
/* The moment that many seconds from now, or HD_NEVER. */
int64_t hd_until(double seconds);

/* Tells the processor that this is a spin loop. */
static inline void hd_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* A polite wait loop: spins for a short while, then yields, then naps.
 *
 *   hd_waiter w;
 *   hd_waiter_init(&w, spin, timeout_s);
 *   while (!done) { int ev = hd_waiter_step(&w); ... }
 *
 * The limit counts from the first look at the clock. Where the wait is part of something longer,
 * `clock` points at the start of that, and the limit counts from there; a start of 0 has not
 * begun, and begins here. */
typedef struct hd_waiter {
    unsigned n;        /* steps so far */
    unsigned spins;    /* steps before the first yield */
    int64_t start;     /* ns, 0 until the spinning is over: a short wait reads no clock */
    int64_t own;       /* ns, the clock of a wait that is part of nothing */
    int64_t *clock;    /* ns, NULL: its own */
    int64_t limit;     /* ns; HD_NEVER: none */
    int64_t next_hook; /* ns */
    int naps;          /* set after init: sleep in place of yielding, see hd_nap */
    /* Set after init, or NULL: where this thread shows its core (hd_core), and where the thread it
     * waits for does. On one core, only a yield lets that thread run. */
    uint32_t *core;
    const uint32_t *their_core;
} hd_waiter;

enum { HD_WAIT_MORE = 0, HD_WAIT_CLOCK = 1, HD_WAIT_HOOK = 2, HD_WAIT_EXPIRED = 4 };

/* The core that this thread runs on, from 1 on; 0: not known. With glibc 2.35 it costs a load. */
uint32_t hd_core(void);

void hd_waiter_init(hd_waiter *w, int spin, double timeout_s);
/* One step. Returns a set of flags: HD_WAIT_CLOCK when the time was read (a moment to make MPI
 * progress), HD_WAIT_HOOK every 50 ms (a moment to check for signals), HD_WAIT_EXPIRED past the
 * limit. */
int hd_waiter_step(hd_waiter *w);
double hd_waiter_elapsed(const hd_waiter *w); /* seconds on the clock that the limit is for */

/* Short sleeps between looks at MPI, on a core that a computing thread wants. A thread that sleeps
 * is scheduled as soon as it wakes; one that yields waits until the other has used up its time
 * slice, 3 ms on Linux 6.6 and newer. The naps grow with the time waited, from 20 to 500 us: each
 * costs both threads a few microseconds. Initialize with zeros. */
typedef struct hd_nap {
    int64_t start; /* ns */
} hd_nap;
void hd_nap_step(hd_nap *n);

/* As pthread_create, without signals but for its own faults: Python's belong to the main thread. 0,
 * or why there is none. */
int hd_thread_start(pthread_t *thread, void *(*runs)(void *), void *arg);
/* Waits for its end. 0: not within 3 s, because it is in a long call of MPI's. */
int hd_thread_join(pthread_t thread);

/* Copies text that others may read or write meanwhile, word by word: each word is either old or
 * new. Both buffers are aligned to 8 bytes where they are shared, and `bytes` is a multiple of
 * 8. */
void hd_put_words(char *shared, const char *from, size_t bytes);
void hd_get_words(char *to, const char *shared, size_t bytes);

/* Bytes, rounded up to pages of the least size that systems have. */
static inline size_t hd_whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
/* Zeros, which take memory only where they are used; NULL: there is none. */
void *hd_pages(size_t bytes);
void hd_pages_free(void *at, size_t bytes);

static inline uint64_t hd_mix(uint64_t h, uint64_t v)
{
    h ^= v + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2);
    h *= 0xbf58476d1ce4e5b9ULL;
    return h ^ (h >> 31);
}
uint64_t hd_hash_text(const char *s);
uint64_t hd_random64(void);

/* Text that grows by printf and never overflows; what does not fit is cut and marked "...". */
typedef struct hd_text {
    char *at;
    size_t room, used;
} hd_text;
void hd_text_init(hd_text *t, char *buffer, size_t room);
void hd_say(hd_text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The last sentence: where it does not fit, the text before it is cut. */
void hd_say_last(hd_text *t, const char *sentence);

/* As much of a text as fits, in whole characters of UTF-8. */
void hd_copy_text(char *to, size_t room, const char *from);

#endif
