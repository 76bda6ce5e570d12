/* The server of a TCPStore: one thread with epoll, which never takes the GIL.
 *
 *   hd_server.c     start and stop, the loop, accepting, fork
 *   hd_receive.c    handshake, frames in
 *   hd_requests.c   what each request does
 *   hd_waiting.c    requests that wait for something
 *   hd_reply.c      replies out
 *   hd_conn_life.c  one connection, from the greeting to its end
 *   hd_deadlines.c  the heap of deadlines
 *   hd_table.c      the contents
 *
 * Of what a stranger sends, the server reads nothing beyond the fixed length of the handshake. */
#ifndef HD_SERVER_H
#define HD_SERVER_H

#include <stdint.h>

#include "hd_wire.h"

typedef struct hd_limits {
    uint64_t bytes;          /* limit for keys and values; and again for messages in transit to
                              * the server */
    int64_t handshake_ns;    /* a connection has to prove itself within this time */
    int64_t message_ns;      /* a message has to be complete, or a reply taken, within this time and
                                a second for each MiB */
    int64_t idle_ns;         /* a connection without a request for this long is closed; 0: never */
    int64_t connections;     /* limit for those that have proved themselves */
    int64_t strangers;       /* limit for those that have not yet; one more, and the oldest is
                              * dropped */
    int64_t world_size;      /* clients must name the same number; -1: any number */
} hd_limits;

typedef struct hd_stats {
    uint64_t keys, bytes, connections, strangers, joined;
    uint64_t accepted, refused, dropped; /* refused: wrong proof; dropped: slow or senseless */
} hd_stats;

typedef struct hd_server hd_server;

/* Takes over the listening sockets. Returns NULL with errno set if it cannot start. */
hd_server *hd_server_start(const int *listeners, int count, const uint8_t key[HD_KEY],
                           const hd_limits *limits);
/* Ends the thread, closes all connections, frees everything. Does nothing in a forked child. */
void hd_server_stop(hd_server *s);
void hd_server_stats(hd_server *s, hd_stats *out);
/* Whether this process is the one that started the server. */
int hd_server_here(const hd_server *s);

#endif
