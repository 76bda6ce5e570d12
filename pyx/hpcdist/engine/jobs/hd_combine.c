/* See hd_combine.h. */
#include <pthread.h>

#include "hd_combine.h"
#include "hd_float_mode.h"
#include "hd_kernels.h"

void hd_combine(int redop, int dtype, const char *from, char *to, int64_t n)
{
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    const hd_float_mode mode = hd_float_mode_plain(); /* as in all sums: see hd_exec() */
    pthread_mutex_lock(&one_at_a_time);
    hd_reduce_kernel(redop, dtype)(from, to, to, n);
    pthread_mutex_unlock(&one_at_a_time);
    if (mode)
        hd_float_mode_restore(mode);
}
