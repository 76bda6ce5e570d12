/* A connection from the greeting to its end. */
#ifndef HD_CONN_LIFE_H
#define HD_CONN_LIFE_H

#include <stdint.h>

#include "hd_conn.h"

hd_conn *hd_conn_new(hd_server *s, int fd); /* a stranger, greeted */
void hd_conn_free(hd_conn *c);
void hd_close(hd_conn *c, int dropped);
int hd_watch(hd_conn *c, uint32_t events); /* -1 if epoll refuses */
void hd_message_over(hd_conn *c);          /* the incoming one */
void hd_request_forget(hd_conn *c);        /* the waiting one: removed from all lists, and freed */
/* The moment by which that many bytes have to be there. */
int64_t hd_patience(const hd_server *s, uint64_t bytes);

#endif
