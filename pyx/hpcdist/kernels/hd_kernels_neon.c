/* 64-bit Arm; Advanced SIMD is part of its base, conversions of float16 included. */
#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>

#define HD_ISA "neon"
#define HD_TABLE hd_table_neon
#define HD_LANES 4

typedef float32x4_t hd_vec;

#define hd_vset(x) vdupq_n_f32(x)
#define hd_vadd(a, b) vaddq_f32(a, b)
#define hd_vmul(a, b) vmulq_f32(a, b)
#define hd_vdiv(a, b) vdivq_f32(a, b)

/* Through bytes: vld1_u8 asks for no alignment. */
static inline uint16x4_t load_u16x4(const void *p)
{
    return vreinterpret_u16_u8(vld1_u8((const uint8_t *)p));
}

static inline void store_u16x4(void *p, uint16x4_t h)
{
    vst1_u8((uint8_t *)p, vreinterpret_u8_u16(h));
}

static inline uint32x4_t nan_lanes(uint32x4_t bits)
{
    return vcgtq_u32(vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF)), vdupq_n_u32(0x7F800000));
}

static inline hd_vec hd_load_f16(const void *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(load_u16x4(p)));
}

static inline void hd_store_f16(void *p, hd_vec value)
{
    const uint16x4_t h = vreinterpret_u16_f16(vcvt_f16_f32(value));
    const uint16x4_t nan = vmovn_u32(nan_lanes(vreinterpretq_u32_f32(value)));
    store_u16x4(p, vbsl_u16(nan, vdup_n_u16(0x7E00), h));
}

static inline hd_vec hd_load_bf16(const void *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(load_u16x4(p), 16));
}

static inline void hd_store_bf16(void *p, hd_vec value)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t half = vaddq_u32(odd, vdupq_n_u32(0x7FFF));
    const uint16x4_t h = vshrn_n_u32(vaddq_u32(bits, half), 16);
    const uint16x4_t nan = vmovn_u32(nan_lanes(bits));
    store_u16x4(p, vbsl_u16(nan, vdup_n_u16(0x7FC0), h));
}

#include "hd_kernels_body.h"

#else
#include "hd_kernels_impl.h"

const hd_kernel_table *hd_table_neon(void) { return NULL; }
#endif
