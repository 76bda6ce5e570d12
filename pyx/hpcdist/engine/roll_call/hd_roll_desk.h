/* Threads of one process may hold roll calls at the same time, on one communicator and with the
 * same tags. Each word that arrives is for one of them: the desk knows whose it is. */
#ifndef HD_ROLL_DESK_H
#define HD_ROLL_DESK_H

#include "hd_roll_words.h"

/* The desk of a communicator, made when first asked for. NULL: no memory. */
hd_desk *hd_desk_of(hd_comm *c);
void hd_desk_free(hd_desk *d);

/* A roll call begins and ends. Of two that are held at once, each has a list of its own. */
void hd_desk_open(hd_roll *r, uint64_t number);
void hd_desk_close(hd_roll *r, int made);

/* As hd_roll_hear, but the words of other roll calls are kept for them. */
int hd_desk_hear(hd_roll *r, int from, int tag, hd_word *w, int *there);

/* Whether `from` holds a roll call that no thread has joined here. *list: of its members. */
int hd_desk_elsewhere(const hd_roll *r, int from, uint64_t *list);

#endif
