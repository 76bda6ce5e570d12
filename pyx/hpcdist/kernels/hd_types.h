/* Codes of the element types and reduce operations, shared by the kernels, the MPI tables and the
 * native modules. Pure C: no MPI, no Python. hpcdist/dtypes.py repeats the codes for Python; a test
 * checks that the two agree. */
#ifndef HD_TYPES_H
#define HD_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* Two extension modules contain a copy of this code each; hidden symbols keep the copies apart even
 * when a program loads one of them with RTLD_GLOBAL. */
#if defined(__GNUC__)
#define HD_LOCAL __attribute__((visibility("hidden")))
#else
#define HD_LOCAL
#endif

/* The element types: name in torch, bytes, family, and the MPI type that moves it. */
#define HD_DTYPES(X)                                                                               \
    X(BOOL, "bool", 1, BOOLEAN, UINT8_T)                                                           \
    X(UINT8, "uint8", 1, INTEGER, UINT8_T)                                                         \
    X(INT8, "int8", 1, INTEGER, INT8_T)                                                            \
    X(UINT16, "uint16", 2, INTEGER, UINT16_T)                                                      \
    X(INT16, "int16", 2, INTEGER, INT16_T)                                                         \
    X(UINT32, "uint32", 4, INTEGER, UINT32_T)                                                      \
    X(INT32, "int32", 4, INTEGER, INT32_T)                                                         \
    X(UINT64, "uint64", 8, INTEGER, UINT64_T)                                                      \
    X(INT64, "int64", 8, INTEGER, INT64_T)                                                         \
    X(FLOAT16, "float16", 2, FLOATING, UINT16_T)                                                   \
    X(BFLOAT16, "bfloat16", 2, FLOATING, UINT16_T)                                                 \
    X(FLOAT32, "float32", 4, FLOATING, FLOAT)                                                      \
    X(FLOAT64, "float64", 8, FLOATING, DOUBLE)                                                     \
    X(COMPLEX64, "complex64", 8, COMPLEX, C_FLOAT_COMPLEX)                                         \
    X(COMPLEX128, "complex128", 16, COMPLEX, C_DOUBLE_COMPLEX)                                     \
    X(FLOAT8_E4M3FN, "float8_e4m3fn", 1, FLOAT8, UINT8_T)                                          \
    X(FLOAT8_E5M2, "float8_e5m2", 1, FLOAT8, UINT8_T)                                              \
    X(FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", 1, FLOAT8, UINT8_T)                                      \
    X(FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", 1, FLOAT8, UINT8_T)                                      \
    X(FLOAT8_E8M0FNU, "float8_e8m0fnu", 1, FLOAT8, UINT8_T)

enum {
#define X(NAME, text, bytes, family, mpi) HD_##NAME,
    HD_DTYPES(X)
#undef X
        HD_NDTYPES
};

/* The order of torch's RedOpType. */
enum {
    HD_SUM = 0,
    HD_AVG,
    HD_PRODUCT,
    HD_MIN,
    HD_MAX,
    HD_BAND,
    HD_BOR,
    HD_BXOR,
    HD_PREMUL_SUM,
    HD_NOPS
};

/* Bytes of one element; 0 for an invalid code. */
HD_LOCAL size_t hd_itemsize(int dtype);

/* "float32", "complex64", ...; "unknown dtype" for an invalid code. */
HD_LOCAL const char *hd_dtype_name(int dtype);

/* "SUM", "PREMUL_SUM", ...; "unknown op" for an invalid code. */
HD_LOCAL const char *hd_op_name(int op);

/* 1 if all_reduce promises this combination, else 0. */
HD_LOCAL int hd_op_supported(int op, int dtype);

/* NULL if the combination is supported, else one sentence that says why not and what to do. The
 * text is static and needs no freeing. */
HD_LOCAL const char *hd_op_refusal(int op, int dtype);

/* A kernel: result[i] = one[i] op other[i] for n elements; n may be 0. The result may replace an
 * operand; apart from that nothing overlaps. */
typedef void (*hd_reduce_fn)(const void *one, const void *other, void *result, int64_t n);

#endif
