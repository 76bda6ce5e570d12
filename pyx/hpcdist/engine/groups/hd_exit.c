/* The end of the process: libc's exit handler, which sees the exit status. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hd_abort.h"
#include "hd_base.h"
#include "hd_comm.h"
#include "hd_exit.h"
#include "hd_exit_page.h"
#include "hd_hydra.h"
#include "hd_job.h"
#include "hd_lane.h"
#include "hd_pmi.h"
#include "hd_poller.h"
#include "hd_prte.h"
#include "hd_recorder_file.h"
#include "hd_window.h"

static int armed, armed_owner;
static pid_t armed_pid;
static int poisoned, unmet;

/* The folder of the job's commits, which outlive its processes; "": there is none. */
static char commits[256];
static int commits_rank, commits_here;

int hd_in_child(void) { return armed_pid && armed_pid != getpid(); }

#define IN_FLIGHT 3000000000LL /* ns that operations get when MPI ends, */
#define GIVES_UP 2000000000LL  /* and then those whose other ranks have not come, to say so */

/* A thread of ours that is inside MPI while MPI ends would crash or hang the process. */
static int threads_out_of_mpi(void)
{
    const int64_t begun = hd_now();
    if (!hd_windows_shutdown() || !hd_p2p_shutdown())
        return 0;
    while (__atomic_load_n(&hd_lane_jobs, __ATOMIC_SEQ_CST) ||
           __atomic_load_n(&hd_callers, __ATOMIC_SEQ_CST)) {
        struct timespec ts = {0, 1000000};
        if (hd_now() > hd_later(begun, IN_FLIGHT))
            __atomic_store_n(&hd_lanes_end, 1, __ATOMIC_RELEASE);
        if (hd_now() > hd_later(begun, IN_FLIGHT + GIVES_UP))
            return 0;
        nanosleep(&ts, NULL);
    }
    return 1;
}

int hd_finalized;

void hd_exit_before_finalize(void)
{
    static int begun;
    if (__atomic_exchange_n(&begun, 1, __ATOMIC_ACQ_REL))
        return;
    __atomic_store_n(&hd_finalized, !hd_in_child(), __ATOMIC_RELEASE);
    hd_exit_set_finalizing();
    hd_hydra_leave();
    hd_prte_leave();
    if (!hd_in_child() && !threads_out_of_mpi())
        hd_abort(1, "[hpcdist] MPI is finalized while a thread is inside an operation: aborting "
                    "the job");
    if (!hd_in_child()) {
        hd_windows_close(NULL);
        hd_p2p_drain(NULL, 0.5); /* as at a program's end: those whose peer is there end well */
        hd_p2p_close(NULL);      /* no later call may test the others */
    }
}

/* MPI_Finalize, by any caller, deletes the attributes of MPI_COMM_SELF before anything else. But
 * MPICH's stops locking even before that: whoever can, calls the above first. */
static int before_finalize(MPI_Comm comm, int key, void *value, void *extra)
{
    (void)comm, (void)key, (void)value, (void)extra;
    hd_exit_before_finalize();
    return MPI_SUCCESS;
}

void hd_session_poisoned(hd_session *s)
{
    (void)s;
    poisoned = 1;
}

void hd_exit_mark(const char *folder, int rank, int here)
{
    if (folder[0] && strlen(folder) < sizeof commits)
        memcpy(commits, folder, strlen(folder) + 1);
    commits_rank = rank;
    commits_here = here;
}

/* Removes what is in the folder; with `marks_only` counts the ranks of the node that ended well. */
static int visit_commits(int dir, int marks_only)
{
    int marks = 0;
    const int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    for (struct dirent *e; d && (e = readdir(d));) {
        marks += !strncmp(e->d_name, "ended.", 6);
        if (!marks_only && e->d_name[0] != '.')
            unlinkat(dir, e->d_name, 0);
    }
    if (d)
        closedir(d);
    else if (fd >= 0)
        close(fd);
    return marks;
}

/* This rank ended well. The last one of the node removes the job's commits: nobody needs them, and
 * whoever started the job sees by that how it ended where the launcher's status does not say it. */
static void mark_ended(void)
{
    char name[32];
    int fd, dir;
    if (!commits[0])
        return;
    dir = open(commits, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (dir < 0)
        return;
    snprintf(name, sizeof name, "ended.%d", commits_rank);
    fd = openat(dir, name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
    if (fd >= 0 && visit_commits(dir, 1) >= commits_here) {
        visit_commits(dir, 0);
        rmdir(commits);
    }
    close(dir);
}

void hd_exit_unmet(int is) { unmet = is; }

/* MPI_Finalize would wait for ranks that are waiting for this one. */
static void leave_mpi(int status)
{
    int down = 0, others = 0;
    MPI_Finalized(&down);
    if (down && status == 0)
        mark_ended();
    if (down)
        return;
    if (status != 0 && hd_exit_rank() >= 0) {
        /* If all ranks end with an error, the job ends by itself: give the others a moment. */
        for (int k = 0; k < 100; k++) {
            struct timespec ts = {0, 10000000};
            if (!(others = hd_exit_others_run()))
                break;
            nanosleep(&ts, NULL);
        }
        if (others) {
            char buffer[256];
            snprintf(buffer, sizeof buffer,
                     "[hpcdist rank %d, pid %d] exits with status %d while other ranks are still "
                     "running: aborting the job",
                     hd_exit_rank(), (int)getpid(), status);
            hd_abort(status, buffer);
        }
    }
    if (!armed_owner) {
        if (status == 0)
            mark_ended();
        return;
    }
    if (hd_pmi_active()) {
        if (status != 0)
            return; /* the others will not arrive, and there is no launcher to tell */
        hd_exit_watch_begin();
        /* Replaces the process manager's barrier, which hd_pmi.c does not have. */
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (status == 0 && poisoned)
        mark_ended();
    /* MPI_Finalize may wait for messages that never arrive, or for ranks that cannot be reached */
    if (unmet)
        hd_end_process_soon(status);
    else if (poisoned)
        hd_end_process_after_others(status);
    MPI_Finalize();
    if (status == 0 && !poisoned)
        mark_ended();
}

/* Runs inside libc's exit(), after Python has gone, with the exit status: the only place that sees
 * the status of `sys.exit(3)`. */
static void at_exit(int status, void *arg)
{
    (void)arg;
    if (hd_in_child() || !armed)
        return;
    status &= 0xff;
    hd_rec_leave();
    leave_mpi(status);
    if (status == 0)
        hd_rec_remove();
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
