/* The page of a group from its mapping to the last member's leave. */
#include <sys/mman.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_page.h"
#include "hd_page_life.h"
#include "hd_shared.h"
#include "hd_status.h"
#include "hd_threads.h"

int hd_page_open(hd_comm *c)
{
    void *at = NULL;
    int rc;
    c->page_bytes = hd_page_size(c->size);
    rc = hd_share(c->mpi, c->page_bytes, &at);
    c->page = at;
    return rc;
}

void hd_page_close(hd_comm *c)
{
    if (c->page)
        munmap(c->page, c->page_bytes);
    c->page = NULL;
}

void hd_page_mark(hd_comm *c, int64_t unread, enum hd_closed how)
{
    hd_words *mine = hd_words_of(c) + c->rank;
    mine->unread = unread;
    __atomic_store_n(&mine->closed, how, __ATOMIC_RELEASE);
}

int hd_page_leave(hd_comm *c, int64_t unread, double seconds)
{
    hd_words *all = hd_words_of(c);
    int64_t left = 0;
    hd_waiter w;

    hd_page_mark(c, unread, HD_DESTROYED);
    hd_waiter_init(&w, hd_session_spin(c->session, 0), seconds);
    for (int r = 0; r < c->size; r++) {
        while (!__atomic_load_n(&all[r].closed, __ATOMIC_ACQUIRE)) {
            const int ev = hd_waiter_step(&w);
            if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(NULL))
                return -1;
            if ((ev & HD_WAIT_EXPIRED) ||
                ((ev & HD_WAIT_HOOK) &&
                 (__atomic_load_n(&c->closing, __ATOMIC_ACQUIRE) == HD_COMM_CLOSED ||
                  hd_session_broken(c->session) || hd_session_gone(c->session, c->node_slot[r]))))
                return HD_LATER;
        }
        left += all[r].unread;
    }
    return left == 0 ? HD_TOGETHER : HD_KEEP;
}

int hd_page_left(const hd_comm *c)
{
    const hd_words *all = hd_words_of(c);
    int64_t left = 0;
    for (int r = 0; r < c->size; r++) {
        if (!__atomic_load_n(&all[r].closed, __ATOMIC_ACQUIRE))
            return -1;
        left += all[r].unread;
    }
    return left == 0;
}
