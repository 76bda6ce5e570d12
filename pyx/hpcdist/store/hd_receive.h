/* Bytes in: the handshake, then messages. */
#ifndef HD_RECEIVE_H
#define HD_RECEIVE_H

#include "hd_conn.h"

void hd_conn_readable(hd_conn *c);

#endif
