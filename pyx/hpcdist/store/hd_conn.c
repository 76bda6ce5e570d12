/* One connection of the server: handshake, messages in, replies out. */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hd_server.h"

enum {
    SMALL = 4096,         /* longer values, and those of this size, are sent from where they are */
    UNCHECKED = 1 << 16,  /* messages up to this size are always read */
};

/* Bytes that one connection may send before it is the others' turn. */
#define TURN (4 * (uint64_t)HD_SCRATCH)

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

static void message_over(hd_conn *c)
{
    if (c->have >= HD_HEAD && !c->skip)
        c->server->inflight -= c->head.body;
    c->have = 0;
    c->skip = 0;
}

void hd_conn_free(hd_conn *c)
{
    message_over(c);
    hd_bytes_drop(c->body);
    hd_bytes_drop(c->out);
    for (uint32_t i = c->piece; i < c->piece_count; i++)
        hd_bytes_drop(c->pieces[i].in);
    free(c->pieces);
    free(c);
}

static int64_t patience(const hd_server *s, uint64_t bytes)
{
    int64_t mebibytes = (int64_t)(bytes >> 20);
    if (mebibytes > 1 << 20) /* announced by a client that will not send it */
        mebibytes = 1 << 20;
    return s->now + s->limits.message_ns + mebibytes * 1000000000;
}

/* --- the handshake ----------------------------------------------------------------------------- */

static void part(hd_conn *c, const char *text)
{
    if (send(c->fd, text, HD_MAGIC, MSG_NOSIGNAL) < 0)
        c->server->stats.dropped++;
    hd_close(c, 0);
}

static void admit(hd_conn *c)
{
    hd_server *s = c->server;
    const uint8_t *nonce = c->head_bytes + HD_MAGIC;
    uint8_t welcome[HD_WELCOME], proof[HD_PROOF];
    hd_proof(s->key, 0, c->nonce, nonce, NULL, proof);
    if (memcmp(c->head_bytes, HD_MAGIC_TEXT, HD_MAGIC) ||
        !hd_mac_equal(proof, nonce + HD_NONCE, HD_PROOF)) {
        s->stats.refused++;
        part(c, HD_REFUSED_TEXT);
        return;
    }
    if ((int64_t)s->stats.connections >= s->limits.connections) {
        part(c, HD_CROWDED_TEXT);
        return;
    }
    memcpy(welcome, HD_MAGIC_TEXT, HD_MAGIC);
    memcpy(welcome + HD_MAGIC, s->identity, HD_IDENTITY);
    hd_proof(s->key, 1, c->nonce, nonce, s->identity, welcome + HD_MAGIC + HD_IDENTITY);
    hd_seals(s->key, c->nonce, nonce, &c->in_seal, &c->out_seal);
    c->have = 0;
    c->state = HD_READY;
    s->stats.strangers--;
    s->stats.connections++;
    hd_link_out(&c->all);
    hd_link_last(&s->members, &c->all);
    hd_rearm(c);
    if (send(c->fd, welcome, sizeof welcome, MSG_NOSIGNAL) != sizeof welcome)
        hd_close(c, 0);
}

/* --- messages in ------------------------------------------------------------------------------- */

static int begin_message(hd_conn *c)
{
    hd_server *s = c->server;
    if (hd_head_unpack(c->head_bytes, &c->head))
        return -1;
    hd_seal_begin(&c->in_seal, &c->in_mac);
    hd_mac_update(&c->in_mac, c->head_bytes, HD_HEAD);
    /* The limit applies to messages in transit separately, so that a long value can replace
     * another; whether a value fits into the store is checked when it has arrived. */
    if (c->head.body > UNCHECKED &&
        (c->head.body > s->limits.bytes || s->inflight > s->limits.bytes - c->head.body))
        c->skip = 1;
    else
        s->inflight += c->head.body;
    hd_set_deadline(c, patience(s, c->head.body));
    return 0;
}

/* Room for the next bytes: grows with what has arrived, not with what was announced. */
static int widen(hd_conn *c)
{
    uint64_t stored = c->have - HD_HEAD;
    uint64_t room = c->body ? c->body->room : 0;
    if (stored < room)
        return 0;
    uint64_t wanted = room ? 2 * room : HD_SCRATCH;
    if (wanted > c->head.body)
        wanted = c->head.body;
    hd_bytes *wider = realloc(c->body, sizeof *wider + wanted);
    if (!wider)
        return -1;
    wider->owners = 1;
    wider->room = wanted;
    c->body = wider;
    return 0;
}

static void message_complete(hd_conn *c, const uint8_t *body, const uint8_t *tag)
{
    uint8_t right[HD_TAG];
    hd_bytes *own = c->body;
    int skipped = c->skip;
    hd_mac_final(&c->in_mac, right);
    c->body = NULL;
    message_over(c);
    if (!hd_mac_equal(right, tag, HD_TAG)) {
        hd_close(c, 1);
    } else if (skipped) {
        hd_reply_begin(c->server);
        hd_reply_finish(c, HD_RE_FULL, (int64_t)c->server->limits.bytes, 0);
    } else {
        hd_request(c, body, own);
    }
    hd_bytes_drop(own);
}

/* Handles a message that has arrived in one piece in place. Returns its size, or 0. */
static uint64_t whole_message(hd_conn *c, const uint8_t *data, uint64_t size)
{
    hd_head head;
    if (size < HD_HEAD + HD_TAG || hd_head_unpack(data, &head) ||
        head.body > size - HD_HEAD - HD_TAG)
        return 0;
    c->head = head;
    hd_seal_begin(&c->in_seal, &c->in_mac);
    hd_mac_update(&c->in_mac, data, HD_HEAD + head.body);
    message_complete(c, data + HD_HEAD, data + HD_HEAD + head.body);
    return HD_HEAD + head.body + HD_TAG;
}

static void body_came(hd_conn *c, const uint8_t *data, uint64_t size)
{
    hd_mac_update(&c->in_mac, data, size);
    c->have += size;
}

static void feed(hd_conn *c, const uint8_t *data, uint64_t size)
{
    while (size && c->state == HD_READY) {
        uint64_t n;
        if (!c->have && (n = whole_message(c, data, size))) {
            data += n;
            size -= n;
            continue;
        }
        if (c->have < HD_HEAD) {
            n = HD_HEAD - c->have;
            n = n < size ? n : size;
            memcpy(c->head_bytes + c->have, data, n);
            c->have += n;
            if (c->have == HD_HEAD) {
                if (begin_message(c)) {
                    c->have = 0;
                    hd_close(c, 1);
                }
            } else {
                hd_set_deadline(c, patience(c->server, 0));
            }
        } else if (c->have < HD_HEAD + c->head.body) {
            n = HD_HEAD + c->head.body - c->have;
            n = n < size ? n : size;
            if (!c->skip) {
                if (widen(c)) {
                    hd_close(c, 1);
                    return;
                }
                uint64_t room = c->body->room - (c->have - HD_HEAD);
                n = n < room ? n : room;
                memcpy(c->body->at + (c->have - HD_HEAD), data, n);
            }
            body_came(c, data, n);
        } else {
            uint64_t at = c->have - HD_HEAD - c->head.body;
            n = HD_TAG - at;
            n = n < size ? n : size;
            memcpy(c->tag + at, data, n);
            c->have += n;
            if (at + n == HD_TAG) {
                uint8_t tag[HD_TAG];
                memcpy(tag, c->tag, HD_TAG);
                message_complete(c, c->body ? c->body->at : NULL, tag);
            }
        }
        data += n;
        size -= n;
    }
    /* A client sends its next request only after the reply to the last one. */
    if (size && c->state != HD_CLOSED)
        hd_close(c, 1);
}

void hd_conn_readable(hd_conn *c)
{
    hd_server *s = c->server;
    uint8_t *into = s->scratch;
    uint64_t room = HD_SCRATCH;
    int direct = 0;
    if (c->state == HD_STRANGER) {
        into = c->head_bytes + c->have;
        room = HD_ANSWER - c->have;
    } else if (c->state == HD_READY && c->have >= HD_HEAD && !c->skip &&
               c->have < HD_HEAD + c->head.body) {
        if (widen(c)) {
            hd_close(c, 1);
            return;
        }
        into = c->body->at + (c->have - HD_HEAD);
        room = c->body->room - (c->have - HD_HEAD);
        room = room < HD_SCRATCH ? room : HD_SCRATCH;
        direct = 1;
    }
    ssize_t n = recv(c->fd, into, room, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        hd_close(c, 0);
        return;
    }
    if (c->state == HD_STRANGER) {
        c->have += (uint64_t)n;
        if (c->have == HD_ANSWER)
            admit(c);
    } else if (c->state != HD_READY) {
        hd_close(c, 1); /* it sends although its request is still waiting */
    } else if (direct) {
        body_came(c, into, (uint64_t)n);
    } else {
        feed(c, into, (uint64_t)n);
    }
}

/* --- replies out ------------------------------------------------------------------------------- */

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
    hd_set_deadline(c, patience(s, total));
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
    if ((s->build_own < s->build_size && add_piece(s, NULL, s->build_own, s->build_size - s->build_own)) ||
        add_piece(s, NULL, s->build_size, HD_TAG) ||
        keep(c, s->build_size + HD_TAG, s->build_pieces, s->build_piece_count) ||
        hd_watch(c, EPOLLOUT)) {
        hd_close(c, 1);
        return;
    }
    hd_seal_begin(&c->out_seal, &c->out_mac);
    hd_set_deadline(c, patience(s, total));
    hd_conn_writable(c);
}
