/* x86-64 with AVX2, FMA and F16C (Haswell, Zen and later). */
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

#define HD_ISA "avx2"
#define HD_TABLE hd_table_avx2
#define HD_LANES 16

/* Two registers at a time. For float16 they contain the first and the last eight elements; for
 * bfloat16 the even and the odd ones, which shifts and masks separate and merge without a
 * shuffle. */
typedef struct {
    __m256 x, y;
} hd_vec;

#define HD_PAIR(NAME, INTRINSIC)                                                                   \
    static inline hd_vec NAME(hd_vec a, hd_vec b)                                                  \
    {                                                                                              \
        return (hd_vec){INTRINSIC(a.x, b.x), INTRINSIC(a.y, b.y)};                                 \
    }

HD_PAIR(hd_vadd, _mm256_add_ps)
HD_PAIR(hd_vmul, _mm256_mul_ps)
HD_PAIR(hd_vdiv, _mm256_div_ps)

static inline hd_vec hd_vset(float x) { return (hd_vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

static inline hd_vec hd_load_f16(const void *p)
{
    const __m128i *from = p;
    return (hd_vec){_mm256_cvtph_ps(_mm_loadu_si128(from)),
                    _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}

static inline void hd_store_f16(void *p, hd_vec value)
{
    const int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m128i low = _mm256_cvtps_ph(value.x, nearest);
    const __m128i high = _mm256_cvtps_ph(value.y, nearest);
    const __m256i h = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    const __m256i magnitude = _mm256_and_si256(h, _mm256_set1_epi16(0x7FFF));
    const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7C00));
    _mm256_storeu_si256(p, _mm256_blendv_epi8(h, _mm256_set1_epi16(0x7E00), nan));
}

static inline hd_vec hd_load_bf16(const void *p)
{
    const __m256i pairs = _mm256_loadu_si256(p);
    const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000u));
    return (hd_vec){_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(odd)};
}

/* The bfloat16 ends up in the upper half of each 32-bit lane, above leftover bits. */
static inline __m256i round_bf16(__m256 value)
{
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF));
    const __m256 rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, half));
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_castps_si256(_mm256_blendv_ps(rounded, quiet, nan));
}

static inline void hd_store_bf16(void *p, hd_vec value)
{
    const __m256i even = _mm256_srli_epi32(round_bf16(value.x), 16);
    _mm256_storeu_si256(p, _mm256_blend_epi16(even, round_bf16(value.y), 0xAA));
}

#include "hd_kernels_body.h"

#else
#include "hd_kernels_impl.h"

const hd_kernel_table *hd_table_avx2(void) { return NULL; }
#endif
