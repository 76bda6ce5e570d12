/* Names, sizes and the table of supported combinations. */
#include "hd_types.h"

enum kind { NONE, BOOLEAN, INTEGER, FLOATING, COMPLEX, FLOAT8 };

static const struct {
    const char *name;
    unsigned char itemsize;
    unsigned char kind;
} DTYPES[HD_NDTYPES] = {
    [HD_BOOL] = {"bool", 1, BOOLEAN},
    [HD_UINT8] = {"uint8", 1, INTEGER},
    [HD_INT8] = {"int8", 1, INTEGER},
    [HD_UINT16] = {"uint16", 2, INTEGER},
    [HD_INT16] = {"int16", 2, INTEGER},
    [HD_UINT32] = {"uint32", 4, INTEGER},
    [HD_INT32] = {"int32", 4, INTEGER},
    [HD_UINT64] = {"uint64", 8, INTEGER},
    [HD_INT64] = {"int64", 8, INTEGER},
    [HD_FLOAT16] = {"float16", 2, FLOATING},
    [HD_BFLOAT16] = {"bfloat16", 2, FLOATING},
    [HD_FLOAT32] = {"float32", 4, FLOATING},
    [HD_FLOAT64] = {"float64", 8, FLOATING},
    [HD_COMPLEX64] = {"complex64", 8, COMPLEX},
    [HD_COMPLEX128] = {"complex128", 16, COMPLEX},
    [HD_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1, FLOAT8},
    [HD_FLOAT8_E5M2] = {"float8_e5m2", 1, FLOAT8},
    [HD_FLOAT8_E4M3FNUZ] = {"float8_e4m3fnuz", 1, FLOAT8},
    [HD_FLOAT8_E5M2FNUZ] = {"float8_e5m2fnuz", 1, FLOAT8},
    [HD_FLOAT8_E8M0FNU] = {"float8_e8m0fnu", 1, FLOAT8},
};

static const char *const OPS[HD_NOPS] = {
    [HD_SUM] = "SUM", [HD_AVG] = "AVG",   [HD_PRODUCT] = "PRODUCT",
    [HD_MIN] = "MIN", [HD_MAX] = "MAX",   [HD_BAND] = "BAND",
    [HD_BOR] = "BOR", [HD_BXOR] = "BXOR", [HD_PREMUL_SUM] = "PREMUL_SUM",
};

static int kind_of(int dtype)
{
    return dtype >= 0 && dtype < HD_NDTYPES ? DTYPES[dtype].kind : NONE;
}

size_t hd_itemsize(int dtype) { return kind_of(dtype) == NONE ? 0 : DTYPES[dtype].itemsize; }

const char *hd_dtype_name(int dtype)
{
    return kind_of(dtype) == NONE ? "unknown dtype" : DTYPES[dtype].name;
}

const char *hd_op_name(int op) { return op >= 0 && op < HD_NOPS ? OPS[op] : "unknown op"; }

static const char *refuse_float(int op)
{
    switch (op) {
    case HD_BAND:
        return "BAND has no meaning for floating point numbers; reduce "
               "tensor.view(torch.intN) of the same width to combine their bits";
    case HD_BOR:
        return "BOR has no meaning for floating point numbers; reduce "
               "tensor.view(torch.intN) of the same width to combine their bits";
    case HD_BXOR:
        return "BXOR has no meaning for floating point numbers; reduce "
               "tensor.view(torch.intN) of the same width to combine their bits";
    default: return NULL;
    }
}

static const char *refuse_complex(int op)
{
    switch (op) {
    case HD_PRODUCT:
        return "PRODUCT of complex numbers is not offered; gather the tensors with all_gather and "
               "multiply them, or reduce magnitudes (PRODUCT) and angles (SUM) separately";
    case HD_MIN:
        return "MIN has no meaning for complex numbers; reduce torch.view_as_real(tensor) or its "
               "abs()";
    case HD_MAX:
        return "MAX has no meaning for complex numbers; reduce torch.view_as_real(tensor) or its "
               "abs()";
    case HD_BAND:
        return "BAND has no meaning for complex numbers; it reduces bool and integers only";
    case HD_BOR: return "BOR has no meaning for complex numbers; it reduces bool and integers only";
    case HD_BXOR:
        return "BXOR has no meaning for complex numbers; it reduces bool and integers only";
    default: return NULL;
    }
}

static const char *refuse_float8(int dtype)
{
    switch (dtype) {
    case HD_FLOAT8_E4M3FN:
        return "float8_e4m3fn tensors can be moved but not reduced; convert to bfloat16 or float32 "
               "first";
    case HD_FLOAT8_E5M2:
        return "float8_e5m2 tensors can be moved but not reduced; convert to bfloat16 or float32 "
               "first";
    case HD_FLOAT8_E4M3FNUZ:
        return "float8_e4m3fnuz tensors can be moved but not reduced; convert to bfloat16 or "
               "float32 first";
    case HD_FLOAT8_E5M2FNUZ:
        return "float8_e5m2fnuz tensors can be moved but not reduced; convert to bfloat16 or "
               "float32 first";
    default:
        return "float8_e8m0fnu tensors can be moved but not reduced; convert to bfloat16 or "
               "float32 first";
    }
}

const char *hd_op_refusal(int op, int dtype)
{
    if (op < 0 || op >= HD_NOPS)
        return "this reduce operation is unknown; use one of ReduceOp's";
    switch (kind_of(dtype)) {
    case BOOLEAN:
        if (op == HD_AVG)
            return "AVG has no meaning for bool; convert to a float dtype first";
        if (op == HD_PREMUL_SUM)
            return "PREMUL_SUM has no meaning for bool; convert to a float dtype first";
        return NULL;
    case INTEGER:
        if (op == HD_PREMUL_SUM)
            return "PREMUL_SUM multiplies by a fraction and does not take integers; convert to a "
                   "float dtype first";
        return NULL;
    case FLOATING: return refuse_float(op);
    case COMPLEX: return refuse_complex(op);
    case FLOAT8: return refuse_float8(dtype);
    default:
        return "this element type is unknown; hpcdist reduces bool, integers of 8 to 64 bits, "
               "float16, bfloat16, float32, float64, complex64 and complex128";
    }
}

int hd_op_supported(int op, int dtype) { return hd_op_refusal(op, dtype) == NULL; }
