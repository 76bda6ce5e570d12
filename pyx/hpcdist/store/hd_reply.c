/* Replies out: small ones in one call, long ones piece by piece. */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "hd_conn.h"
#include "hd_conn_life.h"
#include "hd_deadlines.h"
#include "hd_mac.h"
#include "hd_reply.h"
#include "hd_table.h"
#include "hd_wire.h"

#define SMALL 4096 /* bytes: values of this size, and longer ones, are sent from where they are */
/* Bytes that one connection may send before it is the others' turn. */
#define TURN (4 * (uint64_t)HD_SCRATCH)

void hd_reply_begin(hd_server *s)
{
    s->build_size = HD_HEAD;
    s->build_piece_count = 0;
    s->build_own = 0;
}

static int build_room(hd_server *s, uint64_t size)
{
    uint64_t wanted = s->build_size + size + HD_TAG;
    if (wanted <= s->build_room)
        return 0;
    wanted += wanted / 2 + SMALL;
    uint8_t *wider = realloc(s->build, wanted);
    if (!wider)
        return -1;
    s->build = wider;
    s->build_room = wanted;
    return 0;
}

int hd_reply_bytes(hd_server *s, const void *data, uint64_t size)
{
    if (build_room(s, 8 + size))
        return -1;
    hd_store64(s->build + s->build_size, size);
    if (size)
        memcpy(s->build + s->build_size + 8, data, size);
    s->build_size += 8 + size;
    return 0;
}

static int add_piece(hd_server *s, hd_bytes *in, uint64_t begin, uint64_t size)
{
    if (s->build_piece_count == s->build_piece_room) {
        uint32_t room = 2 * s->build_piece_room + 16;
        hd_piece *wider = realloc(s->build_pieces, room * sizeof *wider);
        if (!wider)
            return -1;
        s->build_pieces = wider;
        s->build_piece_room = room;
    }
    s->build_pieces[s->build_piece_count++] = (hd_piece){in, begin, size};
    s->build_own += in ? 0 : size;
    return 0;
}

int hd_reply_value(hd_server *s, const hd_value *v)
{
    if (v->size < SMALL)
        return hd_reply_bytes(s, hd_value_at(v), v->size);
    if (build_room(s, 8))
        return -1;
    hd_store64(s->build + s->build_size, v->size);
    s->build_size += 8;
    if (add_piece(s, NULL, s->build_own, s->build_size - s->build_own) ||
        add_piece(s, v->in, v->begin, v->size))
        return -1;
    return 0;
}

static void reply_done(hd_conn *c)
{
    free(c->pieces);
    c->pieces = NULL;
    c->piece_count = c->piece = 0;
    hd_bytes_drop(c->out);
    c->out = NULL;
    c->state = HD_READY;
    hd_rearm(c);
    if (hd_watch(c, EPOLLIN))
        hd_close(c, 1);
}

/* Sends as much as the socket takes. The last piece is the tag, computed when everything before it
 * is sealed. */
void hd_conn_writable(hd_conn *c)
{
    if (c->state != HD_REPLYING) {
        hd_close(c, 1);
        return;
    }
    for (uint64_t turn = 0; turn < TURN && c->piece < c->piece_count;) {
        hd_piece *p = &c->pieces[c->piece];
        uint8_t *at = (p->in ? p->in->at : c->out->at) + p->begin;
        uint64_t n = p->size - c->sent;
        if (n > HD_SCRATCH)
            n = HD_SCRATCH;
        turn += n;
        if (c->sealed < c->sent + n) {
            if (c->piece == c->piece_count - 1)
                hd_mac_final(&c->out_mac, at);
            else
                hd_mac_update(&c->out_mac, at + c->sealed, c->sent + n - c->sealed);
            c->sealed = c->sent + n;
        }
        ssize_t done = send(c->fd, at + c->sent, n, MSG_NOSIGNAL);
        if (done < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (done < 0) {
            hd_close(c, 0);
            return;
        }
        c->sent += (uint64_t)done;
        if (c->sent == p->size) {
            hd_bytes_drop(p->in);
            c->piece++;
            c->sent = c->sealed = 0;
        }
    }
    if (c->piece == c->piece_count)
        reply_done(c);
}

/* Keeps what could not be sent at once. */
static int keep(hd_conn *c, uint64_t size, const hd_piece *pieces, uint32_t count)
{
    hd_server *s = c->server;
    c->out = hd_bytes_new(size);
    c->pieces = malloc(count * sizeof *pieces);
    if (!c->out || !c->pieces) {
        free(c->pieces);
        c->pieces = NULL;
        return -1;
    }
    memcpy(c->out->at, s->build, size);
    memcpy(c->pieces, pieces, count * sizeof *pieces);
    for (uint32_t i = 0; i < count; i++)
        if (pieces[i].in)
            pieces[i].in->owners++;
    c->piece_count = count;
    c->piece = 0;
    c->sent = c->sealed = 0;
    c->state = HD_REPLYING;
    return 0;
}

static void send_small(hd_conn *c)
{
    hd_server *s = c->server;
    hd_mac m;
    hd_seal_begin(&c->out_seal, &m);
    hd_mac_update(&m, s->build, s->build_size);
    hd_mac_final(&m, s->build + s->build_size); /* build_room left space for it */
    uint64_t total = s->build_size + HD_TAG;
    ssize_t done = send(c->fd, s->build, total, MSG_NOSIGNAL);
    if (done == (ssize_t)total) {
        c->active = s->now;
        if (c->deadline != INT64_MAX && !s->limits.idle_ns)
            hd_set_deadline(c, INT64_MAX);
        else if (s->limits.idle_ns)
            hd_rearm(c);
        return;
    }
    if (done < 0 && errno != EAGAIN && errno != EINTR) {
        hd_close(c, 0);
        return;
    }
    uint64_t sent = done < 0 ? 0 : (uint64_t)done;
    hd_piece rest = {NULL, sent, total - sent};
    if (keep(c, total, &rest, 1) || hd_watch(c, EPOLLOUT)) {
        hd_close(c, 1);
        return;
    }
    c->sealed = rest.size;
    hd_set_deadline(c, hd_patience(s, total));
}

void hd_reply_finish(hd_conn *c, int status, int64_t number, uint32_t items)
{
    hd_server *s = c->server;
    hd_head head = {.id = c->head.id, .items = items, .op = (uint16_t)status, .number = number};
    if (c->state == HD_CLOSED)
        return;
    if (build_room(s, 0)) {
        hd_close(c, 1);
        return;
    }
    uint64_t total = s->build_size;
    for (uint32_t i = 0; i < s->build_piece_count; i++)
        total += s->build_pieces[i].in ? s->build_pieces[i].size : 0;
    head.body = total - HD_HEAD;
    hd_head_pack(&head, s->build);
    if (!s->build_piece_count) {
        send_small(c);
        return;
    }
    if ((s->build_own < s->build_size &&
         add_piece(s, NULL, s->build_own, s->build_size - s->build_own)) ||
        add_piece(s, NULL, s->build_size, HD_TAG) ||
        keep(c, s->build_size + HD_TAG, s->build_pieces, s->build_piece_count) ||
        hd_watch(c, EPOLLOUT)) {
        hd_close(c, 1);
        return;
    }
    hd_seal_begin(&c->out_seal, &c->out_mac);
    hd_set_deadline(c, hd_patience(s, total));
    hd_conn_writable(c);
}

void hd_reply_number(hd_conn *c, int status, int64_t number)
{
    hd_reply_begin(c->server);
    hd_reply_finish(c, status, number, 0);
}

/* Without memory for an answer there is no answer: the client sees the connection end. */
void hd_reply_one_value(hd_conn *c, const hd_value *v)
{
    hd_reply_begin(c->server);
    if (hd_reply_value(c->server, v))
        hd_close(c, 1);
    else
        hd_reply_finish(c, HD_RE_DONE, 0, 1);
}

void hd_reply_one_item(hd_conn *c, int status, const uint8_t *data, uint64_t size)
{
    hd_reply_begin(c->server);
    if (hd_reply_bytes(c->server, data, size))
        hd_close(c, 1);
    else
        hd_reply_finish(c, status, 0, 1);
}
