/* Names, sizes and the table of supported combinations. */
#include "hd_types.h"

enum kind { NONE, BOOLEAN, INTEGER, FLOATING, COMPLEX, FLOAT8 };

static const struct {
    const char *name;
    unsigned char itemsize;
    unsigned char kind;
} DTYPES[HD_NDTYPES] = {
#define X(NAME, text, bytes, family, mpi) [HD_##NAME] = {text, bytes, family},
    HD_DTYPES(X)
#undef X
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

#define BITS_OF_FLOAT(OP)                                                                          \
    case HD_##OP:                                                                                  \
        return #OP " has no meaning for floating point numbers; reduce tensor.view(torch.intN) "   \
                   "of the same width to combine their bits"

static const char *refuse_float(int op)
{
    switch (op) {
        BITS_OF_FLOAT(BAND);
        BITS_OF_FLOAT(BOR);
        BITS_OF_FLOAT(BXOR);
    default: return NULL;
    }
}

#define NO_COMPLEX(OP, advice)                                                                     \
    case HD_##OP: return #OP " has no meaning for complex numbers; " advice

static const char *refuse_complex(int op)
{
    switch (op) {
    case HD_PRODUCT:
        return "PRODUCT of complex numbers is not offered; gather the tensors with all_gather and "
               "multiply them, or reduce magnitudes (PRODUCT) and angles (SUM) separately";
        NO_COMPLEX(MIN, "reduce torch.view_as_real(tensor) or its abs()");
        NO_COMPLEX(MAX, "reduce torch.view_as_real(tensor) or its abs()");
        NO_COMPLEX(BAND, "it reduces bool and integers only");
        NO_COMPLEX(BOR, "it reduces bool and integers only");
        NO_COMPLEX(BXOR, "it reduces bool and integers only");
    default: return NULL;
    }
}

static const char *refuse_float8(int dtype)
{
    static const char *const texts[HD_NDTYPES] = {
#define X(NAME, text, bytes, family, mpi)                                                          \
    [HD_##NAME] =                                                                                  \
        text " tensors can be moved but not reduced; convert to bfloat16 or float32 first",
        HD_DTYPES(X)
#undef X
    };
    return texts[dtype];
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
