/* Communicators: a file of shared memory for each, how ranks meet in it, wait in it, and leave it. */
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int standin_version(void);

void comm_fail(comm *c, int code, const char *text, ...)
{
    int expected = OK;
    va_list arguments;
    if (!atomic_compare_exchange_strong(&c->async, &expected, code)) {
        expected = IN_PROGRESS;
        if (!atomic_compare_exchange_strong(&c->async, &expected, code))
            return; /* the first failure is the one that tells */
    }
    va_start(arguments, text);
    vsnprintf(c->error, sizeof c->error, text, arguments);
    va_end(arguments);
}

comm *comm_new(const char *name, int size, int rank, int blocking)
{
    comm *c = calloc(1, sizeof *c);
    c->refs = 1;
    c->rank = rank;
    c->size = size;
    c->blocking = blocking;
    snprintf(c->name, sizeof c->name, "%s", name);
    return c;
}

void comm_put(comm *c)
{
    if (atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    if (c->mem)
        munmap(c->mem, sizeof *c->mem);
    c->mem = NULL; /* the rest stays, so that a later use is found out and breaks nothing */
}

static _Atomic int busy; /* on all communicators */

void comm_busy(comm *c, int by)
{
    atomic_fetch_add(&c->busy, by);
    atomic_fetch_add(&busy, by);
}

int comm_others_busy(comm *c) { return atomic_load(&busy) > atomic_load(&c->busy); }

int comm_hold(comm *c)
{
    atomic_fetch_add(&c->inside, 1);
    if (!atomic_load(&c->stop))
        return 0;
    comm_release(c);
    return -1;
}

void comm_release(comm *c) { atomic_fetch_sub(&c->inside, 1); }

/* The caller may free the tensors next, which are the process's own memory here: what is inside has to come out. */
void comm_stop(comm *c)
{
    atomic_store(&c->stop, 1);
    while (atomic_load(&c->inside))
        nap(50000);
}

/* Whether a rank is alive; a process that has ended and not been waited for is not. */
static int alive(int pid)
{
    char path[64], text[512], *after;
    ssize_t n;
    int fd;
    if (!pid)
        return 1; /* has not arrived yet */
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    after = strrchr(text, ')');
    return !after || (after[2] != 'Z' && after[2] != 'X');
}

int comm_lost(comm *c)
{
    int async = atomic_load(&c->async);
    return atomic_load(&c->stop) || (async != OK && async != IN_PROGRESS);
}

int comm_gone(comm *c, int rank)
{
    place *other = &c->mem->at[rank];
    return atomic_load(&other->left) || !alive(atomic_load(&other->pid));
}

int comm_wait(comm *c, _Atomic uint64_t *word, uint64_t until, int peer)
{
    int64_t pause = 5000, looked = nanoseconds();
    while (atomic_load(word) < until) {
        if (comm_lost(c))
            return -1;
        nap(pause);
        if (pause < 200000)
            pause *= 2;
        if (nanoseconds() - looked < 20000000)
            continue;
        looked = nanoseconds();
        if (comm_gone(c, peer) && atomic_load(word) < until) {
            comm_fail(c, REMOTE, "rank %d has left or died", peer);
            return -1;
        }
    }
    return 0;
}

static int meet(comm *c)
{
    int64_t pause = 10000;
    while (atomic_load(&c->mem->joined) < c->size) {
        if (atomic_load(&c->stop))
            return -1;
        nap(pause);
        if (pause < 1000000)
            pause *= 2;
    }
    return 0;
}

int comm_join(comm *c)
{
    int fd = shm_open(c->name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    const char *bus = getenv("NCCL_STANDIN_BUS");
    if (fd < 0 || ftruncate(fd, sizeof *c->mem) < 0) {
        comm_fail(c, SYSTEM, "shm_open %s: %s", c->name, strerror(errno));
        return SYSTEM;
    }
    void *at = mmap(NULL, sizeof *c->mem, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) {
        comm_fail(c, SYSTEM, "mmap: %s", strerror(errno));
        return SYSTEM;
    }
    c->mem = at;
    place *own = &c->mem->at[c->rank];
    own->version = standin_version();
    snprintf(own->bus, sizeof own->bus, "%s", bus ? bus : "");
    atomic_store(&own->pid, (int)getpid());
    atomic_fetch_add(&c->mem->joined, 1);
    if (meet(c) < 0) {
        shm_unlink(c->name);
        return INTERNAL;
    }
    shm_unlink(c->name); /* all have it open; the first to get here removes the name */
    for (int i = 0; i < c->size; i++) {
        place *other = &c->mem->at[i];
        if (other->version != own->version) {
            comm_fail(c, INTERNAL, "rank %d runs version %d, rank %d runs %d", i, other->version, c->rank,
                      own->version);
            return INTERNAL;
        }
        if (i != c->rank && own->bus[0] && !strcmp(own->bus, other->bus)) {
            comm_fail(c, USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", c->rank, i,
                      own->bus);
            return USAGE;
        }
    }
    return OK;
}

static int control_step(comm *c)
{
    c->control++;
    atomic_store(&c->mem->at[c->rank].control, c->control);
    for (int i = 0; i < c->size; i++)
        if (comm_wait(c, &c->mem->at[i].control, c->control, i) < 0)
            return -1;
    return 0;
}

int comm_control(comm *c, int color, int key)
{
    c->mem->at[c->rank].color = color;
    c->mem->at[c->rank].key = key;
    return control_step(c);
}

int comm_control_done(comm *c) { return control_step(c); }
