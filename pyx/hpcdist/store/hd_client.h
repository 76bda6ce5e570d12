/* A client's connection to a store's server: one request at a time, from one thread at a time. No
 * GIL; every wait ends at its deadline, and checks for signals every 50 ms. */
#ifndef HD_CLIENT_H
#define HD_CLIENT_H

#include "hd_wire.h"

enum hd_outcome {
    HD_FINE = 0,
    HD_TOO_LATE, /* the deadline passed first */
    HD_GONE,     /* the peer closed the connection */
    HD_SYSTEM,   /* errno says why */
    HD_REFUSED,  /* the server rejects our proof */
    HD_CROWDED,  /* the server has no room */
    HD_FOREIGN,  /* the peer is not a store's server, or has another version */
    HD_IMPOSTOR, /* the server does not know the key, or a message was changed in transit */
    HD_NO_MEMORY,
    HD_SIGNAL /* the hook asked to stop */
};

/* Called every 50 ms and when a system call was interrupted; nonzero ends the wait. */
typedef int (*hd_hook)(void);

typedef struct hd_client {
    int fd;
    hd_seal up, down;
    uint8_t identity[HD_IDENTITY];
    uint32_t id;
    uint8_t *buffer;
    uint64_t room;
    int64_t look; /* when a call that makes progress looks at signals and the time */
} hd_client;

typedef struct hd_reply {
    hd_head head;
    const uint8_t *body; /* in the client's buffer, until the next call */
} hd_reply;

void hd_client_init(hd_client *c);
/* The handshake on a connected, blocking socket, which the client owns from then on. */
int hd_client_begin(hd_client *c, int fd, const uint8_t key[HD_KEY], int64_t deadline,
                    hd_hook hook);
int hd_client_call(hd_client *c, hd_head *head, const hd_item *items, int64_t deadline,
                   hd_hook hook, hd_reply *reply);
/* Whether the peer has closed an idle connection. */
int hd_client_ended(const hd_client *c);
/* Frees memory that a long reply needed. */
void hd_client_relax(hd_client *c);
void hd_client_end(hd_client *c);

#endif
