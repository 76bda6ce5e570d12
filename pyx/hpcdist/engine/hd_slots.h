/* Blocks of one rank for another through the slots of a node's memory: see hd_slots.c. */
#ifndef HD_SLOTS_H
#define HD_SLOTS_H

#include "hd_job.h"

/* 1: done or failed, see j->text; 0: it goes another way, as on all ranks. */
int hd_slots(hd_comm *c, hd_job *j);

#endif
