/* Between the dispatcher (hd_kernels.c) and the instruction sets (hd_kernels_*.c); no other file
 * includes it. */
#ifndef HD_KERNELS_IMPL_H
#define HD_KERNELS_IMPL_H

#include <stdint.h>

#include "hd_types.h"

#if defined(__FAST_MATH__)
#error "hpcdist's reductions promise IEEE results: compile without -ffast-math / -Ofast"
#endif

typedef void (*hd_div_fn)(void *buf, int64_t n, int64_t divisor);
typedef void (*hd_mul_fn)(void *dst, const void *src, int64_t n, double factor);
typedef int (*hd_nan_fn)(const void *in, int64_t n);

/* Everything that one instruction set offers; NULL where a combination is not supported. */
typedef struct {
    const char *isa;
    hd_reduce_fn reduce[HD_NOPS][HD_NDTYPES];
    hd_div_fn div[HD_NDTYPES];
    hd_mul_fn mul[HD_NDTYPES];
    hd_nan_fn has_nan[HD_NDTYPES];
} hd_kernel_table;

/* NULL when this build has no such instruction set: a source file compiled without the flags it
 * needs still defines its function. Only call the kernels of a table whose instructions the
 * processor has. */
HD_LOCAL const hd_kernel_table *hd_table_scalar(void);
HD_LOCAL const hd_kernel_table *hd_table_avx2(void);
HD_LOCAL const hd_kernel_table *hd_table_avx512(void);
HD_LOCAL const hd_kernel_table *hd_table_neon(void);

#endif
