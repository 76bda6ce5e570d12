/* The server of a TCPStore: one thread with epoll, which never takes the GIL.
 *
 *   hd_server.c   start and stop, the loop, accepting, deadlines, fork
 *   hd_conn.c     one connection: handshake, frames in, replies out
 *   hd_requests.c what each request does
 *   hd_table.c    the contents
 *
 * Of what a stranger sends, the server reads nothing beyond the fixed length of the handshake. */
#ifndef HD_SERVER_H
#define HD_SERVER_H

#include <pthread.h>
#include <stdint.h>

#include "hd_table.h"
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

/* --- between the files of the server ---------------------------------------------------------- */

enum hd_conn_state {
    HD_STRANGER,  /* has not proved itself */
    HD_READY,     /* between messages, or inside one */
    HD_WAITING,   /* its request waits for something */
    HD_REPLYING,  /* a reply did not fit into the socket */
    HD_CLOSED     /* freed after this round of events */
};

/* A piece of a reply: in the connection's own buffer, or in a value. */
typedef struct hd_piece {
    hd_bytes *in; /* NULL: own buffer */
    uint64_t begin, size;
} hd_piece;

typedef struct hd_conn {
    hd_server *server;
    int fd;
    enum hd_conn_state state;
    hd_link all;            /* strangers, or the others, of the server */
    int64_t deadline;       /* ns; INT64_MAX: none */
    int64_t active;         /* ns: when the last request arrived */
    int64_t place;          /* in the heap of deadlines; -1: not in it */
    uint32_t events;        /* what epoll waits for */
    hd_seal in_seal, out_seal;
    uint8_t nonce[HD_NONCE];
    /* the incoming message */
    uint8_t head_bytes[HD_HEAD > HD_ANSWER ? HD_HEAD : HD_ANSWER], tag[HD_TAG];
    hd_head head;
    uint64_t have;          /* bytes of head, body and tag so far */
    hd_bytes *body;         /* NULL when it is being skipped, or has no bytes */
    int skip;               /* too large: read, checked, answered, not kept */
    hd_mac in_mac;
    /* the waiting request */
    uint32_t w_count, w_at;
    hd_item *w_items;
    hd_bytes *w_body;
    hd_link waits;          /* in an entry's list, or the server's list of those that wait for
                             * JOINED */
    hd_entry *w_entry;
    /* the outgoing reply */
    hd_bytes *out;
    hd_piece *pieces;
    uint32_t piece_count, piece;
    uint64_t sent;          /* of the current piece */
    uint64_t sealed;        /* of the current piece: bytes that the tag already covers */
    hd_mac out_mac;
} hd_conn;

struct hd_server {
    pthread_t thread;
    pthread_mutex_t mutex;  /* held by the thread, except while it sleeps */
    int epoll, wake, stop;
    int spins;              /* there is also a core for the callers */
    pid_t pid;
    struct hd_server *next; /* of all servers, for fork */
    int listeners[16], listener_count, paused;
    int64_t pause_end;
    uint8_t key[HD_KEY], identity[HD_IDENTITY];
    hd_limits limits;
    hd_stats stats;
    hd_table table;
    hd_link strangers, members, closed;
    hd_link for_joined;     /* connections in HD_OP_JOINED */
    uint64_t inflight;      /* bytes of incoming messages */
    int64_t now;
    hd_conn **heap;
    int64_t heap_size, heap_room;
    uint8_t *scratch;       /* what was received last */
    uint8_t *build;         /* the reply being built */
    uint64_t build_room, build_size;
    uint64_t build_own;     /* bytes of it that are already in pieces */
    hd_piece *build_pieces;
    uint32_t build_piece_count, build_piece_room;
    hd_item *items;
    uint64_t item_room;
};

enum { HD_SCRATCH = 256 * 1024 };

/* hd_server.c */
void hd_set_deadline(hd_conn *c, int64_t deadline);
void hd_close(hd_conn *c, int dropped);
int hd_watch(hd_conn *c, uint32_t events); /* -1 if epoll refuses */
int hd_rearm(hd_conn *c);                  /* the idle deadline of a connection between requests */

/* hd_conn.c */
hd_conn *hd_conn_new(hd_server *s, int fd);
void hd_conn_free(hd_conn *c);
void hd_conn_readable(hd_conn *c);
void hd_conn_writable(hd_conn *c);
/* Builds a reply: first the items, then finish. If memory runs out, c is closed. */
void hd_reply_begin(hd_server *s);
int hd_reply_bytes(hd_server *s, const void *data, uint64_t size);
int hd_reply_value(hd_server *s, const hd_value *v);
void hd_reply_finish(hd_conn *c, int status, int64_t number, uint32_t items);

/* hd_requests.c */
/* c->head is the request; body may be in `own` (which is NULL if it is in scratch memory). */
void hd_request(hd_conn *c, const uint8_t *body, hd_bytes *own);
void hd_request_late(hd_conn *c);   /* the deadline of a waiting request has passed */
void hd_request_forget(hd_conn *c); /* removes it from all lists */

#endif
