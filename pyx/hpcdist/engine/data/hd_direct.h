/* Operations on tensors that lie in blocks of the node's memory: see hd_direct.c. */
#ifndef HD_DIRECT_H
#define HD_DIRECT_H

#include <stdint.h>

#include "hd_job.h"

/* Whether this rank's tensors allow it; all ranks' have to, which the entry check finds out. */
int hd_direct_finds(const hd_comm *c, const hd_job *j);
/* j->direct, agreed. 1: this way; 0: another way, as on all ranks; -1: failed. */
int hd_direct_takes(hd_comm *c, hd_job *j);
/* Returns HD_OK also where j->code says that a signal handler has raised meanwhile. */
int hd_direct(hd_comm *c, hd_job *j);

#endif
