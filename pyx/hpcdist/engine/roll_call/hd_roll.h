/* The roll call: the members of a group to be meet by messages, under a deadline, before they make
 * MPI calls that block until all have arrived. All members get the same verdict. Each sends and
 * receives at most 4 messages with each of its neighbours in a tree. */
#ifndef HD_ROLL_H
#define HD_ROLL_H

#include "hd_roll_words.h"

/* HD_OK on all members, or an error on all members that arrived. */
int hd_roll_call(hd_roll *r);

#endif
