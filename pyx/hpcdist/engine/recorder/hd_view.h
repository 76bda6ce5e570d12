/* Another process's recorder file, as this one reads it: its operations in words. */
#ifndef HD_VIEW_H
#define HD_VIEW_H

#include "hd_base.h"
#include "hd_recorder.h"

typedef struct hd_view {
    hd_rec_head *head;
    const hd_record *ring;
    const char *log, *stacks;
    size_t bytes; /* mapped here; 0: it is this process's own */
} hd_view;

int hd_view_open(hd_view *v, const char *path); /* 0: there is none that can be read */
void hd_view_close(hd_view *v);

/* "all_reduce #7 of group 'world', float32, 12 elements, called at train.py:42 in step". */
void hd_view_say(const hd_view *v, const hd_record *r, hd_text *t);
/* The operations that have not ended, and the last one; "" if there is none. */
void hd_view_operations(const hd_view *v, hd_text *t);
void hd_view_name(const hd_view *v, unsigned number, char *out, size_t room); /* "all_reduce" */
/* The number that a group has in this file, 0: it does not know it. */
unsigned hd_view_group(const hd_view *v, uint64_t uid);
/* A group's collective with that number, and its last one; 0: it is not there. */
int hd_view_find(const hd_view *v, unsigned group, uint32_t seq, hd_record *at, hd_record *last);
/* The group's oldest collective after number `after` that has not ended; at last operation `id`. */
int hd_view_next(const hd_view *v, unsigned group, uint64_t after, uint64_t id, hd_record *at);
/* The innermost frames of the main thread: "load.py:12 in read < train.py:50 in main". */
void hd_view_where(const hd_view *v, hd_text *t);

#endif
