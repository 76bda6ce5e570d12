/* An ordinary store first reads its cache line from memory. For a long result that is a third of
 * the traffic, in vain, and the line drives out what a cache could keep. */
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "hd_stream.h"

#ifndef HD_STREAM_LEAST
#define HD_STREAM_LEAST (8 << 20) /* bytes: see docs/performance.md */
#endif
#define LINE 64

#ifdef __SSE2__

int hd_streams(int64_t bytes) { return bytes >= HD_STREAM_LEAST; }

void hd_stream(void *to, const void *from, size_t bytes)
{
    const char *in = from;
    char *out = to;
    size_t before = -(uintptr_t)to % LINE;

    before = before < bytes ? before : bytes;
    memcpy(out, in, before);
    for (out += before, in += before, bytes -= before; bytes >= LINE; bytes -= LINE)
        for (int i = 0; i < LINE; i += 16, out += 16, in += 16)
            _mm_stream_si128((__m128i *)out, _mm_loadu_si128((const __m128i *)in));
    memcpy(out, in, bytes);
    _mm_sfence();
}

#else

int hd_streams(int64_t bytes)
{
    (void)bytes;
    return 0;
}

void hd_stream(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

#endif
