/* Element types and reductions, one value at a time: made to be right, not fast. */
#include "standin.h"

#include <math.h>
#include <string.h>

static const size_t sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

size_t type_size(int type) { return type >= 0 && type < TYPES ? sizes[type] : 0; }

/* The small floats: bits of exponent and mantissa. e4m3 (fn) has no infinity, and NaN only where all bits are 1. */
typedef struct {
    int e, m, finite;
} small;

static int small_of(int type, small *s)
{
    switch (type) {
    case FLOAT16: *s = (small){5, 10, 0}; return 1;
    case BFLOAT16: *s = (small){8, 7, 0}; return 1;
    case FLOAT8_E4M3: *s = (small){4, 3, 1}; return 1;
    case FLOAT8_E5M2: *s = (small){5, 2, 0}; return 1;
    }
    return 0;
}

static double decode(unsigned bits, small s)
{
    int bias = (1 << (s.e - 1)) - 1, all = (1 << s.e) - 1;
    unsigned mantissa = bits & ((1u << s.m) - 1), exponent = bits >> s.m & (unsigned)all;
    double sign = bits >> (s.e + s.m) & 1 ? -1.0 : 1.0;

    if ((int)exponent == all && (!s.finite || mantissa == (1u << s.m) - 1))
        return s.finite || mantissa ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp((double)mantissa, 1 - bias - s.m);
    return sign * ldexp((double)(mantissa | 1u << s.m), (int)exponent - bias - s.m);
}

static unsigned encode(double value, small s)
{
    int bias = (1 << (s.e - 1)) - 1, all = (1 << s.e) - 1, exponent;
    unsigned sign = signbit(value) ? 1u << (s.e + s.m) : 0, top = (unsigned)all << s.m, bits;
    double size = fabs(value);

    if (isnan(value))
        return sign | top | (s.finite ? (1u << s.m) - 1 : 1u << (s.m - 1));
    if (size == 0)
        return sign;
    if (isinf(size))
        return s.finite ? sign | top | ((1u << s.m) - 1) : sign | top;
    frexp(size, &exponent);
    exponent -= 1;
    if (exponent < 1 - bias)
        exponent = 1 - bias;
    /* in units of the last place, rounded to even; a carry runs into the exponent as it should */
    bits = (unsigned)llrint(ldexp(size, s.m - exponent));
    if (bits >= 1u << s.m)
        bits += (unsigned)(exponent + bias - 1) << s.m;
    if (bits >= (s.finite ? top | ((1u << s.m) - 1) : top))
        return s.finite ? sign | top | ((1u << s.m) - 1) : sign | top;
    return sign | bits;
}

static int is_float(int type) { return type >= FLOAT16; }
static int is_unsigned(int type) { return type == UINT8 || type == UINT32 || type == UINT64; }

static wide load(const void *at, size_t i, int type)
{
    wide v;
    small s;
    float f;
    uint16_t h;
    switch (type) {
    case INT8: v.i = ((const int8_t *)at)[i]; return v;
    case UINT8: v.u = ((const uint8_t *)at)[i]; return v;
    case INT32: v.i = ((const int32_t *)at)[i]; return v;
    case UINT32: v.u = ((const uint32_t *)at)[i]; return v;
    case INT64: v.i = ((const int64_t *)at)[i]; return v;
    case UINT64: v.u = ((const uint64_t *)at)[i]; return v;
    case FLOAT32: memcpy(&f, (const char *)at + 4 * i, 4); v.d = f; return v;
    case FLOAT64: memcpy(&v.d, (const char *)at + 8 * i, 8); return v;
    }
    small_of(type, &s);
    if (sizes[type] == 2) {
        memcpy(&h, (const char *)at + 2 * i, 2);
        v.d = decode(h, s);
    } else {
        v.d = decode(((const uint8_t *)at)[i], s);
    }
    return v;
}

static void store(void *at, size_t i, int type, wide v)
{
    small s;
    float f = (float)v.d;
    uint16_t h;
    switch (type) {
    case INT8: case UINT8: ((uint8_t *)at)[i] = (uint8_t)v.u; return;
    case INT32: case UINT32: ((uint32_t *)at)[i] = (uint32_t)v.u; return;
    case INT64: case UINT64: ((uint64_t *)at)[i] = v.u; return;
    case FLOAT32: memcpy((char *)at + 4 * i, &f, 4); return;
    case FLOAT64: memcpy((char *)at + 8 * i, &v.d, 8); return;
    }
    small_of(type, &s);
    if (sizes[type] == 2) {
        h = (uint16_t)encode(v.d, s);
        memcpy((char *)at + 2 * i, &h, 2);
    } else {
        ((uint8_t *)at)[i] = (uint8_t)encode(v.d, s);
    }
}

void accumulate(wide *acc, const void *in, size_t n, int type, int op, int first, double factor)
{
    for (size_t i = 0; i < n; i++) {
        wide v = load(in, i, type);
        if (is_float(type)) {
            v.d *= factor;
            if (first) acc[i] = v;
            else if (op == PROD) acc[i].d *= v.d;
            else if (op == MAX) acc[i].d = fmax(acc[i].d, v.d);
            else if (op == MIN) acc[i].d = fmin(acc[i].d, v.d);
            else acc[i].d += v.d;
            continue;
        }
        int less = is_unsigned(type) ? v.u < acc[i].u : v.i < acc[i].i;
        if (first) acc[i] = v;
        else if (op == PROD) acc[i].u *= v.u;
        else if (op == MAX) acc[i] = less ? acc[i] : v;
        else if (op == MIN) acc[i] = less ? v : acc[i];
        else acc[i].u += v.u;
    }
}

void finish(void *out, const wide *acc, size_t n, int type, int divide_by)
{
    for (size_t i = 0; i < n; i++) {
        wide v = acc[i];
        if (divide_by > 1) {
            if (is_float(type)) v.d /= divide_by;
            else if (is_unsigned(type)) v.u /= (unsigned)divide_by;
            else v.i /= divide_by;
        }
        store(out, i, type, v);
    }
}

double scalar_value(const void *scalar, int type)
{
    wide v = load(scalar, 0, type);
    return is_float(type) ? v.d : is_unsigned(type) ? (double)v.u : (double)v.i;
}
