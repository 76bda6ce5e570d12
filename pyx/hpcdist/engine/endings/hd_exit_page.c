/* The status page at the end of the process: see hd_exit_page.h. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hd_comm.h"
#include "hd_exit_page.h"
#include "hd_last_words.h"
#include "hd_session.h"

/* The entry that tells the others that this process is on its way out; kept mapped after the
 * session. */
static entry *exit_page;
static int exit_open;                     /* its session still uses it */
static int exit_n, exit_slot, exit_whole; /* exit_whole: the node's ranks are all the ranks */
static size_t exit_bytes;
static int exit_same_pids;        /* the pids on the page are valid in this process's namespace */
static struct pollfd *exit_peers; /* set while this process waits, at its end, for the others */

void hd_exit_follow(hd_session *s)
{
    if (!s->page)
        return;
    if (exit_page && !exit_open)
        munmap(exit_page, exit_bytes);
    exit_open = 1;
    exit_page = s->page;
    exit_n = s->node_n;
    exit_slot = s->slot;
    exit_bytes = s->page_bytes;
    exit_whole = s->node_n == s->size;
    exit_same_pids = 1;
    for (int i = 0; i < exit_n; i++)
        exit_same_pids &= s->pidfd[i] != UNSEEN || i == exit_slot;
}

void hd_exit_unfollow(hd_session *s)
{
    if (s->page && s->page == exit_page)
        exit_open = 0;
    else if (s->page)
        munmap(s->page, s->page_bytes);
}

int hd_exit_rank(void) { return exit_page ? (int)exit_page[exit_slot].world_rank : -1; }

int hd_exit_others_run(void)
{
    int others = !exit_whole;
    for (int i = 0; i < exit_n; i++)
        others |= __atomic_load_n(&exit_page[i].state, __ATOMIC_ACQUIRE) == RUNNING;
    return others;
}

void hd_exit_set_finalizing(void)
{
    if (exit_page)
        __atomic_store_n(&exit_page[exit_slot].finalizes, 1, __ATOMIC_RELEASE);
}

int hd_exit_others_work(void)
{
    int others = 0;
    for (int i = 0; exit_same_pids && i < exit_n; i++)
        others |= i != exit_slot && !__atomic_load_n(&exit_page[i].finalizes, __ATOMIC_ACQUIRE) &&
                  kill((pid_t)exit_page[i].pid, 0) == 0;
    return others;
}

void hd_exit_set_aborted(void)
{
    if (exit_page)
        __atomic_store_n(&exit_page[exit_slot].state, ABORTED, __ATOMIC_RELEASE);
}

/* A file of shared memory has a name only while ranks open it. A job that ends in between leaves
 * the name behind: the rank that ends the job removes the files named after the node's ranks. */
void hd_exit_unlink_segments(void)
{
    DIR *shm = exit_page && exit_same_pids ? opendir("/dev/shm") : NULL;
    struct dirent *file;
    unsigned pid;
    while (shm && (file = readdir(shm)))
        for (int i = 0; sscanf(file->d_name, "hpcdist-%u-", &pid) == 1 && i < exit_n; i++)
            if (exit_page[i].pid == pid)
                unlinkat(dirfd(shm), file->d_name, 0);
    if (shm)
        closedir(shm);
}

/* Without a launcher: opens the descriptors that hd_exit_watch() polls while this process waits for
 * the others to end. */
void hd_exit_watch_begin(void)
{
    struct pollfd *peers;
    if (!exit_page || !exit_same_pids || !(peers = calloc((size_t)exit_n, sizeof *peers)))
        return;
    for (int i = 0; i < exit_n; i++) {
        int fd = i == exit_slot ? -1 : (int)syscall(SYS_pidfd_open, exit_page[i].pid, 0);
        peers[i] = (struct pollfd){fd, POLLIN, 0};
        if (fd < 0 && i != exit_slot && errno == ESRCH)
            peers[i].revents = POLLIN; /* gone; poll() leaves an entry without a descriptor at 0 */
    }
    __atomic_store_n(&exit_peers, peers, __ATOMIC_RELEASE);
}

void hd_exit_watch(void)
{
    static int ticks, gone = -1;
    struct pollfd *peers = __atomic_load_n(&exit_peers, __ATOMIC_ACQUIRE);
    if (!peers)
        return;
    for (int i = 0; i < exit_n && gone < 0; i++)
        if (peers[i].revents & POLLIN)
            gone = i;
    if (gone < 0 && poll(peers, (nfds_t)exit_n, 0) <= 0)
        return;
    /* A rank that has passed MPI_Finalize may go; then this process follows at once. */
    if (gone >= 0 && ++ticks > 30) {
        char line[256];
        snprintf(line, sizeof line,
                 "[hpcdist rank %u, pid %d] rank %u (pid %u) has died, and this rank waits for it "
                 "in MPI_Finalize: ending the process",
                 exit_page[exit_slot].world_rank, (int)getpid(), exit_page[gone].world_rank,
                 exit_page[gone].pid);
        hd_tell(line);
        _exit(71); /* EX_OSERR */
    }
}
