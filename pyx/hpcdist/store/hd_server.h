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

#include "hd_limits.h"
#include "hd_wire.h"

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
