/* Bytes in: the handshake, then messages, whose tags are checked before a request is looked at. */
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "hd_conn.h"
#include "hd_conn_life.h"
#include "hd_deadlines.h"
#include "hd_mac.h"
#include "hd_receive.h"
#include "hd_reply.h"
#include "hd_requests.h"
#include "hd_table.h"
#include "hd_wire.h"

#define UNCHECKED (1 << 16) /* bytes: messages up to this size are always read */

/* --- the handshake -----------------------------------------------------------------------------
 */

static void dismiss(hd_conn *c, const char *text)
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
        dismiss(c, HD_REFUSED_TEXT);
        return;
    }
    if ((int64_t)s->stats.connections >= s->limits.connections) {
        dismiss(c, HD_CROWDED_TEXT);
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

/* --- messages in -------------------------------------------------------------------------------
 */

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
    hd_set_deadline(c, hd_patience(s, c->head.body));
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
    hd_message_over(c);
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

static void body_arrived(hd_conn *c, const uint8_t *data, uint64_t size)
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
                hd_set_deadline(c, hd_patience(c->server, 0));
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
            body_arrived(c, data, n);
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
        body_arrived(c, into, (uint64_t)n);
    } else {
        feed(c, into, (uint64_t)n);
    }
}
