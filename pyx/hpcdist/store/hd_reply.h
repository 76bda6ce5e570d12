/* Replies out. Builds a reply: first the items, then finish. If memory runs out, c is closed. */
#ifndef HD_REPLY_H
#define HD_REPLY_H

#include <stdint.h>

#include "hd_conn.h"

void hd_reply_begin(hd_server *s);
int hd_reply_bytes(hd_server *s, const void *data, uint64_t size);
int hd_reply_value(hd_server *s, const hd_value *v);
void hd_reply_finish(hd_conn *c, int status, int64_t number, uint32_t items);
void hd_conn_writable(hd_conn *c);

/* Whole replies: without items, with a value, with a text. */
void hd_reply_number(hd_conn *c, int status, int64_t number);
void hd_reply_one_value(hd_conn *c, const hd_value *v);
void hd_reply_one_item(hd_conn *c, int status, const uint8_t *data, uint64_t size);

#endif
