/* Requests that wait until something is stored. */
#ifndef HD_WAITING_H
#define HD_WAITING_H

#include <stdint.h>

#include "hd_conn.h"

/* Keeps the request of c: its items, and the deadline it came with. -1: c is closed. body may be in
 * `own`, which is NULL if it is in scratch memory. */
int hd_wait_begin(hd_conn *c, const hd_item *items, uint32_t count, const uint8_t *body,
                  hd_bytes *own);
/* Answers if all items are present, or waits for them. */
void hd_wait_for(hd_conn *c, const hd_item *items, uint32_t count, const uint8_t *body,
                 hd_bytes *own);
/* Whether all items are there. */
int hd_all_there(const hd_conn *c, const hd_item *items, uint32_t count);
void hd_reply_found(hd_conn *c, const hd_item *items, uint32_t count);
/* Something was stored in the entry. The clients that wait for it try again, in order of
 * arrival. */
void hd_wake(hd_entry *e);
void hd_wake_joined(hd_server *s);
void hd_request_late(hd_conn *c); /* the deadline of a waiting request has passed */

#endif
