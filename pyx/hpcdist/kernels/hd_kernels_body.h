/* The kernels themselves, included once by each instruction set's file, which first defines
 *
 *   HD_ISA          its name, a string
 *   HD_TABLE        the function that hands out its table, e.g. hd_table_avx2
 *   HD_LANES        float16/bfloat16 elements converted at once
 *   hd_vec          HD_LANES floats
 *   hd_load_f16, hd_load_bf16, hd_store_f16, hd_store_bf16, hd_vadd, hd_vmul, hd_vdiv, hd_vset
 *
 * Loops over whole types are plain C: compilers turn them into the instructions their file is
 * compiled for, and they mean the same everywhere. Only the conversions of 16-bit floats need
 * intrinsics. No expression here has the form a * b + c, so a compiler with FMA has nothing to
 * contract and the instruction sets agree to the last bit. Stores are ordinary ones: streaming
 * stores measured 2 to 10 times slower, because MPI sends the result on at once. */
#include <string.h>

#include "hd_kernels_impl.h"

/* MPI passes chunks of its own buffers and of the user's, at any address. */
#define HD_UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t hd_u8 HD_UNALIGNED;
typedef int8_t hd_i8 HD_UNALIGNED;
typedef uint16_t hd_u16 HD_UNALIGNED;
typedef int16_t hd_i16 HD_UNALIGNED;
typedef uint32_t hd_u32 HD_UNALIGNED;
typedef int32_t hd_i32 HD_UNALIGNED;
typedef uint64_t hd_u64 HD_UNALIGNED;
typedef int64_t hd_i64 HD_UNALIGNED;

/* Tells the compiler that no iteration depends on another. `restrict` cannot: the result may
 * replace an operand. */
#ifdef __clang__
#define HD_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HD_INDEPENDENT _Pragma("GCC ivdep")
#endif

#define HD_REDUCE(NAME, T, VALUE)                                                                  \
    static void NAME(const void *one, const void *other, void *result, int64_t n)                  \
    {                                                                                              \
        const T *x = one, *y = other;                                                              \
        T *to = result;                                                                            \
        HD_INDEPENDENT                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const T a = x[i], b = y[i];                                                            \
            to[i] = (T)(VALUE);                                                                    \
        }                                                                                          \
    }

/* ---- bool ---- */

HD_REDUCE(bool_or, hd_u8, (a | b) != 0)
HD_REDUCE(bool_and, hd_u8, (a != 0) & (b != 0))
HD_REDUCE(bool_xor, hd_u8, (a != 0) ^ (b != 0))

/* ---- integers: unsigned arithmetic wraps, and gives the bits of signed arithmetic ---- */

/* clang-format off: it takes some of these products for pointers */
#define HD_INTEGER(BITS, WIDE)                                                                     \
    HD_REDUCE(sum_##BITS, hd_u##BITS, (WIDE)a + (WIDE)b)                                           \
    HD_REDUCE(product_##BITS, hd_u##BITS, (WIDE)a *(WIDE)b)                                        \
    HD_REDUCE(band_##BITS, hd_u##BITS, a &b)                                                       \
    HD_REDUCE(bor_##BITS, hd_u##BITS, a | b)                                                       \
    HD_REDUCE(bxor_##BITS, hd_u##BITS, a ^ b)                                                      \
    HD_REDUCE(min_u##BITS, hd_u##BITS, a < b ? a : b)                                              \
    HD_REDUCE(max_u##BITS, hd_u##BITS, a > b ? a : b)                                              \
    HD_REDUCE(min_i##BITS, hd_i##BITS, a < b ? a : b)                                              \
    HD_REDUCE(max_i##BITS, hd_i##BITS, a > b ? a : b)
/* clang-format on */

HD_INTEGER(8, uint32_t)
HD_INTEGER(16, uint32_t)
HD_INTEGER(32, uint32_t)
HD_INTEGER(64, uint64_t)

/* An integer below 2^24 (2^53) divided in float32 (float64) and truncated is exact: the quotient
 * lies at least 1/divisor below the next integer, more than its rounding error. Unlike integer
 * division this vectorises. A divisor too large to be exact as a float gives 0 either way. */
#define HD_INTEGER_DIV(NAME, T, VALUE)                                                             \
    static void NAME(void *buf, int64_t n, int64_t divisor)                                        \
    {                                                                                              \
        T *data = buf;                                                                             \
        if (divisor == 1)                                                                          \
            return;                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const T a = data[i];                                                                   \
            data[i] = (T)(VALUE);                                                                  \
        }                                                                                          \
    }

HD_INTEGER_DIV(div_u8, hd_u8, (int32_t)((float)a / (float)divisor))
HD_INTEGER_DIV(div_i8, hd_i8, (int32_t)((float)a / (float)divisor))
HD_INTEGER_DIV(div_u16, hd_u16, (int32_t)((float)a / (float)divisor))
HD_INTEGER_DIV(div_i16, hd_i16, (int32_t)((float)a / (float)divisor))
/* From divisor 2 on the quotient of a uint32 fits int32, whose conversion every processor has. */
HD_INTEGER_DIV(div_u32, hd_u32, (int32_t)((double)a / (double)divisor))
HD_INTEGER_DIV(div_i32, hd_i32, (int32_t)((double)a / (double)divisor))
HD_INTEGER_DIV(div_u64, hd_u64, a / (uint64_t)divisor)
HD_INTEGER_DIV(div_i64, hd_i64, a / divisor)

/* ---- floats ---- */

static inline float f32_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double f64_of(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The hardware passes on the payload of the first NaN operand, so a + b and b + a can differ; one
 * fixed NaN cannot. */
static inline uint32_t f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;
}

static inline uint64_t f64_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7FFFFFFFFFFFFFFFu) > 0x7FF0000000000000u ? 0x7FF8000000000000u : bits;
}

HD_REDUCE(sum_f32, hd_u32, f32_bits(f32_of(a) + f32_of(b)))
HD_REDUCE(sum_f64, hd_u64, f64_bits(f64_of(a) + f64_of(b)))
HD_REDUCE(product_f32, hd_u32, f32_bits(f32_of(a) * f32_of(b)))
HD_REDUCE(product_f64, hd_u64, f64_bits(f64_of(a) * f64_of(b)))

static void sum_c64(const void *one, const void *other, void *result, int64_t n)
{
    sum_f32(one, other, result, 2 * n);
}

static void sum_c128(const void *one, const void *other, void *result, int64_t n)
{
    sum_f64(one, other, result, 2 * n);
}

/* Looks at bits, not values: flush-to-zero modes do not matter, and the same loop does for every
 * float. Without a branch it vectorises. */
#define HD_HAS_NAN(SUFFIX, T, NAN_BITS)                                                            \
    static int has_nan_##SUFFIX(const void *in, int64_t n)                                         \
    {                                                                                              \
        const T *src = in;                                                                         \
        T any = 0;                                                                                 \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const T a = src[i];                                                                    \
            any |= (T)(NAN_BITS);                                                                  \
        }                                                                                          \
        return any != 0;                                                                           \
    }

HD_HAS_NAN(f16, hd_i16, (a & 0x7FFF) > 0x7C00)
HD_HAS_NAN(bf16, hd_i16, (a & 0x7FFF) > 0x7F80)
HD_HAS_NAN(f32, hd_i32, (a & 0x7FFFFFFF) > 0x7F800000)
HD_HAS_NAN(f64, hd_i64, (a & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000)
HD_HAS_NAN(e4m3fn, hd_u8, (a & 0x7F) == 0x7F)
HD_HAS_NAN(e5m2, hd_u8, (a & 0x7F) > 0x7C)
HD_HAS_NAN(fnuz, hd_u8, a == 0x80)
HD_HAS_NAN(e8m0fnu, hd_u8, a == 0xFF)

static int has_nan_c64(const void *in, int64_t n) { return has_nan_f32(in, 2 * n); }

static int has_nan_c128(const void *in, int64_t n) { return has_nan_f64(in, 2 * n); }

/* MIN and MAX compare bits, not values: that orders -0 below +0, and flush-to-zero modes of the
 * calling thread cannot make denormals equal. Flipping the magnitude bits of negative numbers (its
 * own inverse) makes signed integer order the order of the numbers; NaNs come out beyond both
 * infinities. Each element is used in one expression only, because compilers fold loads into their
 * uses: a third use of the 64-byte lines cost AVX-512 a quarter of its speed from memory. */
#define HD_FLOAT_EXTREME(NAME, T, BITS, MAGNITUDE, INFINITE, QUIET, CHOSEN)                        \
    static void NAME(const void *one, const void *other, void *result, int64_t n)                  \
    {                                                                                              \
        const T *x = one, *y = other;                                                              \
        T *to = result;                                                                            \
        HD_INDEPENDENT                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const T a = x[i], b = y[i];                                                            \
            const T ka = (T)(a ^ ((a >> (BITS - 1)) & MAGNITUDE));                                 \
            const T kb = (T)(b ^ ((b >> (BITS - 1)) & MAGNITUDE));                                 \
            const T low = ka < kb ? ka : kb, high = ka > kb ? ka : kb;                             \
            const T value = (T)(CHOSEN ^ ((CHOSEN >> (BITS - 1)) & MAGNITUDE));                    \
            const int nan = (low < (T)~INFINITE) | (high > INFINITE);                              \
            to[i] = nan ? (T)QUIET : value;                                                        \
        }                                                                                          \
    }

#define HD_FLOAT_EXTREMES(SUFFIX, T, BITS, MAGNITUDE, INFINITE, QUIET)                             \
    HD_FLOAT_EXTREME(min_##SUFFIX, T, BITS, (T)MAGNITUDE, (T)INFINITE, QUIET, low)                 \
    HD_FLOAT_EXTREME(max_##SUFFIX, T, BITS, (T)MAGNITUDE, (T)INFINITE, QUIET, high)

HD_FLOAT_EXTREMES(f16, hd_i16, 16, 0x7FFF, 0x7C00, 0x7E00)
HD_FLOAT_EXTREMES(bf16, hd_i16, 16, 0x7FFF, 0x7F80, 0x7FC0)
HD_FLOAT_EXTREMES(f32, hd_i32, 32, 0x7FFFFFFF, 0x7F800000, 0x7FC00000)
HD_FLOAT_EXTREMES(f64, hd_i64, 64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000)

/* In-place calls have a loop of their own: with two equal pointers a compiler suspects an overlap
 * and takes its slow path. */
#define HD_FLOAT_SCALE(SUFFIX, T, FLOAT, OF, BITS)                                                 \
    static void div_##SUFFIX(void *buf, int64_t n, int64_t divisor)                                \
    {                                                                                              \
        T *data = buf;                                                                             \
        for (int64_t i = 0; i < n; i++)                                                            \
            data[i] = BITS(OF(data[i]) / (FLOAT)divisor);                                          \
    }                                                                                              \
    static void multiply_##SUFFIX(T *restrict to, const T *restrict from, int64_t n, FLOAT factor) \
    {                                                                                              \
        for (int64_t i = 0; i < n; i++)                                                            \
            to[i] = BITS(OF(from[i]) * factor);                                                    \
    }                                                                                              \
    static void multiply_in_place_##SUFFIX(T *data, int64_t n, FLOAT factor)                       \
    {                                                                                              \
        for (int64_t i = 0; i < n; i++)                                                            \
            data[i] = BITS(OF(data[i]) * factor);                                                  \
    }                                                                                              \
    static void mul_##SUFFIX(void *dst, const void *src, int64_t n, double factor)                 \
    {                                                                                              \
        if (dst == src)                                                                            \
            multiply_in_place_##SUFFIX(dst, n, (FLOAT)factor);                                     \
        else                                                                                       \
            multiply_##SUFFIX(dst, src, n, (FLOAT)factor);                                         \
    }

HD_FLOAT_SCALE(f32, hd_u32, float, f32_of, f32_bits)
HD_FLOAT_SCALE(f64, hd_u64, double, f64_of, f64_bits)

#define HD_COMPLEX_SCALE(SUFFIX, PART)                                                             \
    static void div_##SUFFIX(void *buf, int64_t n, int64_t divisor)                                \
    {                                                                                              \
        div_##PART(buf, 2 * n, divisor);                                                           \
    }                                                                                              \
    static void mul_##SUFFIX(void *dst, const void *src, int64_t n, double factor)                 \
    {                                                                                              \
        mul_##PART(dst, src, 2 * n, factor);                                                       \
    }

HD_COMPLEX_SCALE(c64, f32)
HD_COMPLEX_SCALE(c128, f64)

/* ---- float16 and bfloat16, HD_LANES at a time ---- */

/* The last elements go through a zero-filled block of their own, so that every element takes the
 * same path and no load or store leaves the buffers. */
#define HD_HALF_REDUCE(NAME, LOAD, STORE, COMBINE)                                                 \
    static void NAME(const void *one, const void *other, void *result, int64_t n)                  \
    {                                                                                              \
        const char *x = one, *y = other;                                                           \
        char *to = result;                                                                         \
        int64_t i = 0;                                                                             \
        for (; i + HD_LANES <= n; i += HD_LANES)                                                   \
            STORE(to + 2 * i, COMBINE(LOAD(x + 2 * i), LOAD(y + 2 * i)));                          \
        if (i < n) {                                                                               \
            const size_t rest = 2 * (size_t)(n - i);                                               \
            uint16_t a[HD_LANES] = {0}, b[HD_LANES] = {0};                                         \
            memcpy(a, x + 2 * i, rest);                                                            \
            memcpy(b, y + 2 * i, rest);                                                            \
            STORE(b, COMBINE(LOAD(a), LOAD(b)));                                                   \
            memcpy(to + 2 * i, b, rest);                                                           \
        }                                                                                          \
    }

HD_HALF_REDUCE(sum_f16, hd_load_f16, hd_store_f16, hd_vadd)
HD_HALF_REDUCE(sum_bf16, hd_load_bf16, hd_store_bf16, hd_vadd)
HD_HALF_REDUCE(product_f16, hd_load_f16, hd_store_f16, hd_vmul)
HD_HALF_REDUCE(product_bf16, hd_load_bf16, hd_store_bf16, hd_vmul)

#define HD_HALF_MAP(NAME, LOAD, STORE, COMBINE)                                                    \
    static void NAME(void *dst, const void *src, int64_t n, float scalar)                          \
    {                                                                                              \
        const char *from = src;                                                                    \
        char *to = dst;                                                                            \
        const hd_vec s = hd_vset(scalar);                                                          \
        int64_t i = 0;                                                                             \
        for (; i + HD_LANES <= n; i += HD_LANES)                                                   \
            STORE(to + 2 * i, COMBINE(LOAD(from + 2 * i), s));                                     \
        if (i < n) {                                                                               \
            const size_t rest = 2 * (size_t)(n - i);                                               \
            uint16_t block[HD_LANES] = {0};                                                        \
            memcpy(block, from + 2 * i, rest);                                                     \
            STORE(block, COMBINE(LOAD(block), s));                                                 \
            memcpy(to + 2 * i, block, rest);                                                       \
        }                                                                                          \
    }

#define HD_HALF_SCALE(SUFFIX, LOAD, STORE)                                                         \
    HD_HALF_MAP(divide_##SUFFIX, LOAD, STORE, hd_vdiv)                                             \
    HD_HALF_MAP(multiply_##SUFFIX, LOAD, STORE, hd_vmul)                                           \
    static void div_##SUFFIX(void *buf, int64_t n, int64_t divisor)                                \
    {                                                                                              \
        divide_##SUFFIX(buf, buf, n, (float)divisor);                                              \
    }                                                                                              \
    static void mul_##SUFFIX(void *dst, const void *src, int64_t n, double factor)                 \
    {                                                                                              \
        multiply_##SUFFIX(dst, src, n, (float)factor);                                             \
    }

HD_HALF_SCALE(f16, hd_load_f16, hd_store_f16)
HD_HALF_SCALE(bf16, hd_load_bf16, hd_store_bf16)

/* ---- the table ---- */

#define HD_ROW_INTEGER(CODE, BITS, SIGN)                                                           \
    .reduce[HD_SUM][CODE] = sum_##BITS, .reduce[HD_AVG][CODE] = sum_##BITS,                        \
    .reduce[HD_PRODUCT][CODE] = product_##BITS, .reduce[HD_MIN][CODE] = min_##SIGN##BITS,          \
    .reduce[HD_MAX][CODE] = max_##SIGN##BITS, .reduce[HD_BAND][CODE] = band_##BITS,                \
    .reduce[HD_BOR][CODE] = bor_##BITS, .reduce[HD_BXOR][CODE] = bxor_##BITS,                      \
    .div[CODE] = div_##SIGN##BITS

#define HD_ROW_SUMS(CODE, SUFFIX)                                                                  \
    .reduce[HD_SUM][CODE] = sum_##SUFFIX, .reduce[HD_AVG][CODE] = sum_##SUFFIX,                    \
    .reduce[HD_PREMUL_SUM][CODE] = sum_##SUFFIX, .div[CODE] = div_##SUFFIX,                        \
    .mul[CODE] = mul_##SUFFIX, .has_nan[CODE] = has_nan_##SUFFIX

#define HD_ROW_FLOAT(CODE, SUFFIX)                                                                 \
    HD_ROW_SUMS(CODE, SUFFIX), .reduce[HD_PRODUCT][CODE] = product_##SUFFIX,                       \
                               .reduce[HD_MIN][CODE] = min_##SUFFIX,                               \
                               .reduce[HD_MAX][CODE] = max_##SUFFIX

static const hd_kernel_table TABLE = {
    .isa = HD_ISA,
    .reduce[HD_SUM][HD_BOOL] = bool_or,
    .reduce[HD_MAX][HD_BOOL] = bool_or,
    .reduce[HD_BOR][HD_BOOL] = bool_or,
    .reduce[HD_PRODUCT][HD_BOOL] = bool_and,
    .reduce[HD_MIN][HD_BOOL] = bool_and,
    .reduce[HD_BAND][HD_BOOL] = bool_and,
    .reduce[HD_BXOR][HD_BOOL] = bool_xor,
    HD_ROW_INTEGER(HD_UINT8, 8, u),
    HD_ROW_INTEGER(HD_INT8, 8, i),
    HD_ROW_INTEGER(HD_UINT16, 16, u),
    HD_ROW_INTEGER(HD_INT16, 16, i),
    HD_ROW_INTEGER(HD_UINT32, 32, u),
    HD_ROW_INTEGER(HD_INT32, 32, i),
    HD_ROW_INTEGER(HD_UINT64, 64, u),
    HD_ROW_INTEGER(HD_INT64, 64, i),
    HD_ROW_FLOAT(HD_FLOAT16, f16),
    HD_ROW_FLOAT(HD_BFLOAT16, bf16),
    HD_ROW_FLOAT(HD_FLOAT32, f32),
    HD_ROW_FLOAT(HD_FLOAT64, f64),
    HD_ROW_SUMS(HD_COMPLEX64, c64),
    HD_ROW_SUMS(HD_COMPLEX128, c128),
    .has_nan[HD_FLOAT8_E4M3FN] = has_nan_e4m3fn,
    .has_nan[HD_FLOAT8_E5M2] = has_nan_e5m2,
    .has_nan[HD_FLOAT8_E4M3FNUZ] = has_nan_fnuz,
    .has_nan[HD_FLOAT8_E5M2FNUZ] = has_nan_fnuz,
    .has_nan[HD_FLOAT8_E8M0FNU] = has_nan_e8m0fnu,
};

const hd_kernel_table *HD_TABLE(void) { return &TABLE; }
