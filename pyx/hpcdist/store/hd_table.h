/* The contents of a store's server: values, queues, and the clients that wait for a name. Used by
 * one thread. */
#ifndef HD_TABLE_H
#define HD_TABLE_H

#include <stddef.h>
#include <stdint.h>

/* Memory with several owners: a value may be in the message that brought it, and may be in transit
 * to readers while it is overwritten. */
typedef struct hd_bytes {
    uint32_t owners;
    uint64_t room;
    uint8_t at[];
} hd_bytes;

hd_bytes *hd_bytes_new(uint64_t room); /* NULL if out of memory */
void hd_bytes_drop(hd_bytes *b);       /* b may be NULL */

typedef struct hd_value {
    hd_bytes *in;
    uint64_t begin, size;
} hd_value;

static inline const uint8_t *hd_value_at(const hd_value *v) { return v->in->at + v->begin; }

/* A list whose members contain their own links. */
typedef struct hd_link {
    struct hd_link *next, *prev;
} hd_link;

static inline void hd_link_init(hd_link *l) { l->next = l->prev = l; }
static inline int hd_link_alone(const hd_link *l) { return l->next == l; }

static inline void hd_link_out(hd_link *l)
{
    l->prev->next = l->next;
    l->next->prev = l->prev;
    hd_link_init(l);
}

static inline void hd_link_last(hd_link *list, hd_link *l)
{
    l->prev = list->prev;
    l->next = list;
    list->prev->next = l;
    list->prev = l;
}

typedef struct hd_queued {
    struct hd_queued *next;
    hd_value value;
} hd_queued;

typedef struct hd_entry {
    struct hd_entry *next; /* in the same hash bucket */
    uint64_t hash;
    int has_value;
    hd_value value;
    hd_queued *first, *last; /* the queue of this name */
    int64_t queued;
    hd_link waiting;    /* connections that want this name */
    hd_link in_barrier; /* connections in the barrier of this name */
    int64_t barrier_size, arrived;
    uint64_t key_size;
    uint8_t key[];
} hd_entry;

typedef struct hd_table {
    hd_entry **buckets;
    uint64_t mask, entries;
    uint64_t values; /* entries that have a value */
    uint64_t bytes;  /* what counts towards the limit */
    uint64_t seed;
} hd_table;

enum { HD_OVERHEAD = 96 }; /* bytes counted per value besides key and value */

int hd_table_init(hd_table *t, uint64_t seed); /* 0, or -1 if out of memory */
void hd_table_free(hd_table *t);

hd_entry *hd_table_find(const hd_table *t, const uint8_t *key, uint64_t size);
hd_entry *hd_table_make(hd_table *t, const uint8_t *key, uint64_t size); /* NULL if out of memory */
/* Removes an entry that is empty and that no client waits for. */
void hd_table_tidy(hd_table *t, hd_entry *e);

/* Takes over the caller's share of v->in. */
void hd_table_put(hd_table *t, hd_entry *e, hd_value v);
/* Returns whether there was a value. Keeps the entry: tidy it. */
int hd_table_delete(hd_table *t, hd_entry *e);
/* Returns 0, or -1 if out of memory. */
int hd_table_append(hd_table *t, hd_entry *e, const uint8_t *tail, uint64_t size);
int hd_table_push(hd_table *t, hd_entry *e, hd_value v);
/* The queue must not be empty; the queue's share passes to the caller. */
hd_value hd_table_pop(hd_table *t, hd_entry *e);

#endif
