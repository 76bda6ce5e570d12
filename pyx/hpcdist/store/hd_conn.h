/* A connection of the server, and the server as its files see it. */
#ifndef HD_CONN_H
#define HD_CONN_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "hd_limits.h"
#include "hd_table.h"
#include "hd_wire.h"

enum { HD_SCRATCH = 256 * 1024 };

typedef struct hd_server hd_server;

enum hd_conn_state {
    HD_STRANGER, /* has not proved itself */
    HD_READY,    /* between messages, or inside one */
    HD_WAITING,  /* its request waits for something */
    HD_REPLYING, /* a reply did not fit into the socket */
    HD_CLOSED    /* freed after this round of events */
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
    hd_link all;      /* strangers, or the others, of the server */
    int64_t deadline; /* ns; INT64_MAX: none */
    int64_t active;   /* ns: when the last request arrived */
    int64_t place;    /* in the heap of deadlines; -1: not in it */
    uint32_t events;  /* what epoll waits for */
    hd_seal in_seal, out_seal;
    uint8_t nonce[HD_NONCE];
    /* the incoming message */
    uint8_t head_bytes[HD_HEAD > HD_ANSWER ? HD_HEAD : HD_ANSWER], tag[HD_TAG];
    hd_head head;
    uint64_t have;  /* bytes of head, body and tag so far */
    hd_bytes *body; /* NULL when it is being skipped, or has no bytes */
    int skip;       /* too large: read, checked, answered, not kept */
    hd_mac in_mac;
    /* the waiting request */
    uint32_t w_count, w_at;
    hd_item *w_items;
    hd_bytes *w_body;
    hd_link waits; /* in an entry's list, or the server's list of those that wait for
                    * JOINED */
    hd_entry *w_entry;
    /* the outgoing reply */
    hd_bytes *out;
    hd_piece *pieces;
    uint32_t piece_count, piece;
    uint64_t sent;   /* of the current piece */
    uint64_t sealed; /* of the current piece: bytes that the tag already covers */
    hd_mac out_mac;
} hd_conn;

struct hd_server {
    pthread_t thread;
    pthread_mutex_t mutex; /* held by the thread, except while it sleeps */
    int epoll, wake, stop;
    int spins; /* there is also a core for the callers */
    pid_t pid;
    struct hd_server *next; /* of all servers, for fork */
    int listeners[16], listener_count, paused;
    int64_t pause_end;
    uint8_t key[HD_KEY], identity[HD_IDENTITY];
    hd_limits limits;
    hd_stats stats;
    hd_table table;
    hd_link strangers, members, closed;
    hd_link for_joined; /* connections in HD_OP_JOINED */
    uint64_t inflight;  /* bytes of incoming messages */
    int64_t now;
    hd_conn **heap;
    int64_t heap_size, heap_room;
    uint8_t *scratch; /* what was received last */
    uint8_t *build;   /* the reply being built */
    uint64_t build_room, build_size;
    uint64_t build_own; /* bytes of it that are already in pieces */
    hd_piece *build_pieces;
    uint32_t build_piece_count, build_piece_room;
    hd_item *items;
    uint64_t item_room;
};

/* The connection that a link belongs to. */
#define HD_CONN_OF(l, member) ((hd_conn *)((char *)(l) - offsetof(hd_conn, member)))

#endif
