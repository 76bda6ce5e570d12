/* The error of a message whose time is over. */
#ifndef HD_OVERDUE_H
#define HD_OVERDUE_H

#include "hd_job.h"

/* text: of HD_TEXT bytes. waited: seconds. over: MPI is done with a receive. */
void hd_say_overdue(char *text, const hd_job *j, double waited, int over);

#endif
