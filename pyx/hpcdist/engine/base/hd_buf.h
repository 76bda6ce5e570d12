/* A buffer: what the engine knows of one tensor or array. Filled by _buffer.pyx. */
#ifndef HD_BUF_H
#define HD_BUF_H

#include <stdint.h>

#define HD_MAX_DIMS 8 /* dimensions kept for messages; the layout hash covers all of them */

typedef struct hd_buf {
    char *ptr;
    int64_t n; /* elements */
    int dtype; /* hd_types.h */
    int ndim;
    int64_t dims[HD_MAX_DIMS];
    uint64_t shape;   /* hash of the shape */
    uint64_t strides; /* 0 when C-contiguous, else a hash of the strides of a dense layout */
} hd_buf;

#endif
