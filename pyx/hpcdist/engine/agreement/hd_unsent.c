/* Posts whose messages MPI has not sent yet: see hd_unsent.h. */
#include <pthread.h>
#include <stddef.h>

#include "hd_post.h"
#include "hd_unsent.h"

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static hd_post *kept;
static int many; /* atomic */

int hd_unsent_any(void) { return __atomic_load_n(&many, __ATOMIC_SEQ_CST); }

/* With mu held. */
static void let_go(hd_post **at)
{
    hd_post *p = *at;
    *at = p->next;
    __atomic_sub_fetch(&many, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&p->kept, 0, __ATOMIC_RELEASE);
}

int hd_unsent_keep(hd_post *p)
{
    if (!hd_post_unsent(p))
        return 0;
    pthread_mutex_lock(&mu);
    __atomic_store_n(&p->kept, 1, __ATOMIC_RELEASE);
    p->next = kept;
    kept = p;
    __atomic_add_fetch(&many, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&mu);
    return 1;
}

void hd_unsent_take(hd_post *p)
{
    if (!p || !__atomic_load_n(&p->kept, __ATOMIC_ACQUIRE))
        return;
    pthread_mutex_lock(&mu);
    for (hd_post **at = &kept; *at; at = &(*at)->next)
        if (*at == p) {
            let_go(at);
            break;
        }
    pthread_mutex_unlock(&mu);
}

void hd_unsent_look_after(void)
{
    if (!hd_unsent_any())
        return;
    pthread_mutex_lock(&mu);
    for (hd_post **at = &kept; *at;)
        if (hd_post_unsent(*at))
            at = &(*at)->next;
        else
            let_go(at);
    pthread_mutex_unlock(&mu);
}
