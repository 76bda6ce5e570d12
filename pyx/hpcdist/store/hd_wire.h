/* The protocol between a store's client and server.
 *
 * The server begins with a greeting: a magic word and 32 random bytes. The client answers with the
 * magic word, 32 random bytes of its own and a proof, a keyed hash of both; the server answers
 * with its identity and its own proof. A peer without the key gets no further, and neither proof
 * is of use in another connection or in the other direction.
 *
 * Then follow frames, each a head of fixed size, a body and a tag of 16 bytes. The tag is a keyed
 * hash of the frame's number in its direction, head and body, with a key derived from both random
 * numbers: a recorded, repeated, omitted or changed frame is detected. Numbers are little endian.
 * A body is a list of items, each its length in 8 bytes and that many bytes. */
#ifndef HD_WIRE_H
#define HD_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "hd_mac.h"

enum {
    HD_KEY = 32,   /* bytes of the job's key */
    HD_NONCE = 32, /* random bytes from each side */
    HD_MAGIC = 8,
    HD_IDENTITY = 16, /* random bytes that a server keeps for its lifetime */
    HD_PROOF = 32,
    HD_TAG = 16,
    HD_GREETING = HD_MAGIC + HD_NONCE,
    HD_ANSWER = HD_MAGIC + HD_NONCE + HD_PROOF,
    HD_WELCOME = HD_MAGIC + HD_IDENTITY + HD_PROOF,
    HD_HEAD = 40,
};

#define HD_MAGIC_TEXT "hpcdSt\0\1"   /* the last byte is the version */
#define HD_REFUSED_TEXT "hpcdNo\0\1" /* instead of a welcome: the proof is wrong */
#define HD_CROWDED_TEXT "hpcdFu\0\1" /* instead of a greeting: too many connections */

/* Requests: items, numbers -> items, number of the reply. */
enum hd_op {
    HD_OP_SET = 1,  /* key, value, key, value ...                                     */
    HD_OP_GET,      /* keys; waits               -> values                            */
    HD_OP_ADD,      /* key; number               -> the sum                           */
    HD_OP_EXCHANGE, /* key, expected, desired    -> value                             */
    HD_OP_CHECK,    /* keys                      -> 0 or 1                            */
    HD_OP_WAIT,     /* keys; waits                                                    */
    HD_OP_DELETE,   /* key                       -> 0 or 1                            */
    HD_OP_APPEND,   /* key, value                                                     */
    HD_OP_PUSH,     /* key, value                                                     */
    HD_OP_POP,      /* key; number: whether to wait -> value                          */
    HD_OP_LENGTH,   /* key                       -> number of values in the queue     */
    HD_OP_BARRIER,  /* key; number of callers; waits                                  */
    HD_OP_COUNT,    /* prefix                    -> number of keys                    */
    HD_OP_LIST,     /* prefix                    -> keys                              */
    HD_OP_JOIN,     /* number of processes, or -1 -> how many have joined             */
    HD_OP_JOINED,   /* number of processes; waits -> how many have joined             */
    HD_OP_END
};

/* The status of a reply. */
enum hd_status {
    HD_RE_DONE = 0,
    HD_RE_LATE,      /* items: some of the missing keys; number: how many are missing, or how many
                      * clients arrived */
    HD_RE_NO_NUMBER, /* item: the start of the key's value */
    HD_RE_OVERFLOW,  /* number: the key's value */
    HD_RE_FULL,      /* number: the limit in bytes */
    HD_RE_EMPTY,
    HD_RE_SIZES,    /* number: the world size that the others gave */
    HD_RE_SENSELESS /* no such request */
};

typedef struct hd_head {
    uint64_t body; /* bytes */
    uint32_t id;   /* of the request; its reply has the same */
    uint32_t items;
    uint16_t op; /* or the reply's status */
    int64_t number;
    int64_t wait_ns; /* how long the server may wait */
} hd_head;

typedef struct hd_item {
    const uint8_t *at;
    uint64_t size;
} hd_item;

static inline uint64_t hd_load64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

static inline void hd_store64(uint8_t *p, uint64_t v)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    memcpy(p, &v, 8);
}

void hd_head_pack(const hd_head *h, uint8_t out[HD_HEAD]);
/* Returns 0, or -1 if it cannot be a head. */
int hd_head_unpack(const uint8_t in[HD_HEAD], hd_head *h);

/* Finds the items of a body. Returns 0, or -1 unless they fill it exactly. */
int hd_items(const uint8_t *body, uint64_t size, uint32_t count, hd_item *items);

/* The authentication of one direction. */
typedef struct hd_seal {
    hd_mac keyed;   /* after the key, before any message */
    uint64_t count; /* frames so far */
} hd_seal;

/* Begins the tag of the next frame. */
void hd_seal_begin(hd_seal *s, hd_mac *m);

void hd_proof(const uint8_t *key, int of_server, const uint8_t *server_nonce,
              const uint8_t *client_nonce, const uint8_t *identity, uint8_t proof[HD_PROOF]);
void hd_seals(const uint8_t *key, const uint8_t *server_nonce, const uint8_t *client_nonce,
              hd_seal *to_server, hd_seal *to_client);

/* Random bytes from the kernel. Returns 0, or -1. */
int hd_random(void *out, size_t size);
/* Nanoseconds of CLOCK_MONOTONIC. */
int64_t hd_clock(void);

#endif
