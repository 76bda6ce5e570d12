/* What a server allows, and what it has counted. */
#ifndef HD_LIMITS_H
#define HD_LIMITS_H

#include <stdint.h>

typedef struct hd_limits {
    uint64_t bytes;       /* limit for keys and values; and again for messages in transit to
                           * the server */
    int64_t handshake_ns; /* a connection has to prove itself within this time */
    int64_t message_ns;   /* a message has to be complete, or a reply taken, within this time and
                             a second for each MiB */
    int64_t idle_ns;      /* a connection without a request for this long is closed; 0: never */
    int64_t connections;  /* limit for those that have proved themselves */
    int64_t strangers;    /* limit for those that have not yet; one more, and the oldest is
                           * dropped */
    int64_t world_size;   /* clients must name the same number; -1: any number */
} hd_limits;

typedef struct hd_stats {
    uint64_t keys, bytes, connections, strangers, joined;
    uint64_t accepted, refused, dropped; /* refused: wrong proof; dropped: slow or senseless */
} hd_stats;

#endif
