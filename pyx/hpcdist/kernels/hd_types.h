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

enum {
    HD_BOOL = 0,
    HD_UINT8,
    HD_INT8,
    HD_UINT16,
    HD_INT16,
    HD_UINT32,
    HD_INT32,
    HD_UINT64,
    HD_INT64,
    HD_FLOAT16,
    HD_BFLOAT16,
    HD_FLOAT32,
    HD_FLOAT64,
    HD_COMPLEX64,
    HD_COMPLEX128,
    HD_FLOAT8_E4M3FN,
    HD_FLOAT8_E5M2,
    HD_FLOAT8_E4M3FNUZ,
    HD_FLOAT8_E5M2FNUZ,
    HD_FLOAT8_E8M0FNU,
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

/* A kernel: inout[i] = in[i] op inout[i] for n elements; n may be 0. */
typedef void (*hd_reduce_fn)(const void *in, void *inout, int64_t n);

#endif
