/* What each request does. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "hd_conn.h"
#include "hd_conn_life.h"
#include "hd_deadlines.h"
#include "hd_reply.h"
#include "hd_requests.h"
#include "hd_table.h"
#include "hd_waiting.h"
#include "hd_wire.h"

/* Bytes: values of this size or more may stay in the message that brought them. */
#define SHARED 4096

static void full(hd_conn *c) { hd_reply_number(c, HD_RE_FULL, (int64_t)c->server->limits.bytes); }

static int has_room(const hd_server *s, uint64_t more)
{
    return more <= s->limits.bytes && s->table.bytes <= s->limits.bytes - more;
}

static uint64_t present_bytes(const hd_entry *e)
{
    return e && e->has_value ? e->key_size + e->value.size + HD_OVERHEAD : 0;
}

/* Whether a value may be stored in place of the entry's, which may be NULL. */
static int has_room_instead(const hd_server *s, const hd_entry *e, uint64_t key, uint64_t value)
{
    uint64_t more = key + value + HD_OVERHEAD, less = present_bytes(e);
    return more <= less || has_room(s, more - less);
}

/* --- changes -----------------------------------------------------------------------------------
 */

static int value_of(const hd_item *i, hd_bytes *own, hd_value *v)
{
    if (own && i->size >= SHARED && i->size >= own->room / 2) {
        own->owners++;
        *v = (hd_value){own, (uint64_t)(i->at - own->at), i->size};
        return 0;
    }
    hd_bytes *b = hd_bytes_new(i->size);
    if (!b)
        return -1;
    memcpy(b->at, i->at, i->size);
    *v = (hd_value){b, 0, i->size};
    return 0;
}

/* Stores one value. Returns its entry, whose waiters are to be woken after the reply; NULL if out
 * of memory. */
static hd_entry *store(hd_server *s, const hd_item *key, const hd_item *value, hd_bytes *own)
{
    hd_value v;
    hd_entry *e = hd_table_make(&s->table, key->at, key->size);
    if (!e)
        return NULL;
    if (value_of(value, own, &v)) {
        hd_table_tidy(&s->table, e);
        return NULL;
    }
    hd_table_put(&s->table, e, v);
    return e;
}

static void set_all(hd_conn *c, const hd_item *items, uint32_t count, hd_bytes *own)
{
    hd_server *s = c->server;
    uint64_t more = 0;
    for (uint32_t i = 0; i < count; i++)
        more += items[i].size + HD_OVERHEAD / 2;
    /* of several items, some may share a key: what they replace is counted at most once */
    hd_entry *first = count == 2 ? hd_table_find(&s->table, items[0].at, items[0].size) : NULL;
    if (count == 2 ? !has_room_instead(s, first, items[0].size, items[1].size)
                   : !has_room(s, more)) {
        full(c);
        return;
    }
    for (uint32_t i = 0; i < count; i += 2) {
        if (!store(s, &items[i], &items[i + 1], own)) {
            full(c);
            return;
        }
    }
    hd_reply_number(c, HD_RE_DONE, 0);
    for (uint32_t i = 0; i < count; i += 2) {
        hd_entry *e = hd_table_find(&s->table, items[i].at, items[i].size);
        if (e)
            hd_wake(e);
    }
}

/* A 64-bit integer; leading blanks and a sign are allowed, and nothing after it. Returns 0, or
 * -1. */
static int number_in(const hd_value *v, int64_t *number)
{
    char text[64], *end;
    const uint8_t *p = hd_value_at(v);
    uint64_t size = v->size;
    while (size && (*p == ' ' || (*p >= '\t' && *p <= '\r'))) {
        p++;
        size--;
    }
    if (!size || size >= sizeof text)
        return -1;
    memcpy(text, p, size);
    text[size] = 0;
    if (text[size - 1] < '0' || text[size - 1] > '9')
        return -1;
    errno = 0;
    *number = strtoll(text, &end, 10);
    return errno || end != text + size ? -1 : 0;
}

static void add(hd_conn *c, const hd_item *key)
{
    hd_server *s = c->server;
    char text[32];
    int64_t present = 0, sum;
    hd_entry *e = hd_table_find(&s->table, key->at, key->size);
    if (e && e->has_value && number_in(&e->value, &present)) {
        uint64_t shown = e->value.size < 40 ? e->value.size : 40;
        hd_reply_one_item(c, HD_RE_NO_NUMBER, hd_value_at(&e->value), shown);
        return;
    }
    if (__builtin_add_overflow(present, c->head.number, &sum)) {
        hd_reply_number(c, HD_RE_OVERFLOW, present);
        return;
    }
    hd_item value = {(uint8_t *)text, (uint64_t)snprintf(text, sizeof text, "%" PRId64, sum)};
    if (!has_room_instead(s, e, key->size, value.size) || !(e = store(s, key, &value, NULL))) {
        full(c);
        return;
    }
    hd_reply_number(c, HD_RE_DONE, sum);
    hd_wake(e);
}

static void exchange(hd_conn *c, const hd_item *items, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_entry *e = hd_table_find(&s->table, items[0].at, items[0].size);
    if (e && e->has_value) {
        if (e->value.size != items[1].size ||
            memcmp(hd_value_at(&e->value), items[1].at, items[1].size)) {
            hd_reply_one_value(c, &e->value);
            return;
        }
    } else if (items[1].size) {
        hd_reply_one_item(c, HD_RE_DONE, items[1].at, items[1].size);
        return;
    }
    if (!has_room_instead(s, e, items[0].size, items[2].size) ||
        !(e = store(s, &items[0], &items[2], own))) {
        full(c);
        return;
    }
    hd_reply_one_value(c, &e->value);
    hd_wake(e);
}

static void append(hd_conn *c, const hd_item *items, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_entry *e = hd_table_find(&s->table, items[0].at, items[0].size);
    int failed = !has_room(s, items[0].size + items[1].size + HD_OVERHEAD);
    if (!failed && e && e->has_value)
        failed = hd_table_append(&s->table, e, items[1].at, items[1].size);
    else if (!failed)
        failed = !(e = store(s, &items[0], &items[1], own));
    if (failed) {
        full(c);
        return;
    }
    hd_reply_number(c, HD_RE_DONE, 0);
    hd_wake(e);
}

static void push(hd_conn *c, const hd_item *items, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_value v;
    hd_entry *e = NULL;
    if (!has_room(s, items[0].size + items[1].size + HD_OVERHEAD) ||
        !(e = hd_table_make(&s->table, items[0].at, items[0].size)) ||
        value_of(&items[1], own, &v)) {
        if (e)
            hd_table_tidy(&s->table, e);
        full(c);
        return;
    }
    if (hd_table_push(&s->table, e, v)) {
        hd_bytes_drop(v.in);
        hd_table_tidy(&s->table, e);
        full(c);
        return;
    }
    hd_reply_number(c, HD_RE_DONE, 0);
    hd_wake(e);
}

static void drop(hd_conn *c, const hd_item *key)
{
    hd_table *t = &c->server->table;
    hd_entry *e = hd_table_find(t, key->at, key->size);
    int was_there = e && hd_table_delete(t, e);
    if (was_there)
        hd_table_tidy(t, e);
    hd_reply_number(c, HD_RE_DONE, was_there);
}

/* --- barriers and joining ----------------------------------------------------------------------
 */

static void barrier(hd_conn *c, const hd_item *items, const uint8_t *body, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_entry *e = hd_table_make(&s->table, items[0].at, items[0].size);
    if (!e || c->head.number < 1) {
        hd_reply_number(c, HD_RE_SENSELESS, 0);
        return;
    }
    if (e->arrived && e->barrier_size != c->head.number) {
        hd_reply_number(c, HD_RE_SIZES, e->barrier_size);
        return;
    }
    e->barrier_size = c->head.number;
    if (e->arrived + 1 < e->barrier_size) {
        if (c->head.wait_ns <= 0) {
            int64_t arrived = e->arrived + 1;
            hd_table_tidy(&s->table, e);
            hd_reply_number(c, HD_RE_LATE, arrived);
        } else if (!hd_wait_begin(c, items, 1, body, own)) {
            e->arrived++;
            c->w_entry = e;
            hd_link_last(&e->in_barrier, &c->waits);
        } else {
            hd_table_tidy(&s->table, e);
        }
        return;
    }
    hd_reply_number(c, HD_RE_DONE, 0);
    for (int64_t others = e->arrived; others > 0; others--) {
        hd_conn *other = HD_CONN_OF(e->in_barrier.next, waits);
        hd_request_forget(other); /* the last one frees the entry, if it contains nothing else */
        hd_rearm(other);
        hd_reply_number(other, HD_RE_DONE, 0);
    }
    e = hd_table_find(&s->table, items[0].at, items[0].size);
    if (e)
        hd_table_tidy(&s->table, e);
}

static void join(hd_conn *c)
{
    hd_server *s = c->server;
    if (c->head.number >= 0 && s->limits.world_size >= 0 &&
        c->head.number != s->limits.world_size) {
        hd_reply_number(c, HD_RE_SIZES, s->limits.world_size);
        return;
    }
    s->stats.joined++;
    hd_reply_number(c, HD_RE_DONE, (int64_t)s->stats.joined);
    hd_wake_joined(s);
}

static void joined(hd_conn *c, const uint8_t *body, hd_bytes *own)
{
    hd_server *s = c->server;
    if ((int64_t)s->stats.joined >= c->head.number)
        hd_reply_number(c, HD_RE_DONE, (int64_t)s->stats.joined);
    else if (c->head.wait_ns <= 0)
        hd_reply_number(c, HD_RE_LATE, (int64_t)s->stats.joined);
    else if (!hd_wait_begin(c, NULL, 0, body, own))
        hd_link_last(&s->for_joined, &c->waits);
}

/* --- queries -----------------------------------------------------------------------------------
 */

static void list(hd_conn *c, const hd_item *prefix, int with_names)
{
    hd_server *s = c->server;
    int64_t count = 0;
    hd_reply_begin(s);
    for (uint64_t i = 0; i <= s->table.mask; i++) {
        for (hd_entry *e = s->table.buckets[i]; e; e = e->next) {
            if (!e->has_value || e->key_size < prefix->size ||
                memcmp(e->key, prefix->at, prefix->size))
                continue;
            count++;
            if (with_names && hd_reply_bytes(s, e->key, e->key_size)) {
                hd_close(c, 1);
                return;
            }
        }
    }
    hd_reply_finish(c, HD_RE_DONE, count, with_names ? (uint32_t)count : 0);
}

/* --- dispatch ----------------------------------------------------------------------------------
 */

/* How many items a request must have: the number, or -1 for any, or -2 for pairs. */
static const int8_t wanted[HD_OP_END] = {
    [HD_OP_SET] = -2,   [HD_OP_GET] = -1,  [HD_OP_ADD] = 1,    [HD_OP_EXCHANGE] = 3,
    [HD_OP_CHECK] = -1, [HD_OP_WAIT] = -1, [HD_OP_DELETE] = 1, [HD_OP_APPEND] = 2,
    [HD_OP_PUSH] = 2,   [HD_OP_POP] = 1,   [HD_OP_LENGTH] = 1, [HD_OP_BARRIER] = 1,
    [HD_OP_COUNT] = 1,  [HD_OP_LIST] = 1,
};

static int readable(hd_conn *c, const uint8_t *body)
{
    hd_server *s = c->server;
    const hd_head *h = &c->head;
    if (!h->op || h->op >= HD_OP_END)
        return 0;
    int8_t w = wanted[h->op];
    if ((w >= 0 && h->items != (uint32_t)w) || (w == -2 && (h->items & 1)))
        return 0;
    if (h->items > s->item_room) {
        uint64_t room = (uint64_t)h->items + 64;
        hd_item *wider = realloc(s->items, room * sizeof *wider);
        if (!wider)
            return 0;
        s->items = wider;
        s->item_room = room;
    }
    return !hd_items(body, h->body, h->items, s->items);
}

void hd_request(hd_conn *c, const uint8_t *body, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_entry *e;
    if (!readable(c, body)) {
        hd_reply_number(c, HD_RE_SENSELESS, 0);
        return;
    }
    const hd_item *items = s->items;
    uint32_t count = c->head.items;
    switch (c->head.op) {
    case HD_OP_SET: set_all(c, items, count, own); break;
    case HD_OP_GET:
        if (!count)
            hd_reply_number(c, HD_RE_DONE, 0);
        else
            hd_wait_for(c, items, count, body, own);
        break;
    case HD_OP_WAIT: hd_wait_for(c, items, count, body, own); break;
    case HD_OP_POP:
        if (!c->head.number && hd_all_there(c, items, 1))
            hd_reply_found(c, items, 1);
        else if (!c->head.number)
            hd_reply_number(c, HD_RE_EMPTY, 0);
        else
            hd_wait_for(c, items, 1, body, own);
        break;
    case HD_OP_CHECK: hd_reply_number(c, HD_RE_DONE, hd_all_there(c, items, count)); break;
    case HD_OP_ADD: add(c, items); break;
    case HD_OP_EXCHANGE: exchange(c, items, own); break;
    case HD_OP_DELETE: drop(c, items); break;
    case HD_OP_APPEND: append(c, items, own); break;
    case HD_OP_PUSH: push(c, items, own); break;
    case HD_OP_LENGTH:
        e = hd_table_find(&s->table, items->at, items->size);
        hd_reply_number(c, HD_RE_DONE, e ? e->queued : 0);
        break;
    case HD_OP_BARRIER: barrier(c, items, body, own); break;
    case HD_OP_COUNT: list(c, items, 0); break;
    case HD_OP_LIST: list(c, items, 1); break;
    case HD_OP_JOIN: join(c); break;
    case HD_OP_JOINED: joined(c, body, own); break;
    }
}
