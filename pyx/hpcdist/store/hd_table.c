#include "hd_table.h"

#include <stdlib.h>
#include <string.h>

hd_bytes *hd_bytes_new(uint64_t room)
{
    if (room > (uint64_t)1 << 48)
        return NULL;
    hd_bytes *b = malloc(sizeof *b + room);
    if (b) {
        b->owners = 1;
        b->room = room;
    }
    return b;
}

void hd_bytes_drop(hd_bytes *b)
{
    if (b && !--b->owners)
        free(b);
}

/* Keys come from clients that have the job's key; the seed still keeps buckets short, whatever
 * their names. */
static uint64_t hash_of(const hd_table *t, const uint8_t *key, uint64_t size)
{
    uint64_t h = t->seed ^ size * 0x9e3779b97f4a7c15ULL;
    while (size) {
        uint64_t word = 0;
        uint64_t n = size < 8 ? size : 8;
        memcpy(&word, key, n);
        h = (h ^ word) * 0xbf58476d1ce4e5b9ULL;
        h ^= h >> 29;
        key += n;
        size -= n;
    }
    h *= 0x94d049bb133111ebULL;
    return h ^ h >> 31;
}

int hd_table_init(hd_table *t, uint64_t seed)
{
    memset(t, 0, sizeof *t);
    t->seed = seed;
    t->mask = 1023;
    t->buckets = calloc(t->mask + 1, sizeof *t->buckets);
    return t->buckets ? 0 : -1;
}

static void free_entry(hd_table *t, hd_entry *e)
{
    hd_table_delete(t, e);
    while (e->queued)
        hd_bytes_drop(hd_table_pop(t, e).in);
    free(e);
}

void hd_table_free(hd_table *t)
{
    for (uint64_t i = 0; t->buckets && i <= t->mask; i++) {
        while (t->buckets[i]) {
            hd_entry *e = t->buckets[i];
            t->buckets[i] = e->next;
            free_entry(t, e);
        }
    }
    free(t->buckets);
    t->buckets = NULL;
}

hd_entry *hd_table_find(const hd_table *t, const uint8_t *key, uint64_t size)
{
    uint64_t hash = hash_of(t, key, size);
    hd_entry *e = t->buckets[hash & t->mask];
    while (e && (e->hash != hash || e->key_size != size || memcmp(e->key, key, size)))
        e = e->next;
    return e;
}

static void grow(hd_table *t)
{
    uint64_t mask = 2 * t->mask + 1;
    hd_entry **buckets = calloc(mask + 1, sizeof *buckets);
    if (!buckets)
        return; /* longer buckets, nothing worse */
    for (uint64_t i = 0; i <= t->mask; i++) {
        while (t->buckets[i]) {
            hd_entry *e = t->buckets[i];
            t->buckets[i] = e->next;
            e->next = buckets[e->hash & mask];
            buckets[e->hash & mask] = e;
        }
    }
    free(t->buckets);
    t->buckets = buckets;
    t->mask = mask;
}

hd_entry *hd_table_make(hd_table *t, const uint8_t *key, uint64_t size)
{
    hd_entry *e = hd_table_find(t, key, size);
    if (e)
        return e;
    e = calloc(1, sizeof *e + size);
    if (!e)
        return NULL;
    if (t->entries > t->mask)
        grow(t);
    e->hash = hash_of(t, key, size);
    e->key_size = size;
    memcpy(e->key, key, size);
    hd_link_init(&e->waiting);
    hd_link_init(&e->in_barrier);
    e->next = t->buckets[e->hash & t->mask];
    t->buckets[e->hash & t->mask] = e;
    t->entries++;
    return e;
}

void hd_table_tidy(hd_table *t, hd_entry *e)
{
    if (e->has_value || e->queued || !hd_link_alone(&e->waiting) || !hd_link_alone(&e->in_barrier))
        return;
    hd_entry **at = &t->buckets[e->hash & t->mask];
    while (*at != e)
        at = &(*at)->next;
    *at = e->next;
    t->entries--;
    free(e);
}

void hd_table_put(hd_table *t, hd_entry *e, hd_value v)
{
    hd_table_delete(t, e);
    e->value = v;
    e->has_value = 1;
    t->values++;
    t->bytes += e->key_size + v.size + HD_OVERHEAD;
}

int hd_table_delete(hd_table *t, hd_entry *e)
{
    if (!e->has_value)
        return 0;
    t->bytes -= e->key_size + e->value.size + HD_OVERHEAD;
    t->values--;
    hd_bytes_drop(e->value.in);
    e->has_value = 0;
    return 1;
}

int hd_table_append(hd_table *t, hd_entry *e, const uint8_t *tail, uint64_t size)
{
    hd_value *v = &e->value;
    uint64_t total = v->size + size;
    /* In place if no other reader has the memory; otherwise into new memory with room to grow, so
     * that many short appends do not copy everything each time. */
    if (v->in->owners > 1 || v->in->room - v->begin < total) {
        hd_bytes *wider = hd_bytes_new(total + total / 2);
        if (!wider)
            return -1;
        memcpy(wider->at, hd_value_at(v), v->size);
        hd_bytes_drop(v->in);
        v->in = wider;
        v->begin = 0;
    }
    memcpy(v->in->at + v->begin + v->size, tail, size);
    v->size = total;
    t->bytes += size;
    return 0;
}

int hd_table_push(hd_table *t, hd_entry *e, hd_value v)
{
    hd_queued *q = malloc(sizeof *q);
    if (!q)
        return -1;
    q->next = NULL;
    q->value = v;
    if (e->last)
        e->last->next = q;
    else
        e->first = q;
    e->last = q;
    e->queued++;
    t->bytes += e->key_size + v.size + HD_OVERHEAD;
    return 0;
}

hd_value hd_table_pop(hd_table *t, hd_entry *e)
{
    hd_queued *q = e->first;
    hd_value v = q->value;
    e->first = q->next;
    if (!e->first)
        e->last = NULL;
    e->queued--;
    t->bytes -= e->key_size + v.size + HD_OVERHEAD;
    free(q);
    return v;
}
