#include "hd_wire.h"
#include "hd_mac.h"

#include <errno.h>
#include <sys/random.h>
#include <time.h>

static void store32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

static uint32_t load32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

void hd_head_pack(const hd_head *h, uint8_t out[HD_HEAD])
{
    hd_store64(out, h->body);
    store32(out + 8, h->id);
    store32(out + 12, h->items);
    store32(out + 16, h->op);
    store32(out + 20, 0);
    hd_store64(out + 24, (uint64_t)h->number);
    hd_store64(out + 32, (uint64_t)h->wait_ns);
}

int hd_head_unpack(const uint8_t in[HD_HEAD], hd_head *h)
{
    uint32_t op = load32(in + 16);
    h->body = hd_load64(in);
    h->id = load32(in + 8);
    h->items = load32(in + 12);
    h->op = (uint16_t)op;
    h->number = (int64_t)hd_load64(in + 24);
    h->wait_ns = (int64_t)hd_load64(in + 32);
    /* every item has an 8-byte length, and no body fills half an address space */
    if (op > UINT16_MAX || load32(in + 20) || h->body / 8 < h->items || h->body >> 62)
        return -1;
    return 0;
}

int hd_items(const uint8_t *body, uint64_t size, uint32_t count, hd_item *items)
{
    for (uint32_t i = 0; i < count; i++) {
        if (size < 8)
            return -1;
        uint64_t length = hd_load64(body);
        body += 8;
        size -= 8;
        if (length > size)
            return -1;
        items[i].at = body;
        items[i].size = length;
        body += length;
        size -= length;
    }
    return size ? -1 : 0;
}

void hd_seal_begin(hd_seal *s, hd_mac *m)
{
    uint8_t number[8];
    *m = s->keyed;
    hd_store64(number, s->count++);
    hd_mac_update(m, number, sizeof number);
}

void hd_proof(const uint8_t *key, int of_server, const uint8_t *server_nonce,
              const uint8_t *client_nonce, const uint8_t *identity, uint8_t proof[HD_PROOF])
{
    hd_mac m;
    hd_mac_init(&m, HD_PROOF, key, HD_KEY);
    hd_mac_update(&m, of_server ? "hpcdist server 1" : "hpcdist client 1", 16);
    hd_mac_update(&m, server_nonce, HD_NONCE);
    hd_mac_update(&m, client_nonce, HD_NONCE);
    if (of_server)
        hd_mac_update(&m, identity, HD_IDENTITY);
    hd_mac_final(&m, proof);
}

static void seal(const uint8_t *key, const char *purpose, const uint8_t *server_nonce,
                 const uint8_t *client_nonce, hd_seal *s)
{
    uint8_t derived[32];
    hd_mac m;
    hd_mac_init(&m, sizeof derived, key, HD_KEY);
    hd_mac_update(&m, purpose, 16);
    hd_mac_update(&m, server_nonce, HD_NONCE);
    hd_mac_update(&m, client_nonce, HD_NONCE);
    hd_mac_final(&m, derived);
    hd_mac_init(&s->keyed, HD_TAG, derived, sizeof derived);
    s->count = 0;
}

void hd_seals(const uint8_t *key, const uint8_t *server_nonce, const uint8_t *client_nonce,
              hd_seal *to_server, hd_seal *to_client)
{
    seal(key, "hpcdist upward 1", server_nonce, client_nonce, to_server);
    seal(key, "hpcdist downw. 1", server_nonce, client_nonce, to_client);
}

int hd_random(void *out, size_t size)
{
    uint8_t *p = out;
    while (size) {
        ssize_t n = getrandom(p, size, 0);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return -1;
        }
        p += n;
        size -= (size_t)n;
    }
    return 0;
}

int64_t hd_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
