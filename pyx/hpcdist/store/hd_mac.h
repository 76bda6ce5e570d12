/* Keyed BLAKE2b (RFC 7693): the authentication code of the store's messages, the proof in the
 * handshake, and the derivation of session keys. Unlike HMAC, a keyed hash needs no padding rules
 * and no second pass. Pure C, any thread. */
#ifndef HD_MAC_H
#define HD_MAC_H

#include <stddef.h>
#include <stdint.h>

#define HD_MAC_BLOCK 128 /* bytes per compression */
#define HD_MAC_MAX 64    /* bytes of the longest key and the longest result */

typedef struct hd_mac {
    uint64_t h[8];
    uint64_t low, high; /* bytes compressed so far */
    unsigned used;      /* bytes in block */
    unsigned out;       /* bytes of the result */
    uint8_t block[HD_MAC_BLOCK];
} hd_mac;

/* out: 1 to 64 bytes; a key of 0 to 64 bytes. */
void hd_mac_init(hd_mac *m, unsigned out, const void *key, unsigned key_size);
void hd_mac_update(hd_mac *m, const void *data, size_t size);
void hd_mac_final(hd_mac *m, uint8_t *result);

/* Compares in constant time. Returns 1 if equal. */
int hd_mac_equal(const uint8_t *a, const uint8_t *b, size_t size);

#endif
