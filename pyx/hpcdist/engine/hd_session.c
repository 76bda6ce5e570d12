/* A session: one job's ranks, as one init_process_group sees them. It contains the control
 * communicator, the node's status page (hd_status.c) and the watchdog (hd_watchdog.c), and counts
 * its communicators. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hd_meet.h"
#include "hd_session.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* ---- shared memory ---- */

/* Every rank allocates its part, so that the part lies in memory near the rank. A full /dev/shm is
 * an error here, not a SIGBUS later. */
static int allocate(int fd, int64_t bytes, int rank, int n)
{
    const int64_t from = bytes * rank / n / 4096 * 4096;
    const int64_t to = rank == n - 1 ? bytes : bytes * (rank + 1) / n / 4096 * 4096;
    int rc = 0;
    if (to > from)
        do
            rc = posix_fallocate(fd, (off_t)from, (off_t)(to - from));
        while (rc == EINTR);
    return rc;
}

int hd_session_share(MPI_Comm node, size_t bytes, void **out)
{
    char name[64] = "";
    int fd = -1, rank, n, ok;
    void *at = MAP_FAILED;

    *out = NULL;
    MPI_Comm_rank(node, &rank);
    MPI_Comm_size(node, &n);
    if (rank == 0) {
        snprintf(name, sizeof name, "/hpcdist-%d-%016llx", (int)getpid(), (unsigned long long)hd_random64());
        fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (fd < 0 || ftruncate(fd, (off_t)bytes)) {
            if (fd >= 0)
                shm_unlink(name);
            name[0] = 0;
        }
    }
    if (MPI_Bcast(name, sizeof name, MPI_CHAR, 0, node))
        return HD_ERR_BACKEND;
    if (rank != 0 && name[0])
        fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd >= 0 && name[0] && allocate(fd, (int64_t)bytes, rank, n) == 0)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (fd >= 0)
        close(fd);
    ok = at != MAP_FAILED;
    if (MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, node))
        ok = 0;
    if (rank == 0 && name[0])
        shm_unlink(name); /* either all ranks have mapped it or none will: a killed job leaves
                           * nothing behind */
    if (!ok) {
        if (at != MAP_FAILED)
            munmap(at, bytes);
        return HD_OK;
    }
    *out = at;
    return HD_OK;
}

/* MPICH keeps the name of its node's segment until MPI_Finalize, so each killed job would leave 2
 * MB behind in /dev/shm. All ranks of the node have mapped the segment when they are out of
 * MPI_Init: the name is no longer needed, and the memory is freed with the last of them. */
static void unlink_mpich_segment(void)
{
    static const char segment[] = "/dev/shm/mpich_shm_";
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        char *at = strstr(line, segment);
        if (at && !strstr(at, " (deleted)")) {
            at[strcspn(at, "\n")] = 0;
            unlink(at);
        }
    }
    if (maps)
        fclose(maps);
}

/* ---- queries ---- */

uint64_t hd_session_node(const hd_session *s, int *slot)
{
    *slot = s->page ? s->slot : -1;
    return s->node;
}
int hd_session_serialized(const hd_session *s) { return s->serialized; }
int hd_session_spin(const hd_session *s, int lane) { return lane ? s->lane_spin : s->spin; }
void hd_session_cpus(const hd_session *s, int *own, int *node)
{
    *own = s->own_cpus;
    *node = s->node_cpus;
}
void hd_mpi_lock(const hd_session *s)
{
    if (s->serialized)
        pthread_mutex_lock((pthread_mutex_t *)&s->mpi_mu);
}
void hd_mpi_unlock(const hd_session *s)
{
    if (s->serialized)
        pthread_mutex_unlock((pthread_mutex_t *)&s->mpi_mu);
}

void hd_session_progress(hd_session *s)
{
    int flag;
    hd_mpi_lock(s);
    MPI_Iprobe(MPI_ANY_SOURCE, 0, s->ctl, &flag, MPI_STATUS_IGNORE);
    hd_mpi_unlock(s);
}

/* ---- open and close ---- */

static void count_cpus(hd_session *s, MPI_Comm node)
{
    cpu_set_t mine;
    int own, all;
    CPU_ZERO(&mine);
    if (sched_getaffinity(0, sizeof mine, &mine))
        for (int i = 0; i < (int)sysconf(_SC_NPROCESSORS_ONLN) && i < CPU_SETSIZE; i++)
            CPU_SET(i, &mine);
    own = CPU_COUNT(&mine);
    MPI_Allreduce(MPI_IN_PLACE, &mine, (int)sizeof mine, MPI_BYTE, MPI_BOR, node);
    all = CPU_COUNT(&mine);
    s->own_cpus = own;
    s->node_cpus = all;
    s->spin = all >= s->node_n;
    s->lane_spin = own >= 2 && all >= 2 * s->node_n;
}

static void fill_page(hd_session *s, MPI_Comm node)
{
    void *at = NULL;
    struct stat st;
    uint64_t ns[2] = {0, 0};
    s->page_bytes = sizeof(entry) * (size_t)s->node_n;
    hd_session_share(node, s->page_bytes, &at);
    s->page = at;
    s->pidfd = malloc((size_t)s->node_n * sizeof *s->pidfd);
    s->dead = calloc((size_t)s->node_n, sizeof *s->dead);
    if (s->page) {
        entry *e = &s->page[s->slot];
        e->pid = (uint32_t)getpid();
        e->world_rank = (uint32_t)s->rank;
        e->beat = e->since = hd_now();
        __atomic_store_n(&e->state, RUNNING, __ATOMIC_RELEASE);
    }
    if (stat("/proc/self/ns/pid", &st) == 0)
        ns[0] = (uint64_t)st.st_ino, ns[1] = ~ns[0];
    /* Also a barrier: the pids are filled in. */
    MPI_Allreduce(MPI_IN_PLACE, ns, 2, MPI_UINT64_T, MPI_MAX, node);
    for (int i = 0; i < s->node_n; i++) {
        s->pidfd[i] = ns[0] == ~ns[1] ? NO_PIDFD : UNSEEN;
        if (s->page && i != s->slot && s->pidfd[i] != UNSEEN) {
            int fd = (int)syscall(SYS_pidfd_open, s->page[i].pid, 0);
            s->pidfd[i] = fd >= 0 ? fd : NO_PIDFD;
        }
    }
    hd_exit_follow(s);
}

int hd_session_open(MPI_Comm from, double timeout, hd_session **out, char *text, size_t room)
{
    hd_session *s = calloc(1, sizeof *s);
    MPI_Comm node = MPI_COMM_NULL;
    int rc, level = MPI_THREAD_SINGLE;
    char said[256];
    hd_text t;

    *out = NULL;
    hd_text_init(&t, text, room);
    if (!s) {
        hd_say(&t, "no memory for a session");
        return HD_ERR_MEMORY;
    }
    s->refs = 1;
    pthread_mutex_init(&s->mu, NULL);
    pthread_mutex_init(&s->mpi_mu, NULL);
    MPI_Query_thread(&level);
    s->serialized = level < MPI_THREAD_MULTIPLE;
    if ((rc = hd_meet(from, hd_until(timeout), &s->ctl, said, sizeof said))) {
        if (rc == HD_ERR_TIMEOUT)
            hd_say(&t, "timeout after %.3g s in init_process_group: ", timeout);
        else
            hd_say(&t, "init_process_group: ");
        hd_say(&t, "%s. All ranks must call it; it may be called again.", said);
        free(s);
        return rc;
    }
    MPI_Comm_rank(s->ctl, &s->rank);
    MPI_Comm_size(s->ctl, &s->size);
    rc = MPI_Comm_split_type(s->ctl, MPI_COMM_TYPE_SHARED, s->rank, MPI_INFO_NULL, &node);
    if (rc != MPI_SUCCESS) {
        hd_say(&t, "MPI_Comm_split_type failed (error %d)", rc);
        free(s);
        return HD_ERR_BACKEND;
    }
    MPI_Comm_size(node, &s->node_n);
    MPI_Comm_rank(node, &s->slot);
    s->node = hd_random64();
    MPI_Bcast(&s->node, 1, MPI_UINT64_T, 0, node);
    count_cpus(s, node); /* also a barrier */
    if (s->slot == 0)
        unlink_mpich_segment();
    fill_page(s, node);
    hd_hydra_hold(node, s->node, s->slot, s->node_n, s->held);
    MPI_Comm_free(&node);
    hd_watchdog_start(s);
    *out = s;
    return HD_OK;
}

void hd_session_ref(hd_session *s) { __atomic_fetch_add(&s->refs, 1, __ATOMIC_ACQ_REL); }

void hd_session_unref(hd_session *s)
{
    int down = 0;
    if (__atomic_sub_fetch(&s->refs, 1, __ATOMIC_ACQ_REL))
        return;
    hd_session_set_leaving(s);
    hd_watchdog_stop(s);
    for (int i = 0; i < s->node_n; i++)
        if (s->pidfd && s->pidfd[i] >= 0)
            close(s->pidfd[i]);
    for (int i = 0; i < HD_HELD; i++)
        if (s->held[i] >= 0)
            close(s->held[i]);
    MPI_Finalized(&down);
    if (!down)
        MPI_Comm_free(&s->ctl);
    hd_exit_unfollow(s);
    free(s->pidfd);
    free(s->dead);
    pthread_mutex_destroy(&s->mu);
    pthread_mutex_destroy(&s->mpi_mu);
    free(s);
}

void hd_session_adopt(hd_session *s, hd_comm *c)
{
    pthread_mutex_lock(&s->mu);
    c->next = s->comms;
    s->comms = c;
    pthread_mutex_unlock(&s->mu);
}

void hd_session_forget(hd_session *s, hd_comm *c)
{
    pthread_mutex_lock(&s->mu);
    for (hd_comm **p = &s->comms; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            break;
        }
    pthread_mutex_unlock(&s->mu);
}
