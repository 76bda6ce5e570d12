#include "hd_mac.h"

#include <string.h>

static const uint64_t start[8] = {
    0x6a09e667f3bcc908ULL, 0xbb67ae8584caa73bULL, 0x3c6ef372fe94f82bULL, 0xa54ff53a5f1d36f1ULL,
    0x510e527fade682d1ULL, 0x9b05688c2b3e6c1fULL, 0x1f83d9abfb41bd6bULL, 0x5be0cd19137e2179ULL,
};

static const uint8_t order[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t load(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

static inline uint64_t turn(uint64_t v, unsigned n) { return (v >> n) | (v << (64 - n)); }

#define G(a, b, c, d, x, y)                                                                        \
    do {                                                                                           \
        v[a] += v[b] + (x);                                                                        \
        v[d] = turn(v[d] ^ v[a], 32);                                                              \
        v[c] += v[d];                                                                              \
        v[b] = turn(v[b] ^ v[c], 24);                                                              \
        v[a] += v[b] + (y);                                                                        \
        v[d] = turn(v[d] ^ v[a], 16);                                                              \
        v[c] += v[d];                                                                              \
        v[b] = turn(v[b] ^ v[c], 63);                                                              \
    } while (0)

#define ROUND(s)                                                                                   \
    do {                                                                                           \
        G(0, 4, 8, 12, w[s[0]], w[s[1]]);                                                          \
        G(1, 5, 9, 13, w[s[2]], w[s[3]]);                                                          \
        G(2, 6, 10, 14, w[s[4]], w[s[5]]);                                                         \
        G(3, 7, 11, 15, w[s[6]], w[s[7]]);                                                         \
        G(0, 5, 10, 15, w[s[8]], w[s[9]]);                                                         \
        G(1, 6, 11, 12, w[s[10]], w[s[11]]);                                                       \
        G(2, 7, 8, 13, w[s[12]], w[s[13]]);                                                        \
        G(3, 4, 9, 14, w[s[14]], w[s[15]]);                                                        \
    } while (0)

static void compress(hd_mac *m, const uint8_t *block, unsigned size, int last)
{
    uint64_t v[16], w[16];
    m->low += size;
    m->high += m->low < size;
    for (int i = 0; i < 16; i++)
        w[i] = load(block + 8 * i);
    memcpy(v, m->h, sizeof m->h);
    memcpy(v + 8, start, sizeof start);
    v[12] ^= m->low;
    v[13] ^= m->high;
    if (last)
        v[14] = ~v[14];
    /* written out: with constant indices the words stay in registers */
    ROUND(order[0]);
    ROUND(order[1]);
    ROUND(order[2]);
    ROUND(order[3]);
    ROUND(order[4]);
    ROUND(order[5]);
    ROUND(order[6]);
    ROUND(order[7]);
    ROUND(order[8]);
    ROUND(order[9]);
    ROUND(order[0]);
    ROUND(order[1]);
    for (int i = 0; i < 8; i++)
        m->h[i] ^= v[i] ^ v[i + 8];
}

void hd_mac_init(hd_mac *m, unsigned out, const void *key, unsigned key_size)
{
    memcpy(m->h, start, sizeof start);
    m->h[0] ^= 0x01010000ULL ^ ((uint64_t)key_size << 8) ^ out;
    m->low = m->high = 0;
    m->used = 0;
    m->out = out;
    if (key_size) {
        memset(m->block, 0, sizeof m->block);
        memcpy(m->block, key, key_size);
        m->used = HD_MAC_BLOCK;
    }
}

void hd_mac_update(hd_mac *m, const void *data, size_t size)
{
    const uint8_t *p = data;
    if (!size)
        return;
    /* The last block is compressed with a mark, so a full one waits until more bytes arrive. */
    if (m->used + size > HD_MAC_BLOCK) {
        unsigned room = HD_MAC_BLOCK - m->used;
        memcpy(m->block + m->used, p, room);
        compress(m, m->block, HD_MAC_BLOCK, 0);
        p += room;
        size -= room;
        m->used = 0;
        while (size > HD_MAC_BLOCK) {
            compress(m, p, HD_MAC_BLOCK, 0);
            p += HD_MAC_BLOCK;
            size -= HD_MAC_BLOCK;
        }
    }
    memcpy(m->block + m->used, p, size);
    m->used += (unsigned)size;
}

void hd_mac_final(hd_mac *m, uint8_t *result)
{
    uint8_t bytes[HD_MAC_MAX];
    memset(m->block + m->used, 0, HD_MAC_BLOCK - m->used);
    compress(m, m->block, m->used, 1);
    for (unsigned i = 0; i < HD_MAC_MAX; i++)
        bytes[i] = (uint8_t)(m->h[i / 8] >> 8 * (i % 8));
    memcpy(result, bytes, m->out);
}

int hd_mac_equal(const uint8_t *a, const uint8_t *b, size_t size)
{
    volatile uint8_t different = 0;
    for (size_t i = 0; i < size; i++)
        different |= a[i] ^ b[i];
    return different == 0;
}
