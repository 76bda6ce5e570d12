/* A group's caucus, from the meeting of each node's ranks to the group's end. */
#ifndef HD_CAUCUS_LIFE_H
#define HD_CAUCUS_LIFE_H

#include "hd_caucus.h"
#include "hd_comm.h"

/* Collective over the group, which is split. *out is NULL on all ranks where memory is missing.
 * Returns MPI's code. */
int hd_caucus_open(hd_comm *c, hd_caucus **out);
/* Gives the memory back when this rank has left; and later the rest. */
void hd_caucus_close(hd_caucus *k);
void hd_caucus_free(hd_caucus *k);

#endif
