/* A rank that ends before MPI has started. The other ranks wait for it in MPI_Init, where nothing
 * can be raised. MPICH's launcher ends a job only for ranks that have reached MPI_Init or were
 * killed by a signal. So a rank that ends with an error before that sends the launcher an "abort"
 * in its own protocol (PMI-1). Open MPI's mpirun and srun end the job by themselves. */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hd_early.h"
#include "hd_last_words.h"
#include "hd_process.h"

static pid_t early_pid;

/* The connection to MPICH's launcher, hydra, or -1. MPI_LOCALRANKID is checked because Slurm sets
 * PMI_FD as well, but speaks another protocol there. */
static int hydra(void)
{
    const char *fd = getenv("PMI_FD");
    struct stat st;
    if (!fd || !getenv("PMI_RANK") || !getenv("MPI_LOCALRANKID") || fstat(atoi(fd), &st) ||
        !S_ISSOCK(st.st_mode))
        return -1;
    return atoi(fd);
}

/* A program that a rank has started inherits the rank's variables, but is not a rank. Between a
 * rank and the launcher there may be shells, but no Python. */
static int is_rank(void)
{
    char own[256] = "", name[64], exe[64];
    pid_t pid = getppid();
    if (readlink("/proc/self/exe", own, sizeof own - 1) < 0)
        return 0;
    for (int k = 0; k < 16 && pid > 1; k++) {
        char other[256] = "";
        const pid_t parent = hd_process_parent(pid, name, sizeof name);
        if (strncmp(name, "hydra", 5) == 0 || strncmp(name, "mpiexec", 7) == 0)
            return 1;
        snprintf(exe, sizeof exe, "/proc/%d/exe", (int)pid);
        if (readlink(exe, other, sizeof other - 1) > 0 && strcmp(other, own) == 0)
            return 0;
        pid = parent;
    }
    return 0;
}

int hd_end_job_early(int status)
{
    char line[64];
    const int fd = hydra();
    int n;
    if (fd < 0 || !is_rank())
        return 0;
    n = snprintf(line, sizeof line, "cmd=abort exitcode=%d\n",
                 status > 0 && status < 256 ? status : 1);
    return write(fd, line, (size_t)n) == n;
}

static void at_exit(int status, void *arg)
{
    char line[256];
    int up = 0;
    (void)arg;
    status &= 0xff;
    MPI_Initialized(&up);
    if (up || !status || early_pid != getpid() || !is_rank())
        return;
    snprintf(line, sizeof line,
             "[hpcdist rank %s of %s, pid %d] ends with status %d before init_process_group: "
             "ending the job",
             getenv("PMI_RANK"), getenv("PMI_SIZE") ? getenv("PMI_SIZE") : "?", (int)getpid(),
             status);
    hd_tell(line);
    hd_until_read();
    hd_end_job_early(status);
}

void hd_arm_early(void)
{
    if (early_pid || hydra() < 0)
        return;
    early_pid = getpid();
    on_exit(at_exit, NULL);
}
