/* Chooses the instruction set and hands out its kernels. */
#include <stdlib.h>
#include <strings.h>

#include "hd_kernels.h"
#include "hd_kernels_impl.h"
#include "hd_types.h"

#define NAN_BLOCK                                                                                  \
    4096 /* elements that are looked at together, before it is asked which is a NaN                \
          */

#if defined(__x86_64__)
#include <cpuid.h>

static int has_f16c(void)
{
    /* Asked of the processor itself: __builtin_cpu_supports("f16c") needs GCC 11. */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

static int runs_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static int runs_avx512(void)
{
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static int prefers_avx512(void)
{
    /* VBMI2 came with Ice Lake and Zen 4. Older processors lower their clock for 512-bit work,
     * which the program around us pays for; AVX2 already saturates their memory. */
    return runs_avx512() && __builtin_cpu_supports("avx512vbmi2");
}
#endif

static const hd_kernel_table *find(const char *isa)
{
    if (strcasecmp(isa, "scalar") == 0)
        return hd_table_scalar();
#if defined(__x86_64__)
    if (strcasecmp(isa, "avx2") == 0 && runs_avx2())
        return hd_table_avx2();
    if (strcasecmp(isa, "avx512") == 0 && runs_avx512())
        return hd_table_avx512();
#endif
    /* Every 64-bit Arm processor has NEON. */
    if (strcasecmp(isa, "neon") == 0)
        return hd_table_neon();
    return NULL;
}

static const hd_kernel_table *find_best(void)
{
    const hd_kernel_table *table = NULL;
#if defined(__x86_64__)
    if (prefers_avx512())
        table = hd_table_avx512();
    if (!table)
        table = find("avx2");
#else
    table = find("neon");
#endif
    return table ? table : hd_table_scalar();
}

static const char *wanted_isa(void)
{
    const char *isa = getenv("HPCDIST_SIMD");
    return isa && *isa && strcasecmp(isa, "auto") != 0 ? isa : NULL;
}

static const hd_kernel_table *choose(void)
{
    const char *wanted = wanted_isa();
    const hd_kernel_table *table = wanted ? find(wanted) : NULL;
    return table ? table : find_best();
}

/* Threads that race here store the same pointer, so no lock is needed. */
static const hd_kernel_table *current;

static const hd_kernel_table *table_in_use(void)
{
    const hd_kernel_table *table = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
    if (!table) {
        table = choose();
        __atomic_store_n(&current, table, __ATOMIC_RELEASE);
    }
    return table;
}

hd_reduce_fn hd_reduce_kernel(int op, int dtype)
{
    return hd_op_supported(op, dtype) ? table_in_use()->reduce[op][dtype] : NULL;
}

int hd_scale_div(void *buf, int64_t n, int dtype, int64_t divisor)
{
    if (!hd_op_supported(HD_AVG, dtype) || divisor < 1)
        return -1;
    table_in_use()->div[dtype](buf, n, divisor);
    return 0;
}

int hd_scale_mul(void *dst, const void *src, int64_t n, int dtype, double factor)
{
    if (!hd_op_supported(HD_PREMUL_SUM, dtype))
        return -1;
    table_in_use()->mul[dtype](dst, src, n, factor);
    return 0;
}

int64_t hd_find_nan(const void *in, int64_t n, int dtype)
{
    const hd_nan_fn has_nan =
        dtype >= 0 && dtype < HD_NDTYPES ? table_in_use()->has_nan[dtype] : NULL;
    const int64_t size = (int64_t)hd_itemsize(dtype);
    const char *at = in;
    if (!has_nan)
        return -1;
    for (int64_t i = 0, step; i < n; i += step) {
        step = n - i < NAN_BLOCK ? n - i : NAN_BLOCK;
        if (!has_nan(at + i * size, step))
            continue;
        while (!has_nan(at + i * size, 1))
            i++;
        return i;
    }
    return -1;
}

const char *hd_kernels_isa(void) { return table_in_use()->isa; }

int hd_kernels_available(const char *isa)
{
    return strcasecmp(isa, "auto") == 0 || find(isa) != NULL;
}

int hd_kernels_force(const char *isa)
{
    const hd_kernel_table *table = strcasecmp(isa, "auto") == 0 ? choose() : find(isa);
    if (!table)
        return -1;
    __atomic_store_n(&current, table, __ATOMIC_RELEASE);
    return 0;
}

int hd_kernels_env_ignored(void)
{
    const char *wanted = wanted_isa();
    return wanted && !find(wanted);
}
