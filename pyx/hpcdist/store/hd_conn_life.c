/* One connection of the server: from the greeting to its end. */
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hd_conn.h"
#include "hd_conn_life.h"
#include "hd_deadlines.h"
#include "hd_table.h"
#include "hd_wire.h"

hd_conn *hd_conn_new(hd_server *s, int fd)
{
    uint8_t greeting[HD_GREETING];
    hd_conn *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->server = s;
    c->fd = fd;
    c->place = -1;
    c->deadline = INT64_MAX;
    hd_link_init(&c->all);
    hd_link_init(&c->waits);
    memcpy(greeting, HD_MAGIC_TEXT, HD_MAGIC);
    if (hd_random(c->nonce, HD_NONCE) || hd_watch(c, EPOLLIN)) {
        free(c);
        return NULL;
    }
    memcpy(greeting + HD_MAGIC, c->nonce, HD_NONCE);
    s->stats.strangers++;
    hd_link_last(&s->strangers, &c->all);
    hd_set_deadline(c, s->now + s->limits.handshake_ns);
    /* the socket buffer is empty: it fits, or the peer has gone */
    if (send(fd, greeting, sizeof greeting, MSG_NOSIGNAL) != sizeof greeting)
        hd_close(c, 0);
    return c;
}

void hd_message_over(hd_conn *c)
{
    if (c->have >= HD_HEAD && !c->skip)
        c->server->inflight -= c->head.body;
    c->have = 0;
    c->skip = 0;
}

void hd_conn_free(hd_conn *c)
{
    hd_message_over(c);
    hd_bytes_drop(c->body);
    hd_bytes_drop(c->out);
    for (uint32_t i = c->piece; i < c->piece_count; i++)
        hd_bytes_drop(c->pieces[i].in);
    free(c->pieces);
    free(c);
}

int64_t hd_patience(const hd_server *s, uint64_t bytes)
{
    int64_t mebibytes = (int64_t)(bytes >> 20);
    if (mebibytes > 1 << 20) /* announced by a client that will not send it */
        mebibytes = 1 << 20;
    return s->now + s->limits.message_ns + mebibytes * 1000000000;
}

int hd_watch(hd_conn *c, uint32_t events)
{
    if (c->events == events)
        return 0;
    struct epoll_event e = {.events = events, .data.ptr = c};
    int how = c->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    c->events = events;
    return epoll_ctl(c->server->epoll, how, c->fd, &e);
}

static void stop_waiting(hd_conn *c)
{
    hd_entry *e = c->w_entry;
    hd_link_out(&c->waits);
    c->w_entry = NULL;
    if (e && c->head.op == HD_OP_BARRIER)
        e->arrived--;
    if (e)
        hd_table_tidy(&c->server->table, e);
}

void hd_request_forget(hd_conn *c)
{
    stop_waiting(c);
    free(c->w_items);
    hd_bytes_drop(c->w_body);
    c->w_items = NULL;
    c->w_body = NULL;
    c->w_count = 0;
    c->state = HD_READY;
}

void hd_close(hd_conn *c, int dropped)
{
    hd_server *s = c->server;
    if (c->state == HD_CLOSED)
        return;
    if (c->state == HD_WAITING)
        hd_request_forget(c);
    if (c->state == HD_STRANGER)
        s->stats.strangers--;
    else
        s->stats.connections--;
    s->stats.dropped += dropped != 0;
    c->state = HD_CLOSED;
    hd_set_deadline(c, INT64_MAX);
    close(c->fd); /* that removes it from epoll: there is no duplicate */
    c->fd = -1;
    hd_link_out(&c->all);
    hd_link_last(&s->closed, &c->all);
}
