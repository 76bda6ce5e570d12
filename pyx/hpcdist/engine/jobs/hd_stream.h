/* Copies that write past the caches. */
#ifndef HD_STREAM_H
#define HD_STREAM_H

#include <stddef.h>
#include <stdint.h>

/* Whether a result of so many bytes is to be written so. Never where the processor has no such
 * stores. */
int hd_streams(int64_t bytes);

/* As memcpy. Other threads see the copy as they see ordinary stores. */
void hd_stream(void *to, const void *from, size_t bytes);

#endif
