/* What the stress programs share: numbers by chance, memory of all ranks, a barrier of their own. */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

typedef struct chance {
    uint64_t state;
} chance;

static inline chance chance_of(uint64_t seed, uint64_t stream)
{
    return (chance){(seed * 0x9e3779b97f4a7c15ULL ^ (stream + 1) * 0xbf58476d1ce4e5b9ULL) | 1};
}

static inline uint64_t draw(chance *c, uint64_t n) /* 0 to n - 1 */
{
    c->state ^= c->state << 13;
    c->state ^= c->state >> 7;
    c->state ^= c->state << 17;
    return (c->state >> 11) % n;
}

static inline void nap_us(long us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

/* Zeroed memory that children share. */
static inline void *shared_memory(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return at;
}

/* A barrier for threads and processes, without a deadline: whoever ends leaves it to be killed. */
typedef struct meeting {
    uint32_t came, round;
} meeting;

static inline void meet(meeting *m, uint32_t n)
{
    const uint32_t round = __atomic_load_n(&m->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&m->came, 1, __ATOMIC_ACQ_REL) == n) {
        __atomic_store_n(&m->came, 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&m->round, 1, __ATOMIC_RELEASE);
        return;
    }
    for (int k = 0; __atomic_load_n(&m->round, __ATOMIC_ACQUIRE) == round; k++)
        if (k > 100)
            nap_us(20);
}

#endif
