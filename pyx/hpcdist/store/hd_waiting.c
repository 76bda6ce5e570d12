/* Requests that wait: each for one missing item at a time, in the list of its entry. */
#include <stdlib.h>

#include "hd_conn.h"
#include "hd_conn_life.h"
#include "hd_deadlines.h"
#include "hd_reply.h"
#include "hd_table.h"
#include "hd_waiting.h"
#include "hd_wire.h"

#define NAMED 16 /* the most missing keys that a reply names */

int hd_wait_begin(hd_conn *c, const hd_item *items, uint32_t count, const uint8_t *body,
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

void hd_reply_found(hd_conn *c, const hd_item *items, uint32_t count)
{
    hd_server *s = c->server;
    hd_table *t = &s->table;
    if (c->head.op == HD_OP_WAIT) {
        hd_reply_number(c, HD_RE_DONE, 0);
        return;
    }
    hd_entry *e = hd_table_find(t, items[0].at, items[0].size);
    if (c->head.op == HD_OP_POP) {
        hd_value v = hd_table_pop(t, e);
        hd_table_tidy(t, e);
        hd_reply_one_value(c, &v);
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
    hd_reply_found(c, items, count);
    free(items);
    hd_bytes_drop(body);
}

void hd_wait_for(hd_conn *c, const hd_item *items, uint32_t count, const uint8_t *body,
                 hd_bytes *own)
{
    if (first_missing(c, items, count, 0) == count)
        hd_reply_found(c, items, count);
    else if (c->head.wait_ns <= 0)
        reply_late(c, items, count);
    else if (!hd_wait_begin(c, items, count, body, own))
        attempt(c);
}

void hd_wake(hd_entry *e)
{
    hd_link all;
    if (hd_link_alone(&e->waiting))
        return;
    all = e->waiting;
    all.next->prev = all.prev->next = &all;
    hd_link_init(&e->waiting);
    while (!hd_link_alone(&all)) {
        hd_conn *c = HD_CONN_OF(all.next, waits);
        hd_link_out(&c->waits);
        c->w_entry = NULL;
        attempt(c);
    }
}

void hd_wake_joined(hd_server *s)
{
    hd_link *next;
    for (hd_link *l = s->for_joined.next; l != &s->for_joined; l = next) {
        hd_conn *c = HD_CONN_OF(l, waits);
        next = l->next;
        if ((int64_t)s->stats.joined >= c->head.number) {
            hd_request_forget(c);
            hd_reply_number(c, HD_RE_DONE, (int64_t)s->stats.joined);
        }
    }
}

void hd_request_late(hd_conn *c)
{
    hd_entry *e = c->w_entry;
    if (c->head.op == HD_OP_BARRIER) {
        int64_t arrived = e->arrived;
        hd_request_forget(c);
        hd_set_deadline(c, INT64_MAX);
        hd_reply_number(c, HD_RE_LATE, arrived);
    } else if (c->head.op == HD_OP_JOINED) {
        hd_request_forget(c);
        hd_set_deadline(c, INT64_MAX);
        hd_reply_number(c, HD_RE_LATE, (int64_t)c->server->stats.joined);
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

int hd_all_there(const hd_conn *c, const hd_item *items, uint32_t count)
{
    return first_missing(c, items, count, 0) == count;
}
