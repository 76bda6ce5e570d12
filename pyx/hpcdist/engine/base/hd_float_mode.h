/* How the calling thread's floating-point unit rounds, and whether it takes denormals for zero. A
 * program sets that by thread (torch.set_flush_denormal, -ffast-math). Ranks that each add for
 * themselves would get different sums, and so would a call that is queued now and inline the next
 * time. */
#ifndef HD_FLOAT_MODE_H
#define HD_FLOAT_MODE_H

#include <stdint.h>

/* The bits that were set; 0, nearly always: none, and nothing was written. */
typedef uint64_t hd_float_mode;

#if defined(__x86_64__)

#define HD_FLOAT_BITS 0xe040u /* MXCSR: flush to zero, rounding, denormals are zero */

static inline hd_float_mode hd_float_mode_plain(void)
{
    const uint32_t word = __builtin_ia32_stmxcsr();
    if (word & HD_FLOAT_BITS)
        __builtin_ia32_ldmxcsr(word & ~HD_FLOAT_BITS);
    return word & HD_FLOAT_BITS;
}

static inline void hd_float_mode_restore(hd_float_mode mode)
{
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | (uint32_t)mode);
}

#elif defined(__aarch64__)

#define HD_FLOAT_BITS 0x1c80001u /* FPCR: FZ, rounding, FZ16, FIZ */

static inline hd_float_mode hd_float_mode_plain(void)
{
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    if (word & HD_FLOAT_BITS)
        __asm__ volatile("msr fpcr, %0" : : "r"(word & ~(uint64_t)HD_FLOAT_BITS));
    return word & HD_FLOAT_BITS;
}

static inline void hd_float_mode_restore(hd_float_mode mode)
{
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    __asm__ volatile("msr fpcr, %0" : : "r"(word | mode));
}

#else

static inline hd_float_mode hd_float_mode_plain(void) { return 0; }
static inline void hd_float_mode_restore(hd_float_mode mode) { (void)mode; }

#endif

#endif
