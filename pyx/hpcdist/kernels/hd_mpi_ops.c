/* Which MPI_Datatype moves a dtype, and which MPI_Op reduces it. */
#include "hd_mpi_ops.h"

#include "hd_kernels.h"

/* Our own operations: MPI has no float16 or bfloat16; its logical operations accept only C
 * integers; for MIN and MAX of floats it leaves NaN and -0 to the order in which ranks happen to
 * combine; and Open MPI 5.0.11 (op/avx) adds integers of 8 and 16 bits with saturating
 * instructions, but wraps in the remainder at a buffer's end.
 * The rest is MPI's own, which network hardware can offload: the other operations on integers, SUM
 * and PRODUCT of float32 and float64, SUM of complex. All ranks get the same numbers from these.
 * Only if several ranks contribute NaNs of different bits may each rank keep a different one:
 * MPICH does so for buffers too small to be split among ranks. */
#define OURS(X)                                                                                    \
    X(HD_SUM, HD_BOOL)                                                                             \
    X(HD_PRODUCT, HD_BOOL)                                                                         \
    X(HD_BXOR, HD_BOOL)                                                                            \
    X(HD_SUM, HD_UINT8)                                                                            \
    X(HD_SUM, HD_INT8)                                                                             \
    X(HD_SUM, HD_UINT16)                                                                           \
    X(HD_SUM, HD_INT16)                                                                            \
    X(HD_SUM, HD_FLOAT16)                                                                          \
    X(HD_PRODUCT, HD_FLOAT16)                                                                      \
    X(HD_MIN, HD_FLOAT16)                                                                          \
    X(HD_MAX, HD_FLOAT16)                                                                          \
    X(HD_SUM, HD_BFLOAT16)                                                                         \
    X(HD_PRODUCT, HD_BFLOAT16)                                                                     \
    X(HD_MIN, HD_BFLOAT16)                                                                         \
    X(HD_MAX, HD_BFLOAT16)                                                                         \
    X(HD_MIN, HD_FLOAT32)                                                                          \
    X(HD_MAX, HD_FLOAT32)                                                                          \
    X(HD_MIN, HD_FLOAT64)                                                                          \
    X(HD_MAX, HD_FLOAT64)

/* One function per operation and type: the function is all that tells MPI's operations apart. */
#define FUNCTION(OP, DTYPE)                                                                        \
    static void call_##OP##_##DTYPE(void *in, void *inout, int *n, MPI_Datatype *type)             \
    {                                                                                              \
        (void)type;                                                                                \
        hd_reduce_kernel(OP, DTYPE)(in, inout, inout, *n);                                         \
    }
OURS(FUNCTION)

#define ROW(OP, DTYPE) {OP, DTYPE, call_##OP##_##DTYPE},
static const struct {
    int op, dtype;
    MPI_User_function *call;
} OWN[] = {OURS(ROW)};

enum { COUNT = sizeof OWN / sizeof *OWN };

static MPI_Op created[COUNT];
static int ready;

int hd_mpi_ops_init(void)
{
    if (ready)
        return MPI_SUCCESS;
    for (int i = 0; i < COUNT; i++) {
        /* commute=1: without it both libraries keep rank order, at twice the time */
        const int rc = MPI_Op_create(OWN[i].call, 1, &created[i]);
        if (rc != MPI_SUCCESS) {
            while (i-- > 0)
                MPI_Op_free(&created[i]);
            return rc;
        }
    }
    ready = 1;
    return MPI_SUCCESS;
}

void hd_mpi_ops_free(void)
{
    int down = 0;
    if (!ready)
        return;
    ready = 0;
    MPI_Finalized(&down);
    for (int i = 0; i < COUNT && !down; i++)
        MPI_Op_free(&created[i]);
}

MPI_Datatype hd_mpi_type(int dtype)
{
    switch (dtype) {
#define X(NAME, text, bytes, family, mpi)                                                          \
    case HD_##NAME: return MPI_##mpi;
        HD_DTYPES(X)
#undef X
    }
    return MPI_DATATYPE_NULL;
}

MPI_Op hd_mpi_op(int op, int dtype)
{
    if (!hd_op_supported(op, dtype))
        return MPI_OP_NULL;
    if (op == HD_AVG || op == HD_PREMUL_SUM)
        op = HD_SUM;
    if (dtype == HD_BOOL) /* or, and, xor under their various names */
        op = op == HD_MAX || op == HD_BOR    ? HD_SUM
             : op == HD_MIN || op == HD_BAND ? HD_PRODUCT
                                             : op;
    for (int i = 0; i < COUNT; i++)
        if (OWN[i].op == op && OWN[i].dtype == dtype)
            return ready ? created[i] : MPI_OP_NULL;
    switch (op) {
    case HD_SUM: return MPI_SUM;
    case HD_PRODUCT: return MPI_PROD;
    case HD_MIN: return MPI_MIN;
    case HD_MAX: return MPI_MAX;
    case HD_BAND: return MPI_BAND;
    case HD_BOR: return MPI_BOR;
    case HD_BXOR: return MPI_BXOR;
    }
    return MPI_OP_NULL;
}
