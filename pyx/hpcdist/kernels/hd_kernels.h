/* Reductions and scalings over plain memory, in several instruction sets, the best chosen at run
 * time. Pure C: no MPI, no Python; every function may be called from any thread.
 *
 * Promises, the same in every instruction set:
 *   - a op b and b op a are the same bits, so ranks that combine in another order still agree;
 *   - the same inputs give the same bits whichever instruction set is chosen;
 *   - a NaN result of a float operation is always the positive quiet NaN without payload
 *     (0x7E00, 0x7FC0, 0x7FC00000, 0x7FF8000000000000);
 *   - MIN and MAX: NaN wins, and -0 is less than +0;
 *   - float16 and bfloat16 are computed in float32 and rounded once, to nearest even;
 *   - integers wrap; any nonzero byte of a bool counts as true, results are 0 or 1;
 *   - pointers need no alignment; buffers must not overlap except where said. */
#ifndef HD_KERNELS_H
#define HD_KERNELS_H

#include <stdint.h>

#include "hd_types.h"

/* The kernel of the chosen instruction set, or NULL when the combination is not supported
 * (hd_op_refusal tells why). AVG and PREMUL_SUM give the kernel of SUM: their scaling is a separate
 * step, below. */
HD_LOCAL hd_reduce_fn hd_reduce_kernel(int op, int dtype);

/* buf[i] /= divisor in place, for AVG. divisor >= 1. Integers truncate as in C; float16 and
 * bfloat16 divide in float32; complex numbers by component. Returns 0, or -1 and touches nothing
 * for a dtype without AVG or a divisor below 1. */
HD_LOCAL int hd_scale_div(void *buf, int64_t n, int dtype, int64_t divisor);

/* dst[i] = src[i] * factor, for PREMUL_SUM; dst may be src itself. The factor is first rounded to
 * float32 for float32, complex64, float16 and bfloat16, which multiply in float32. Returns 0, or -1
 * and touches nothing for a dtype without PREMUL_SUM. */
HD_LOCAL int hd_scale_mul(void *dst, const void *src, int64_t n, int dtype, double factor);

/* Index of the first NaN among n elements; -1: there is none, as in every dtype without NaNs. A
 * complex number is one if either of its components is. */
HD_LOCAL int64_t hd_find_nan(const void *in, int64_t n, int dtype);

/* "avx512", "avx2", "neon" or "scalar": what is in use. The first use of any kernel chooses:
 * HPCDIST_SIMD if it names an instruction set this machine has, else the best one. */
HD_LOCAL const char *hd_kernels_isa(void);

/* For tests: uses this instruction set from now on ("auto": choose again). Returns 0, or -1 without
 * a change if this build or processor does not have it. */
HD_LOCAL int hd_kernels_force(const char *isa);

/* 1 if hd_kernels_force(isa) would accept the name. */
HD_LOCAL int hd_kernels_available(const char *isa);

/* 1 if HPCDIST_SIMD asks for something this build or processor does not have, so that it was
 * ignored. */
HD_LOCAL int hd_kernels_env_ignored(void);

#endif
