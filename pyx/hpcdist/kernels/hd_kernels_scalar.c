/* Plain C for every processor; conversions of 16-bit floats by integer arithmetic. */
#include <stdint.h>
#include <string.h>

#define HD_ISA "scalar"
#define HD_TABLE hd_table_scalar
#define HD_LANES 1

typedef float hd_vec;

static inline uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t load_u16(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return h;
}

/* Computes every case and picks one by a mask: with ?: compilers branch around the arithmetic, and
 * a loop with branches does not vectorise. Signed numbers, because SSE2 compares no others. */
static inline int32_t pick(int condition, int32_t yes, int32_t no)
{
    const int32_t mask = -condition;
    return (yes & mask) | (no & ~mask);
}

static inline hd_vec hd_load_f16(const void *p)
{
    const uint32_t h = load_u16(p), sign = (h & 0x8000u) << 16;
    const int32_t magnitude = (int32_t)((h & 0x7FFFu) << 13);
    /* Move the exponent's bias from 15 to 127; exponent 31 (infinity, NaN) becomes 255. */
    const int32_t normal = magnitude + pick(magnitude < 0x0F800000, 0x38000000, 0x70000000);
    /* Zero and denormals are multiples of 2^-24: write them below the leading one of 2^-14, then
     * subtract that. No float32 denormal occurs, so flush-to-zero modes do not matter. */
    const float behind_one = from_bits((uint32_t)magnitude + 0x38800000u);
    const int32_t small = (int32_t)to_bits(behind_one - from_bits(0x38800000u));
    return from_bits(sign | (uint32_t)pick(magnitude < 0x00800000, small, normal));
}

static inline void hd_store_f16(void *p, hd_vec value)
{
    const uint32_t bits = to_bits(value);
    const int32_t sign = (int32_t)((bits >> 16) & 0x8000u);
    const int32_t magnitude = (int32_t)(bits & 0x7FFFFFFFu);
    /* Rebias; add just under half of the last kept bit, or half if that bit is odd. */
    const int32_t odd = (magnitude >> 13) & 1;
    const int32_t normal = (magnitude - 0x38000000 + 0x0FFF + odd) >> 13;
    /* Below 2^-14 the result counts in units of 2^-24, the last bit of 0.5: let an addition round
     * there. */
    const int32_t small = (int32_t)to_bits(from_bits((uint32_t)magnitude) + 0.5f) - 0x3F000000;
    int32_t h = pick(magnitude < 0x38800000, small, normal);
    h = pick(magnitude < 0x47800000, h, 0x7C00) | sign; /* 2^16 and more: infinity */
    h = pick(magnitude > 0x7F800000, 0x7E00, h);        /* NaN: always this one */
    const uint16_t out = (uint16_t)h;
    memcpy(p, &out, sizeof out);
}

static inline hd_vec hd_load_bf16(const void *p) { return from_bits((uint32_t)load_u16(p) << 16); }

static inline void hd_store_bf16(void *p, hd_vec value)
{
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint16_t out = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (uint16_t)rounded;
    memcpy(p, &out, sizeof out);
}

static inline hd_vec hd_vset(float x) { return x; }

static inline hd_vec hd_vadd(hd_vec a, hd_vec b) { return a + b; }

static inline hd_vec hd_vmul(hd_vec a, hd_vec b) { return a * b; }

static inline hd_vec hd_vdiv(hd_vec a, hd_vec b) { return a / b; }

#include "hd_kernels_body.h"
