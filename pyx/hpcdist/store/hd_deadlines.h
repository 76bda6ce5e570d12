/* Deadlines of connections: a heap, the nearest on top. */
#ifndef HD_DEADLINES_H
#define HD_DEADLINES_H

#include <stdint.h>

#include "hd_conn.h"

int hd_deadlines_room(hd_server *s); /* for one more connection; -1: no memory */
void hd_set_deadline(hd_conn *c, int64_t deadline);
void hd_rearm(hd_conn *c); /* the idle deadline of a connection between requests */

#endif
