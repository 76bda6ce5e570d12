/* The end of the process, and of the job with it: a rank that leaves with an error must not leave
 * the others waiting. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hd_session.h"

/* The entry that tells the others that this process is on its way out; kept mapped after the
 * session. */
static entry *exit_page;
static int exit_open; /* its session still uses it */
static int exit_n, exit_slot, exit_whole; /* exit_whole: the node's ranks are all the ranks */
static size_t exit_bytes;
static int armed, armed_owner;
static pid_t armed_pid;
static int poisoned;
static int exit_same_pids; /* the pids on the page are valid in this process's namespace */
static struct pollfd *exit_peers; /* set while this process waits, at its end, for the others */

int hd_in_child(void) { return armed_pid && armed_pid != getpid(); }

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

/* A thread of ours that is inside MPI while MPI ends would crash or hang the process. */
static int threads_out_of_mpi(void)
{
    const int64_t until = hd_now() + 3000000000LL;
    if (!hd_p2p_shutdown())
        return 0;
    while (__atomic_load_n(&hd_lanes_busy, __ATOMIC_SEQ_CST) || __atomic_load_n(&hd_callers, __ATOMIC_SEQ_CST)) {
        struct timespec ts = {0, 1000000};
        if (hd_now() > until)
            return 0;
        nanosleep(&ts, NULL);
    }
    return 1;
}

/* MPI_Finalize, by any caller, deletes the attributes of MPI_COMM_SELF before anything else. */
static int before_finalize(MPI_Comm comm, int key, void *value, void *extra)
{
    (void)comm, (void)key, (void)value, (void)extra;
    if (!hd_in_child() && !threads_out_of_mpi())
        hd_abort(1, "[hpcdist] MPI is finalized while a thread is inside an operation: aborting the job");
    return MPI_SUCCESS;
}

static void *abort_fallback(void *code)
{
    struct timespec ts = {3, 0};
    nanosleep(&ts, NULL);
    _exit((int)(intptr_t)code);
    return NULL;
}

/* Waits until the launcher has read what this process wrote. A process that aborts takes the
 * launcher down with it, and what is still in the pipe is lost: with MPICH's hydra, the last words
 * of 3 ranks in 100. A reader that does not read must not hold the job up: the wait ends after half
 * a second. */
static void until_read(int fd)
{
    struct stat st;
    int unread = 0;
    if (fstat(fd, &st) || !S_ISFIFO(st.st_mode))
        return;
    for (int k = 0; k < 500; k++) {
        struct timespec ts = {0, 1000000};
        if (ioctl(fd, FIONREAD, &unread) || unread == 0)
            return;
        nanosleep(&ts, NULL);
    }
}

/* A file of shared memory has a name only while ranks open it. A job that ends in between leaves
 * the name behind: the rank that ends the job removes the files named after the node's ranks. */
static void unlink_segments(void)
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

void hd_until_read(void)
{
    until_read(STDOUT_FILENO);
    until_read(STDERR_FILENO);
}

static int witness = -1;

void hd_abort_tell(int fd) { witness = fd; }

/* Whether fd is the file or pipe that stderr writes to. */
static int is_stderr(int fd)
{
    struct stat one, other;
    return !fstat(fd, &one) && !fstat(STDERR_FILENO, &other) && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

/* A pipe without a reader fills up, and a write to it then waits for ever: this one waits half a
 * second at most. */
static void tell(int fd, const char *why)
{
    char line[HD_TEXT + 2];
    struct pollfd room = {fd, POLLOUT, 0};
    const int n = snprintf(line, sizeof line, "%s\n", why);
    if (n > 0 && poll(&room, 1, 500) == 1 && (room.revents & POLLOUT))
        /* Below PIPE_BUF: it fits. */
        (void)!write(fd, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

void hd_abort(int code, const char *why)
{
    pthread_t t;
    int up = 0, down = 0;
    if (code <= 0 || code > 255)
        code = 1;
    /* First, because what follows may wait for a reader of stdout, and MPI_Abort itself can
     * hang. */
    if (pthread_create(&t, NULL, abort_fallback, (void *)(intptr_t)code) == 0)
        pthread_detach(t);
    unlink_segments();
    if (why && why[0]) {
        tell(STDERR_FILENO, why);
        if (witness >= 0 && !is_stderr(witness))
            tell(witness, why);
    }
    fflush(stdout);
    hd_until_read();
    until_read(witness);
    if (hd_pmi_active() && exit_page) /* without a launcher the others' watchdogs end them */
        __atomic_store_n(&exit_page[exit_slot].state, ABORTED, __ATOMIC_RELEASE);
    MPI_Initialized(&up);
    MPI_Finalized(&down);
    if (up && !down)
        MPI_Abort(MPI_COMM_WORLD, code);
    else if (!up)
        hd_end_job_early(code);
    _exit(code);
}

void hd_session_poisoned(hd_session *s)
{
    (void)s;
    poisoned = 1;
}

static void *failing_main(void *arg)
{
    int64_t ns = (int64_t)(intptr_t)arg;
    struct timespec ts = {ns / 1000000000, ns % 1000000000};
    nanosleep(&ts, NULL);
    hd_abort(1, "[hpcdist] the process did not end after its error: aborting the job");
    return NULL;
}

void hd_failing(double grace_s)
{
    pthread_t t;
    if (pthread_create(&t, NULL, failing_main, (void *)(intptr_t)(int64_t)(grace_s * 1e9)) == 0)
        pthread_detach(t);
}

/* Without a launcher: opens the descriptors that hd_exit_watch() polls while this process waits for
 * the others to end. */
static void watch_peers(void)
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
        fprintf(stderr, "[hpcdist rank %u, pid %d] rank %u (pid %u) has died, and this rank waits for it in "
                "MPI_Finalize: ending the process\n", exit_page[exit_slot].world_rank, (int)getpid(),
                exit_page[gone].world_rank, exit_page[gone].pid);
        fflush(stderr);
        _exit(71); /* EX_OSERR */
    }
}

/* Runs inside libc's exit(), after Python has gone, with the exit status: the only place that sees
 * the status of `sys.exit(3)`. MPI_Finalize would wait for ranks that are waiting for this one. */
static void at_exit(int status, void *arg)
{
    int down = 0, others = 0;
    (void)arg;
    if (hd_in_child() || !armed)
        return;
    MPI_Finalized(&down);
    if (down)
        return;
    status &= 0xff;
    if (status != 0 && exit_page && exit_n >= 1) {
        /* If all ranks end with an error, the job ends by itself: give the others a moment. */
        for (int k = 0; k < 100; k++) {
            struct timespec ts = {0, 10000000};
            others = !exit_whole;
            for (int i = 0; i < exit_n; i++)
                others |= __atomic_load_n(&exit_page[i].state, __ATOMIC_ACQUIRE) == RUNNING;
            if (!others)
                break;
            nanosleep(&ts, NULL);
        }
        if (others) {
            char buffer[256];
            snprintf(buffer, sizeof buffer,
                     "[hpcdist rank %u, pid %d] exits with status %d while other ranks are still running: "
                     "aborting the job",
                     exit_page[exit_slot].world_rank, (int)getpid(), status);
            hd_abort(status, buffer);
        }
    }
    if (!armed_owner)
        return;
    if (hd_pmi_active()) {
        if (status != 0)
            return; /* the others will not arrive, and there is no launcher to tell */
        watch_peers();
        /* Replaces the process manager's barrier, which hd_pmi.c does not have. */
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (poisoned) { /* MPI_Finalize may wait for messages that never arrive */
        pthread_t t;
        if (pthread_create(&t, NULL, abort_fallback, (void *)(intptr_t)status) == 0)
            pthread_detach(t);
    }
    MPI_Finalize();
}

void hd_arm_exit(int owns_mpi)
{
    int key = MPI_KEYVAL_INVALID;
    armed_owner = owns_mpi;
    if (armed && armed_pid == getpid())
        return;
    armed = 1;
    armed_pid = getpid();
    on_exit(at_exit, NULL);
    if (MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &key, NULL) == MPI_SUCCESS)
        MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
}
