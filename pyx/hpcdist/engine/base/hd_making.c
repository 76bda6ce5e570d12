/* See hd_making.h. A thread counts itself before it looks whether a rank recovers, and a rank that
 * recovers says so before it looks at the count: one of them sees the other. */
#include <time.h>

#include "hd_base.h"
#include "hd_making.h"
#include "hd_session.h"

static entry *own(const hd_session *s) { return s->page ? &s->page[s->slot] : (entry *)&s->alone; }

int hd_making_is_vain(const hd_session *s)
{
    const entry *all = s->page ? s->page : own(s);
    int vain = 0;
    for (int i = 0; i < (s->page ? s->node_n : 1); i++)
        vain |= __atomic_load_n(&all[i].recovers, __ATOMIC_SEQ_CST) != 0;
    return vain;
}

int hd_making_begin(hd_session *s)
{
    __atomic_add_fetch(&own(s)->makes, 1, __ATOMIC_SEQ_CST);
    if (!hd_making_is_vain(s))
        return HD_OK;
    hd_making_end(s);
    return HD_ERR_FAILED;
}

void hd_making_end(hd_session *s) { __atomic_sub_fetch(&own(s)->makes, 1, __ATOMIC_SEQ_CST); }

int hd_making_goes_on(const hd_session *s)
{
    const entry *all = s->page ? s->page : own(s);
    int made = 0;
    for (int i = 0; i < (s->page ? s->node_n : 1); i++)
        made |= !(s->page && __atomic_load_n(&s->dead[i], __ATOMIC_ACQUIRE)) &&
                __atomic_load_n(&all[i].makes, __ATOMIC_SEQ_CST) != 0;
    return made;
}

void hd_making_stop(hd_session *s, uint32_t how)
{
    const int64_t until = hd_later(hd_now(), HD_MAKING_NS);
    const struct timespec nap = {0, 1000000};
    __atomic_store_n(&own(s)->recovers, how, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&own(s)->makes, __ATOMIC_SEQ_CST) && hd_now() < until &&
           !__atomic_load_n(&s->broken, __ATOMIC_ACQUIRE))
        nanosleep(&nap, NULL);
}

void hd_making_broke(hd_session *s)
{
    uint32_t how = HD_NO_DEATH;
    (void)__atomic_compare_exchange_n(&own(s)->recovers, &how, HD_BROKE, 0, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE);
}
