/* Blocks of one rank for another through the slots of a node's memory: see hd_slots.c. */
#ifndef HD_SLOTS_H
#define HD_SLOTS_H

#include "hd_job.h"

/* 1: this way; 0: another way, as on all ranks; -1: failed. */
int hd_slots_takes(hd_comm *c, hd_job *j);
/* Returns HD_OK also where j->code says that a signal handler has raised meanwhile. */
int hd_slots(hd_comm *c, hd_job *j);

#endif
