/* Node memory for tensors: a block has a part for each rank of a group, and every rank maps all of
 * it.
 *
 * A block is used again once no rank's tensor lies in it. Each rank notes in the block's head when
 * its tensor is gone, at its own time. With the next request, which is collective, one rank looks
 * and decides for all of them: which block is used again, or which ones are freed before a new one
 * is made. So the ranks' lists of blocks are the same without further messages. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_block.h"
#include "hd_combine.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_report.h"
#include "hd_shared.h"
#include "hd_status.h"
#include "hd_stopped.h"
#include "hd_threads.h"
#include "hd_types.h"

#define LARGE_PAGE (2ll << 20)
#define DROPS 31 /* blocks freed at a time */

typedef struct owner {
    int32_t returned __attribute__((aligned(HD_LINE))); /* atomic: its tensor is gone */
    int32_t detached;                                   /* atomic: it no longer maps its part */
    int32_t held; /* atomic: 1 + the rank that accumulates into its part, or 0 */
} owner;

struct hd_block {
    hd_block *next, *in_every;
    uint64_t id;
    owner *owners; /* the head of the memory: one per rank, */
    char *parts;   /* and from the next page on their parts */
    size_t bytes;  /* of all of it */
    int64_t part;  /* bytes of one part */
    int rank, size;
    int refs;  /* atomic: the communicator and the tensor */
    pid_t pid; /* a child of fork has the tensor too, and returns nothing */
};

/* The blocks of all groups. */
static struct {
    pthread_mutex_t mu; /* also of the step from one reference to none */
    hd_block *first;
} every = {PTHREAD_MUTEX_INITIALIZER, NULL};

typedef struct choice {
    uint64_t again; /* the block to be used again, or 0 */
    uint64_t drops[DROPS];
} choice;

/* 64 KiB on some machines. */
static int64_t page_size(void)
{
    const long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 4096 ? bytes : 4096;
}

static int64_t up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

char *hd_block_part(const hd_block *b, int rank) { return b->parts + rank * b->part; }

static hd_block *by_id(const hd_comm *c, uint64_t id)
{
    hd_block *b = c->blocks;
    while (b && b->id != id)
        b = b->next;
    return b;
}

void hd_block_unref(hd_block *b)
{
    int refs;
    if (b->pid != getpid()) /* another thread may have had the lock when it forked */
        return;
    pthread_mutex_lock(&every.mu);
    refs = __atomic_sub_fetch(&b->refs, 1, __ATOMIC_ACQ_REL);
    for (hd_block **at = &every.first; !refs && *at; at = &(*at)->in_every)
        if (*at == b) {
            *at = b->in_every;
            break;
        }
    pthread_mutex_unlock(&every.mu);
    if (refs)
        return;
    munmap(b->owners, b->bytes);
    free(b);
}

void hd_block_return(hd_block *b)
{
    if (b->pid != getpid())
        return;
    __atomic_store_n(&b->owners[b->rank].returned, 1, __ATOMIC_RELEASE);
    hd_block_unref(b);
}

void hd_blocks_close(hd_comm *c)
{
    hd_block *list;
    pthread_mutex_lock(&c->mu);
    list = c->blocks;
    c->blocks = NULL;
    pthread_mutex_unlock(&c->mu);
    while (list) {
        hd_block *b = list;
        list = b->next;
        hd_block_unref(b);
    }
}

/* ---- requests ---- */

static int loose(const hd_block *b)
{
    for (int r = 0; r < b->size; r++)
        if (!__atomic_load_n(&b->owners[r].returned, __ATOMIC_ACQUIRE))
            return 0;
    return 1;
}

static int whole(const hd_block *b)
{
    for (int r = 0; r < b->size; r++)
        if (__atomic_load_n(&b->owners[r].detached, __ATOMIC_ACQUIRE))
            return 0;
    return 1;
}

/* By rank 0: the smallest free block that is not much too large, or all free blocks go. */
static void choose(const hd_comm *c, int64_t need, choice *out)
{
    const hd_block *best = NULL;
    int n = 0;
    for (const hd_block *b = c->blocks; b; b = b->next) {
        if (!loose(b))
            continue;
        if (n < DROPS)
            out->drops[n++] = b->id;
        if (b->part >= need && b->part / 2 <= up(need, page_size()) && whole(b) &&
            (!best || b->part < best->part))
            best = b;
    }
    if (!best)
        return;
    memset(out->drops, 0, sizeof out->drops);
    out->again = best->id;
}

static void drop(hd_comm *c, const choice *pick)
{
    for (int i = 0; i < DROPS && pick->drops[i]; i++)
        for (hd_block **at = &c->blocks; *at; at = &(*at)->next)
            if ((*at)->id == pick->drops[i]) {
                hd_block *b = *at;
                pthread_mutex_lock(&c->mu);
                *at = b->next;
                pthread_mutex_unlock(&c->mu);
                hd_block_unref(b);
                break;
            }
}

/* Nothing, on all ranks, if one of them cannot map it. */
static int create(hd_comm *c, hd_job *j, hd_block **out)
{
    const int64_t page = j->count < LARGE_PAGE ? page_size() : LARGE_PAGE,
                  part = up(j->count, page), head = up(c->size * (int64_t)sizeof(owner), page);
    hd_block *b = calloc(1, sizeof *b);
    void *at = NULL;
    int ok = b != NULL, rc;

    *out = NULL;
    rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, c->mpi);
    if (!rc && ok)
        rc = hd_share(c->mpi, (size_t)(head + c->size * part), &at);
    if (!at) {
        free(b);
        return hd_mpi_failed(j, rc, "MPI_Allreduce");
    }
    *b = (hd_block){.id = ++c->block_ids,
                    .owners = at,
                    .parts = (char *)at + head,
                    .bytes = (size_t)(head + c->size * part),
                    .part = part,
                    .rank = c->rank,
                    .size = c->size,
                    .refs = 1,
                    .pid = getpid()};
    pthread_mutex_lock(&every.mu);
    b->in_every = every.first;
    every.first = b;
    pthread_mutex_unlock(&every.mu);
    pthread_mutex_lock(&c->mu);
    b->next = c->blocks;
    c->blocks = *out = b;
    pthread_mutex_unlock(&c->mu);
    return HD_OK;
}

int hd_block_take(hd_comm *c, hd_job *j)
{
    choice pick = {0};
    hd_block *b = NULL;
    int rc, code = HD_OK;

    if (!c->page || c->on_device || j->count <= 0 || j->count > (INT64_MAX >> 1) / c->size)
        return HD_OK;
    hd_mpi_lock(c->session);
    /* Without the entry check rank 0 might choose before the others have taken what it gave. */
    rc = c->check || c->size == 1 ? MPI_SUCCESS : MPI_Barrier(c->mpi);
    if (c->rank == 0)
        choose(c, j->count, &pick);
    if (!rc)
        rc = MPI_Bcast(&pick, sizeof pick, MPI_BYTE, 0, c->mpi);
    if (!rc && pick.again) {
        b = by_id(c, pick.again);
        __atomic_store_n(&b->owners[b->rank].returned, 0, __ATOMIC_RELEASE);
    } else if (!rc) {
        drop(c, &pick);
        code = create(c, j, &b);
    }
    hd_mpi_unlock(c->session);
    if (hd_mpi_failed(j, rc, "MPI_Bcast"))
        return j->code;
    if (b) {
        b->pid = getpid();
        __atomic_add_fetch(&b->refs, 1, __ATOMIC_RELAXED);
        *j->new_block = b;
    }
    return code;
}

/* ---- places ---- */

int hd_block_find(const hd_comm *c, const char *at, int64_t bytes, hd_spot *out)
{
    for (const hd_block *b = c->blocks; b; b = b->next) {
        const char *from = hd_block_part(b, b->rank);
        if (at < from || at + bytes > from + b->part)
            continue;
        *out = (hd_spot){b->id, at - from};
        return !b->owners[b->rank].detached;
    }
    return 0;
}

int hd_block_holds(hd_comm *c, const char *at, int64_t bytes, hd_spot *out)
{
    int found;
    pthread_mutex_lock(&c->mu);
    found = hd_block_find(c, at, bytes, out);
    pthread_mutex_unlock(&c->mu);
    return found;
}

char *hd_block_at(const hd_comm *c, int rank, hd_spot place)
{
    const hd_block *b = by_id(c, place.block);
    return b ? hd_block_part(b, rank) + place.at : NULL;
}

/* One call replaces the pages: there is no moment without memory at that address. Where there is no
 * memory for the copy, others may write into the tensor until they have left the operation. */
void hd_block_detach(hd_comm *c, hd_spot place)
{
    hd_block *b = by_id(c, place.block);
    char *part = b ? hd_block_part(b, b->rank) : NULL;
    void *own;

    if (!b || b->owners[b->rank].detached)
        return;
    own = mmap(NULL, (size_t)b->part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED)
        return;
    /* Before the copy: whoever writes too late to be in it finds this afterwards. */
    __atomic_store_n(&b->owners[b->rank].detached, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    memcpy(own, part, (size_t)b->part);
    if (mremap(own, (size_t)b->part, (size_t)b->part, MREMAP_MAYMOVE | MREMAP_FIXED, part) ==
        MAP_FAILED) {
        munmap(own, (size_t)b->part);
        __atomic_store_n(&b->owners[b->rank].detached, 0, __ATOMIC_SEQ_CST);
    }
}

/* ---- windows ---- */

hd_block *hd_block_ref(hd_comm *c, uint64_t id)
{
    hd_block *b;
    pthread_mutex_lock(&c->mu);
    b = by_id(c, id);
    if (b)
        __atomic_add_fetch(&b->refs, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&c->mu);
    return b;
}

int hd_block_whole(const hd_block *b, int rank)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* after what was written: see hd_block_detach */
    return !__atomic_load_n(&b->owners[rank].detached, __ATOMIC_ACQUIRE);
}

/* A rank that dies while it holds the part ends the job, by the watchdog. */
static int hold(hd_comm *c, hd_job *j, hd_block *b, int rank)
{
    int32_t *held = &b->owners[rank].held;
    hd_waiter w;
    hd_waiter_init(&w, hd_session_spin(c->session, 0), j->timeout);
    for (;;) {
        int32_t by = 0;
        enum hd_gone how;
        int ev;
        if (__atomic_compare_exchange_n(held, &by, c->rank + 1, 0, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED))
            return HD_OK;
        ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(j))
            return j->code = HD_ERR_INTERRUPT;
        how = ev & HD_WAIT_HOOK ? hd_session_gone(c->session, c->node_slot[by - 1]) : HD_HERE;
        /* It may have let go before it went: the order of these two looks matters. */
        if (how && __atomic_load_n(held, __ATOMIC_ACQUIRE) == by) {
            char way[HD_DESC];
            hd_text t;
            hd_text_init(&t, way, sizeof way);
            hd_say_gone(&t, c, by - 1, how);
            hd_fail(j, HD_ERR_FAILED,
                    "rank %d of group '%s' %s while it held the memory of rank %d, for which "
                    "accumulate waits (this is rank %d of %d)",
                    by - 1, c->name, way, rank, c->rank, c->size);
            return HD_ERR_FAILED;
        }
        if (ev & HD_WAIT_EXPIRED) {
            hd_fail(j, HD_ERR_TIMEOUT,
                    "timeout after %.3g s in accumulate of group '%s' (this is rank %d of %d): "
                    "rank "
                    "%d has held the memory of rank %d",
                    hd_waiter_elapsed(&w), c->name, c->rank, c->size, by - 1, rank);
            return HD_ERR_TIMEOUT;
        }
    }
}

/* The block of any group in whose part these bytes of this rank lie, or NULL. */
static hd_block *around(const char *at, int64_t bytes)
{
    hd_block *b;
    pthread_mutex_lock(&every.mu);
    for (b = every.first; b; b = b->in_every) {
        const char *from = hd_block_part(b, b->rank);
        if (at >= from && at + bytes <= from + b->part)
            break;
    }
    if (b)
        __atomic_add_fetch(&b->refs, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&every.mu);
    return b;
}

int hd_block_combine(int redop, int dtype, const char *from, char *to, int64_t n)
{
    hd_block *b = around(to, n * (int64_t)hd_itemsize(dtype));
    int32_t nobody = 0, *held = b ? &b->owners[b->rank].held : NULL;
    const int may = !b || __atomic_compare_exchange_n(held, &nobody, b->rank + 1, 0,
                                                      __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    if (may)
        hd_combine(redop, dtype, from, to, n);
    if (b && may)
        __atomic_store_n(held, 0, __ATOMIC_RELEASE);
    if (b)
        hd_block_unref(b);
    return may;
}

/* Into memory of this rank's that a window has not mapped; another one may have. */
static int accumulate_here(hd_comm *c, hd_job *j, const char *from, char *to, int64_t n)
{
    hd_waiter w;
    hd_waiter_init(&w, hd_session_spin(c->session, 0), j->timeout);
    while (!hd_block_combine(j->redop, j->dtype, from, to, n)) {
        const int ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && hd_py.slow && hd_py.slow(j))
            return j->code = HD_ERR_INTERRUPT;
        if (ev & HD_WAIT_EXPIRED) {
            hd_fail(j, HD_ERR_TIMEOUT,
                    "timeout after %.3g s in accumulate of group '%s' (this is rank %d of %d): a "
                    "rank of another group has held this rank's memory",
                    hd_waiter_elapsed(&w), c->name, c->rank, c->size);
            return j->code;
        }
    }
    return HD_OK;
}

int hd_block_accumulate(hd_comm *c, hd_job *j, hd_block *b, int rank, const char *from, char *to,
                        int64_t n)
{
    const int code = b ? hold(c, j, b, rank) : accumulate_here(c, j, from, to, n);
    if (!b)
        return code;
    if (code == HD_ERR_TIMEOUT)
        hd_stopped_explain(c, j);
    if (code)
        return j->code;
    /* No Python code runs while the memory is held: a signal handler may accumulate as well. */
    hd_combine(j->redop, j->dtype, from, to, n);
    __atomic_store_n(&b->owners[rank].held, 0, __ATOMIC_RELEASE);
    return HD_OK;
}
