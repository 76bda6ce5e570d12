/* Where Open MPI's launcher goes on without ranks that die, its own end does not end the ranks:
 * when the daemon of another node is killed, mpirun ends at once, and the ranks of its node would
 * run on without anybody who knows of them, beside a job that is started again. So the watchdog
 * looks at the launcher's process on this node. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include "hd_process.h"
#include "hd_prte.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

#define GENERATIONS 16 /* between a rank and the launcher there may be shells and wrappers */

static int launcher; /* a pidfd; 0: none was looked for, or it was not found */
static pid_t launcher_pid;
static int leaves;

void hd_prte_find(void)
{
    char name[64];
    pid_t pid = getppid();
    if (launcher || !getenv("PMIX_RANK"))
        return;
    for (int k = 0; k < GENERATIONS && pid > 1; k++) {
        const pid_t parent = hd_process_parent(pid, name, sizeof name);
        if (strncmp(name, "prte", 4) == 0) { /* prterun, which mpirun becomes, or a node's prted */
            const int fd = (int)syscall(SYS_pidfd_open, pid, 0);
            launcher_pid = pid;
            __atomic_store_n(&launcher, fd > 0 ? fd : 0, __ATOMIC_RELEASE);
            return;
        }
        pid = parent;
    }
}

int hd_prte_gone(void)
{
    struct pollfd end = {__atomic_load_n(&launcher, __ATOMIC_ACQUIRE), POLLIN, 0};
    if (!end.fd || __atomic_load_n(&leaves, __ATOMIC_ACQUIRE) || poll(&end, 1, 0) <= 0 ||
        !(end.revents & POLLIN) || !hd_process_ended(launcher_pid)) /* fd may be another file's */
        return 0;
    return !__atomic_load_n(&leaves, __ATOMIC_ACQUIRE); /* it may have begun to meanwhile */
}

void hd_prte_leave(void) { __atomic_store_n(&leaves, 1, __ATOMIC_RELEASE); }
