/* The kernels of the instruction sets that this build has, against those in plain C, bit by bit.
 *
 *   kernels SEED ROUNDS WIDE
 *
 * Each round takes every pair of operation and dtype, and every scaling, at a size and at addresses by chance. WIDE is
 * the instruction set that must be there. What plain C computes itself, tests/kernels compares with NumPy. */
#include <string.h>

#include "hd_kernels.h"
#include "harness.h"

enum { MOST = 1100, GUARD = 64, ROOM = MOST * 16 + 3 * GUARD };

/* The halves of every kind of float, low half first: zero, denormal, one, largest, infinity, NaNs with and without
 * payload. Any mixture of them is a value too. */
static const uint16_t PIECES[] = {0,      1,      0x3FF,  0x400,  0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0x7C01, 0x7E00,
                                  0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FF0, 0x7FF8, 0x7FFF, 0x8000, 0xBF80, 0xFF80};

static chance luck;
static uint64_t compared;
static uint8_t a[ROOM], b[ROOM], want[ROOM], got[ROOM];

static void fill(uint8_t *at)
{
    for (int i = 0; i < ROOM; i += 2) {
        const uint64_t kind = draw(&luck, 4);
        uint16_t piece = (uint16_t)draw(&luck, 65536);
        if (kind == 0)
            piece = PIECES[draw(&luck, sizeof PIECES / sizeof PIECES[0])];
        else if (kind == 1) /* numbers around one */
            piece = (uint16_t)(0x3F00 + draw(&luck, 256));
        memcpy(at + i, &piece, 2);
    }
}

static void force(const char *isa)
{
    if (hd_kernels_force(isa) == 0)
        return;
    printf("this build or processor has no %s\n", isa);
    exit(2);
}

static void compare(const char *isa, const char *what, int dtype, int64_t n, int at)
{
    compared++;
    if (memcmp(want, got, ROOM) == 0)
        return;
    for (int i = 0; i < ROOM; i++)
        if (want[i] != got[i]) {
            printf("%s of %s, %lld elements at %d: byte %d is %02x with %s, %02x in plain C\n", what,
                   hd_dtype_name(dtype), (long long)n, at, i, got[i], isa, want[i]);
            exit(1);
        }
}

/* Whole buffers are compared, so a store before the first or behind the last element shows too. */
static void reduce(const char *isa, int op, int dtype, int64_t n)
{
    const int from = (int)draw(&luck, GUARD), at = (int)draw(&luck, GUARD);
    memcpy(want, b, ROOM);
    force("scalar");
    hd_reduce_kernel(op, dtype)(a + from, want + at, want + at, n);
    memcpy(got, b, ROOM);
    force(isa);
    hd_reduce_kernel(op, dtype)(a + from, b + at, got + at, n);
    compare(isa, hd_op_name(op), dtype, n, at);
    /* The operands swapped: the same values, so the same bits. */
    memcpy(got, b, ROOM);
    memcpy(got + at, a + from, (size_t)n * hd_itemsize(dtype));
    hd_reduce_kernel(op, dtype)(b + at, got + at, got + at, n);
    compare(isa, hd_op_name(op), dtype, n, at);
    /* The result in the place of the first operand. */
    memcpy(got, b, ROOM);
    memcpy(got + at, a + from, (size_t)n * hd_itemsize(dtype));
    hd_reduce_kernel(op, dtype)(got + at, b + at, got + at, n);
    compare(isa, hd_op_name(op), dtype, n, at);
}

static void divide(const char *isa, int dtype, int64_t n)
{
    static const int64_t DIVISORS[] = {1, 2, 3, 7, 255, 256, 65535, 16777217, 1LL << 31, (1LL << 53) + 1};
    const int64_t divisor = DIVISORS[draw(&luck, sizeof DIVISORS / sizeof DIVISORS[0])];
    const int at = (int)draw(&luck, GUARD);
    memcpy(want, b, ROOM);
    memcpy(got, b, ROOM);
    force("scalar");
    hd_scale_div(want + at, n, dtype, divisor);
    force(isa);
    hd_scale_div(got + at, n, dtype, divisor);
    compare(isa, "division", dtype, n, at);
}

static void multiply(const char *isa, int dtype, int64_t n)
{
    static const double FACTORS[] = {1, -1, 0.5, 1.0 / 3, 0, 1e-30, 65504, 3e38, 1e300};
    const double factor = FACTORS[draw(&luck, sizeof FACTORS / sizeof FACTORS[0])];
    const int from = (int)draw(&luck, GUARD), at = (int)draw(&luck, GUARD);
    memcpy(want, b, ROOM);
    memcpy(got, b, ROOM);
    force("scalar");
    hd_scale_mul(want + at, a + from, n, dtype, factor);
    force(isa);
    hd_scale_mul(got + at, a + from, n, dtype, factor);
    compare(isa, "product", dtype, n, at);
}

/* Zeros with one drawn element among them, which may be a NaN. */
static void search(const char *isa, int dtype, int64_t n)
{
    const int from = (int)draw(&luck, GUARD);
    const size_t size = hd_itemsize(dtype), at = n ? draw(&luck, (uint64_t)n) * size : 0;
    int64_t first, here;
    memset(got, 0, ROOM);
    memcpy(got + from + at, a + at, n ? size : 0);
    force("scalar");
    first = hd_find_nan(got + from, n, dtype);
    force(isa);
    here = hd_find_nan(got + from, n, dtype);
    compared++;
    if (here == first)
        return;
    printf("first NaN of %lld of %s: %lld with %s, %lld in plain C\n", (long long)n, hd_dtype_name(dtype),
           (long long)here, isa, (long long)first);
    exit(1);
}

static void round_of(const char *isa)
{
    fill(a);
    fill(b);
    for (int dtype = 0; dtype < HD_NDTYPES; dtype++) {
        const int64_t n = (int64_t)draw(&luck, draw(&luck, 4) ? 70 : MOST);
        for (int op = 0; op < HD_NOPS; op++)
            if (hd_op_supported(op, dtype))
                reduce(isa, op, dtype, n);
        if (hd_op_supported(HD_AVG, dtype))
            divide(isa, dtype, n);
        if (hd_op_supported(HD_PREMUL_SUM, dtype))
            multiply(isa, dtype, n);
        search(isa, dtype, n);
    }
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    luck = chance_of(strtoull(argv[1], NULL, 10), 0);
    const int rounds = atoi(argv[2]);
    for (int i = 0; i < rounds; i++)
        round_of(argv[3]);
    printf("%s: %d rounds, %llu results as in plain C\n", argv[3], rounds, (unsigned long long)compared);
    return 0;
}
