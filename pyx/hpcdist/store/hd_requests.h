/* What each request does. */
#ifndef HD_REQUESTS_H
#define HD_REQUESTS_H

#include <stdint.h>

#include "hd_conn.h"

/* c->head is the request; body may be in `own` (which is NULL if it is in scratch memory). */
void hd_request(hd_conn *c, const uint8_t *body, hd_bytes *own);

#endif
