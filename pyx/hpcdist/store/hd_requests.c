/* What each request does, and how it waits. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "hd_server.h"

enum {
    SHARED = 4096, /* values of this size or more may stay in the message that brought them */
    NAMED = 16     /* the most missing keys that a reply names */
};

#define CONN(l, member) ((hd_conn *)((char *)(l) - offsetof(hd_conn, member)))

static void reply(hd_conn *c, int status, int64_t number)
{
    hd_reply_begin(c->server);
    hd_reply_finish(c, status, number, 0);
}

/* Without memory for an answer there is no answer: the client sees the connection end. */
static void reply_value(hd_conn *c, const hd_value *v)
{
    hd_reply_begin(c->server);
    if (hd_reply_value(c->server, v))
        hd_close(c, 1);
    else
        hd_reply_finish(c, HD_RE_DONE, 0, 1);
}

static void reply_item(hd_conn *c, int status, const uint8_t *data, uint64_t size)
{
    hd_reply_begin(c->server);
    if (hd_reply_bytes(c->server, data, size))
        hd_close(c, 1);
    else
        hd_reply_finish(c, status, 0, 1);
}

static void full(hd_conn *c)
{
    reply(c, HD_RE_FULL, (int64_t)c->server->limits.bytes);
}

static int fits(const hd_server *s, uint64_t more)
{
    return more <= s->limits.bytes && s->table.bytes <= s->limits.bytes - more;
}

static uint64_t present_bytes(const hd_entry *e)
{
    return e && e->has_value ? e->key_size + e->value.size + HD_OVERHEAD : 0;
}

/* Whether a value may be stored in place of the entry's, which may be NULL. */
static int fits_instead(const hd_server *s, const hd_entry *e, uint64_t key, uint64_t value)
{
    uint64_t more = key + value + HD_OVERHEAD, less = present_bytes(e);
    return more <= less || fits(s, more - less);
}

/* --- waiting ----------------------------------------------------------------------------------- */

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

/* Keeps the request: its items, and the deadline it came with. */
static int begin_waiting(hd_conn *c, const hd_item *items, uint32_t count, const uint8_t *body,
                         hd_bytes *own)
{
    c->w_items = malloc((count + 1) * sizeof *items);
    if (own)
        own->owners++;
    else if ((own = hd_bytes_new(c->head.body)) && c->head.body)
        memcpy(own->at, body, c->head.body);
    c->w_body = own;
    c->state = HD_WAITING;
    if (!c->w_items || !own) {
        hd_close(c, 1);
        return -1;
    }
    for (uint32_t i = 0; i < count; i++)
        c->w_items[i] = (hd_item){own->at + (items[i].at - body), items[i].size};
    c->w_count = count;
    c->w_at = 0;
    int64_t wait = c->head.wait_ns;
    int64_t now = c->server->now;
    hd_set_deadline(c, wait > INT64_MAX - 1 - now ? INT64_MAX - 1 : now + wait);
    return 0;
}

static int there(const hd_conn *c, const hd_entry *e)
{
    if (!e)
        return 0;
    switch (c->head.op) {
    case HD_OP_GET: return e->has_value;
    case HD_OP_POP: return e->queued > 0;
    default: return e->has_value || e->queued;
    }
}

/* The first item from `from` on that is missing; count if none is. */
static uint32_t first_missing(const hd_conn *c, const hd_item *items, uint32_t count, uint32_t from)
{
    const hd_table *t = &c->server->table;
    while (from < count && there(c, hd_table_find(t, items[from].at, items[from].size)))
        from++;
    return from;
}

static void reply_found(hd_conn *c, const hd_item *items, uint32_t count)
{
    hd_server *s = c->server;
    hd_table *t = &s->table;
    if (c->head.op == HD_OP_WAIT) {
        reply(c, HD_RE_DONE, 0);
        return;
    }
    hd_entry *e = hd_table_find(t, items[0].at, items[0].size);
    if (c->head.op == HD_OP_POP) {
        hd_value v = hd_table_pop(t, e);
        hd_table_tidy(t, e);
        reply_value(c, &v);
        hd_bytes_drop(v.in);
        return;
    }
    hd_reply_begin(s);
    for (uint32_t i = 0; i < count; i++) {
        e = hd_table_find(t, items[i].at, items[i].size);
        if (hd_reply_value(s, &e->value)) {
            hd_close(c, 1);
            return;
        }
    }
    hd_reply_finish(c, HD_RE_DONE, 0, count);
}

static void reply_late(hd_conn *c, const hd_item *items, uint32_t count)
{
    hd_server *s = c->server;
    uint32_t missing = 0, named = 0;
    hd_reply_begin(s);
    for (uint32_t i = 0; i < count; i++) {
        if (there(c, hd_table_find(&s->table, items[i].at, items[i].size)))
            continue;
        missing++;
        if (named < NAMED && !hd_reply_bytes(s, items[i].at, items[i].size))
            named++;
    }
    hd_reply_finish(c, HD_RE_LATE, missing, named);
}

/* Waits for the item w_at, or answers if all items are present. Those before w_at were present
 * once; they are checked again only when the last one is found. */
static void attempt(hd_conn *c)
{
    hd_table *t = &c->server->table;
    c->w_at = first_missing(c, c->w_items, c->w_count, c->w_at);
    if (c->w_at == c->w_count)
        c->w_at = first_missing(c, c->w_items, c->w_count, 0);
    if (c->w_at < c->w_count) {
        hd_item *i = &c->w_items[c->w_at];
        hd_entry *e = hd_table_make(t, i->at, i->size);
        if (!e) {
            hd_close(c, 1);
            return;
        }
        c->w_entry = e;
        hd_link_last(&e->waiting, &c->waits);
        return;
    }
    hd_item *items = c->w_items;
    hd_bytes *body = c->w_body;
    uint32_t count = c->w_count;
    c->w_items = NULL;
    c->w_body = NULL;
    c->w_count = 0;
    c->state = HD_READY;
    hd_rearm(c);
    reply_found(c, items, count);
    free(items);
    hd_bytes_drop(body);
}

static void awaited(hd_conn *c, const hd_item *items, uint32_t count, const uint8_t *body,
                    hd_bytes *own)
{
    if (first_missing(c, items, count, 0) == count)
        reply_found(c, items, count);
    else if (c->head.wait_ns <= 0)
        reply_late(c, items, count);
    else if (!begin_waiting(c, items, count, body, own))
        attempt(c);
}

/* Something was stored in the entry. The clients that wait for it try again, in order of
 * arrival. */
static void wake(hd_entry *e)
{
    hd_link all;
    if (hd_link_alone(&e->waiting))
        return;
    all = e->waiting;
    all.next->prev = all.prev->next = &all;
    hd_link_init(&e->waiting);
    while (!hd_link_alone(&all)) {
        hd_conn *c = CONN(all.next, waits);
        hd_link_out(&c->waits);
        c->w_entry = NULL;
        attempt(c);
    }
}

static void wake_joined(hd_server *s)
{
    hd_link *next;
    for (hd_link *l = s->for_joined.next; l != &s->for_joined; l = next) {
        hd_conn *c = CONN(l, waits);
        next = l->next;
        if ((int64_t)s->stats.joined >= c->head.number) {
            hd_request_forget(c);
            reply(c, HD_RE_DONE, (int64_t)s->stats.joined);
        }
    }
}

void hd_request_late(hd_conn *c)
{
    hd_entry *e = c->w_entry;
    if (c->head.op == HD_OP_BARRIER) {
        int64_t came = e->arrived;
        hd_request_forget(c);
        hd_set_deadline(c, INT64_MAX);
        reply(c, HD_RE_LATE, came);
    } else if (c->head.op == HD_OP_JOINED) {
        hd_request_forget(c);
        hd_set_deadline(c, INT64_MAX);
        reply(c, HD_RE_LATE, (int64_t)c->server->stats.joined);
    } else {
        hd_item *items = c->w_items;
        hd_bytes *body = c->w_body;
        uint32_t count = c->w_count;
        c->w_items = NULL;
        c->w_body = NULL;
        hd_request_forget(c);
        hd_set_deadline(c, INT64_MAX);
        reply_late(c, items, count);
        free(items);
        hd_bytes_drop(body);
    }
}

/* --- changes ----------------------------------------------------------------------------------- */

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
    if (count == 2 ? !fits_instead(s, first, items[0].size, items[1].size) : !fits(s, more)) {
        full(c);
        return;
    }
    for (uint32_t i = 0; i < count; i += 2) {
        if (!store(s, &items[i], &items[i + 1], own)) {
            full(c);
            return;
        }
    }
    reply(c, HD_RE_DONE, 0);
    for (uint32_t i = 0; i < count; i += 2) {
        hd_entry *e = hd_table_find(&s->table, items[i].at, items[i].size);
        if (e)
            wake(e);
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
        reply_item(c, HD_RE_NO_NUMBER, hd_value_at(&e->value), shown);
        return;
    }
    if (__builtin_add_overflow(present, c->head.number, &sum)) {
        reply(c, HD_RE_OVERFLOW, present);
        return;
    }
    hd_item value = {(uint8_t *)text, (uint64_t)snprintf(text, sizeof text, "%" PRId64, sum)};
    if (!fits_instead(s, e, key->size, value.size) || !(e = store(s, key, &value, NULL))) {
        full(c);
        return;
    }
    reply(c, HD_RE_DONE, sum);
    wake(e);
}

static void exchange(hd_conn *c, const hd_item *items, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_entry *e = hd_table_find(&s->table, items[0].at, items[0].size);
    if (e && e->has_value) {
        if (e->value.size != items[1].size ||
            memcmp(hd_value_at(&e->value), items[1].at, items[1].size)) {
            reply_value(c, &e->value);
            return;
        }
    } else if (items[1].size) {
        reply_item(c, HD_RE_DONE, items[1].at, items[1].size);
        return;
    }
    if (!fits_instead(s, e, items[0].size, items[2].size) ||
        !(e = store(s, &items[0], &items[2], own))) {
        full(c);
        return;
    }
    reply_value(c, &e->value);
    wake(e);
}

static void append(hd_conn *c, const hd_item *items, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_entry *e = hd_table_find(&s->table, items[0].at, items[0].size);
    int failed = !fits(s, items[0].size + items[1].size + HD_OVERHEAD);
    if (!failed && e && e->has_value)
        failed = hd_table_append(&s->table, e, items[1].at, items[1].size);
    else if (!failed)
        failed = !(e = store(s, &items[0], &items[1], own));
    if (failed) {
        full(c);
        return;
    }
    reply(c, HD_RE_DONE, 0);
    wake(e);
}

static void push(hd_conn *c, const hd_item *items, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_value v;
    hd_entry *e = NULL;
    if (!fits(s, items[0].size + items[1].size + HD_OVERHEAD) ||
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
    reply(c, HD_RE_DONE, 0);
    wake(e);
}

static void drop(hd_conn *c, const hd_item *key)
{
    hd_table *t = &c->server->table;
    hd_entry *e = hd_table_find(t, key->at, key->size);
    int was_there = e && hd_table_delete(t, e);
    if (was_there)
        hd_table_tidy(t, e);
    reply(c, HD_RE_DONE, was_there);
}

/* --- barriers and joining ---------------------------------------------------------------------- */

static void barrier(hd_conn *c, const hd_item *items, const uint8_t *body, hd_bytes *own)
{
    hd_server *s = c->server;
    hd_entry *e = hd_table_make(&s->table, items[0].at, items[0].size);
    if (!e || c->head.number < 1) {
        reply(c, HD_RE_SENSELESS, 0);
        return;
    }
    if (e->arrived && e->barrier_size != c->head.number) {
        reply(c, HD_RE_SIZES, e->barrier_size);
        return;
    }
    e->barrier_size = c->head.number;
    if (e->arrived + 1 < e->barrier_size) {
        if (c->head.wait_ns <= 0) {
            int64_t came = e->arrived + 1;
            hd_table_tidy(&s->table, e);
            reply(c, HD_RE_LATE, came);
        } else if (!begin_waiting(c, items, 1, body, own)) {
            e->arrived++;
            c->w_entry = e;
            hd_link_last(&e->in_barrier, &c->waits);
        } else {
            hd_table_tidy(&s->table, e);
        }
        return;
    }
    reply(c, HD_RE_DONE, 0);
    for (int64_t others = e->arrived; others > 0; others--) {
        hd_conn *other = CONN(e->in_barrier.next, waits);
        hd_request_forget(other); /* the last one frees the entry, if it contains nothing else */
        hd_rearm(other);
        reply(other, HD_RE_DONE, 0);
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
        reply(c, HD_RE_SIZES, s->limits.world_size);
        return;
    }
    s->stats.joined++;
    reply(c, HD_RE_DONE, (int64_t)s->stats.joined);
    wake_joined(s);
}

static void joined(hd_conn *c, const uint8_t *body, hd_bytes *own)
{
    hd_server *s = c->server;
    if ((int64_t)s->stats.joined >= c->head.number)
        reply(c, HD_RE_DONE, (int64_t)s->stats.joined);
    else if (c->head.wait_ns <= 0)
        reply(c, HD_RE_LATE, (int64_t)s->stats.joined);
    else if (!begin_waiting(c, NULL, 0, body, own))
        hd_link_last(&s->for_joined, &c->waits);
}

/* --- queries ----------------------------------------------------------------------------------- */

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

/* --- dispatch ---------------------------------------------------------------------------------- */

/* How many items a request must have: the number, or -1 for any, or -2 for pairs. */
static const int8_t wanted[HD_OP_END] = {
    [HD_OP_SET] = -2,  [HD_OP_GET] = -1,   [HD_OP_ADD] = 1,    [HD_OP_EXCHANGE] = 3,
    [HD_OP_CHECK] = -1, [HD_OP_WAIT] = -1, [HD_OP_DELETE] = 1, [HD_OP_APPEND] = 2,
    [HD_OP_PUSH] = 2,  [HD_OP_POP] = 1,    [HD_OP_LENGTH] = 1, [HD_OP_BARRIER] = 1,
    [HD_OP_COUNT] = 1, [HD_OP_LIST] = 1,
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
        reply(c, HD_RE_SENSELESS, 0);
        return;
    }
    const hd_item *items = s->items;
    uint32_t count = c->head.items;
    switch (c->head.op) {
    case HD_OP_SET: set_all(c, items, count, own); break;
    case HD_OP_GET:
        if (!count)
            reply(c, HD_RE_DONE, 0);
        else
            awaited(c, items, count, body, own);
        break;
    case HD_OP_WAIT: awaited(c, items, count, body, own); break;
    case HD_OP_POP:
        if (!c->head.number && first_missing(c, items, 1, 0))
            reply_found(c, items, 1);
        else if (!c->head.number)
            reply(c, HD_RE_EMPTY, 0);
        else
            awaited(c, items, 1, body, own);
        break;
    case HD_OP_CHECK: reply(c, HD_RE_DONE, first_missing(c, items, count, 0) == count); break;
    case HD_OP_ADD: add(c, items); break;
    case HD_OP_EXCHANGE: exchange(c, items, own); break;
    case HD_OP_DELETE: drop(c, items); break;
    case HD_OP_APPEND: append(c, items, own); break;
    case HD_OP_PUSH: push(c, items, own); break;
    case HD_OP_LENGTH:
        e = hd_table_find(&s->table, items->at, items->size);
        reply(c, HD_RE_DONE, e ? e->queued : 0);
        break;
    case HD_OP_BARRIER: barrier(c, items, body, own); break;
    case HD_OP_COUNT: list(c, items, 0); break;
    case HD_OP_LIST: list(c, items, 1); break;
    case HD_OP_JOIN: join(c); break;
    case HD_OP_JOINED: joined(c, body, own); break;
    }
}
