/* Runs a job. */
#ifndef HD_EXEC_H
#define HD_EXEC_H

#include "hd_job.h"

void hd_exec(hd_comm *c, hd_job *j); /* check and data; fills code and text */

#endif
