/* What the ranks contribute to a reduction, and whether its result is the right one. */
#ifndef SUMS_H
#define SUMS_H

#include <stdint.h>

/* No two operations have the same sum, so an old one is no right one. */
static inline int64_t part(int64_t op, int rank, int64_t i) { return op * 1000003 + rank * 7 + i * (rank + 1); }

static inline void contribute(int64_t *to, int64_t op, int rank, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = part(op, rank, i);
}

static inline void add_up(const void *one, const void *other, void *result, int64_t n)
{
    const int64_t *a = one, *b = other;
    int64_t *sum = result;
    for (int64_t i = 0; i < n; i++)
        sum[i] = a[i] + b[i];
}

static inline int64_t total(int64_t op, int ranks, int64_t i)
{
    int64_t all = 0;
    for (int r = 0; r < ranks; r++)
        all += part(op, r, i);
    return all;
}

static inline int right(const int64_t *data, int64_t op, int ranks, int64_t n, int factor)
{
    for (int64_t i = 0; i < n; i++)
        if (data[i] != total(op, ranks, i) * factor)
            return 0;
    return 1;
}

#endif
