/* What other ranks add to memory of this one. */
#ifndef HD_COMBINE_H
#define HD_COMBINE_H

#include <stdint.h>

/* Combines n elements with those at `to`, in place there, one thread of the process at a time. */
void hd_combine(int redop, int dtype, const char *from, char *to, int64_t n);

#endif
