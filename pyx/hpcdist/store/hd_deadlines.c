/* Deadlines of connections: see hd_deadlines.h. */
#include <stdlib.h>

#include "hd_conn.h"
#include "hd_deadlines.h"

static void put_at(hd_server *s, int64_t i, hd_conn *c)
{
    s->heap[i] = c;
    c->place = i;
}

static void rise(hd_server *s, int64_t i)
{
    hd_conn *c = s->heap[i];
    for (; i && s->heap[(i - 1) / 2]->deadline > c->deadline; i = (i - 1) / 2)
        put_at(s, i, s->heap[(i - 1) / 2]);
    put_at(s, i, c);
}

static void sink(hd_server *s, int64_t i)
{
    hd_conn *c = s->heap[i];
    for (;;) {
        int64_t below = 2 * i + 1;
        if (below >= s->heap_size)
            break;
        if (below + 1 < s->heap_size && s->heap[below + 1]->deadline < s->heap[below]->deadline)
            below++;
        if (s->heap[below]->deadline >= c->deadline)
            break;
        put_at(s, i, s->heap[below]);
        i = below;
    }
    put_at(s, i, c);
}

void hd_set_deadline(hd_conn *c, int64_t deadline)
{
    hd_server *s = c->server;
    c->deadline = deadline;
    if (deadline == INT64_MAX) {
        if (c->place < 0)
            return;
        int64_t hole = c->place;
        hd_conn *last = s->heap[--s->heap_size];
        c->place = -1;
        if (last == c)
            return;
        put_at(s, hole, last);
        sink(s, hole);
        rise(s, last->place);
        return;
    }
    if (c->place < 0)
        /* Cannot fail: the connection made room when it was created. */
        put_at(s, s->heap_size++, c);
    else
        sink(s, c->place);
    rise(s, c->place);
}

int hd_deadlines_room(hd_server *s)
{
    int64_t wanted = (int64_t)(s->stats.connections + s->stats.strangers) + 1;
    if (wanted <= s->heap_room)
        return 0;
    hd_conn **wider = realloc(s->heap, 2 * (size_t)wanted * sizeof *wider);
    if (!wider)
        return -1;
    s->heap = wider;
    s->heap_room = 2 * wanted;
    return 0;
}

void hd_rearm(hd_conn *c)
{
    hd_server *s = c->server;
    c->active = s->now;
    hd_set_deadline(c, s->limits.idle_ns ? s->now + s->limits.idle_ns : INT64_MAX);
}
