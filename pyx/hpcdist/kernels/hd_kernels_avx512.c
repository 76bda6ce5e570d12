/* x86-64 with AVX-512 F, BW, VL and DQ (Skylake-SP, Zen 4 and later). */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>

#define HD_ISA "avx512"
#define HD_TABLE hd_table_avx512
#define HD_LANES 16

typedef __m512 hd_vec;

#define hd_vset(x) _mm512_set1_ps(x)
#define hd_vadd(a, b) _mm512_add_ps(a, b)
#define hd_vmul(a, b) _mm512_mul_ps(a, b)
#define hd_vdiv(a, b) _mm512_div_ps(a, b)

static inline hd_vec hd_load_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline void hd_store_f16(void *p, hd_vec value)
{
    const __m256i h = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    _mm256_storeu_si256((__m256i *)p, _mm256_mask_mov_epi16(h, nan, _mm256_set1_epi16(0x7E00)));
}

static inline hd_vec hd_load_bf16(const void *p)
{
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* Integer rounding, not the instruction of AVX512_BF16: that one flushes denormals to zero. */
static inline void hd_store_bf16(void *p, hd_vec value)
{
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i h = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(h));
}

#include "hd_kernels_body.h"

#else
#include "hd_kernels_impl.h"

const hd_kernel_table *hd_table_avx512(void) { return NULL; }
#endif
