/* The last part of a job without a launcher. hpcdist.launchers.pmi answers MPI's process-manager
 * requests (PMI-1) from Python while MPI starts. The later requests come while MPI ends: after
 * Python has gone, from libc's exit. So this thread answers them. It also ensures that a rank which
 * waits there for another does not wait for one that died: no other process would end it. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_exit_page.h"
#include "hd_pmi.h"

#define LINE 4096

static int pmi_fd = -1;
static pid_t pmi_pid;

int hd_pmi_active(void) { return pmi_fd >= 0 && pmi_pid == getpid(); }

static void reply(const char *text)
{
    size_t n = strlen(text);
    while (n) {
        ssize_t k = write(pmi_fd, text, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return; /* MPI has closed its end and does not wait for the answer */
        text += k;
        n -= (size_t)k;
    }
}

/* Returns 0 after the last request. */
static int answer(const char *line, int *in_mcmd)
{
    char command[64] = "";
    char text[128];
    /* A command of several lines: MPI_Comm_spawn. */
    if (*in_mcmd || strncmp(line, "mcmd=", 5) == 0) {
        *in_mcmd = strcmp(line, "endcmd") != 0;
        if (!*in_mcmd)
            reply("cmd=spawn_result rc=-1 msg=there_is_no_process_manager\n");
        return 1;
    }
    if (sscanf(line, "cmd=%63s", command) != 1)
        return 1;
    if (strcmp(command, "finalize") == 0) {
        reply("cmd=finalize_ack rc=0\n");
        return 0;
    }
    if (strcmp(command, "abort") == 0) /* abort has no answer */
        return 0;
    if (strcmp(command, "barrier_in") == 0) {
        /* MPI_Finalize's barrier: hd_exit.c calls MPI_Barrier just before it, to the same
         * effect. */
        reply("cmd=barrier_out rc=0\n");
        return 1;
    }
    snprintf(text, sizeof text, "cmd=%s_result rc=-1 msg=there_is_no_process_manager\n", command);
    reply(text);
    return 1;
}

static void *pmi_main(void *arg)
{
    char buffer[LINE];
    size_t used = 0;
    int in_mcmd = 0;
    (void)arg;
    prctl(PR_SET_NAME, "hpcdist-pmi");
    for (;;) {
        struct pollfd p = {pmi_fd, POLLIN, 0};
        int ready = poll(&p, 1, 100);
        hd_exit_watch();
        if (ready <= 0)
            continue;
        ssize_t n = read(pmi_fd, buffer + used, sizeof buffer - 1 - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return NULL;
        used += (size_t)n;
        for (char *end; (end = memchr(buffer, '\n', used)) != NULL;) {
            size_t length = (size_t)(end - buffer) + 1;
            *end = 0;
            if (!answer(buffer, &in_mcmd))
                return NULL;
            used -= length;
            memmove(buffer, end + 1, used);
        }
        if (used >= sizeof buffer - 1)
            used = 0; /* no request is that long */
    }
}

int hd_pmi_answer(int fd)
{
    pthread_t t;
    if (hd_pmi_active())
        return HD_ERR_BACKEND;
    pmi_fd = fd;
    pmi_pid = getpid();
    if (hd_thread_start(&t, pmi_main, NULL)) {
        pmi_fd = -1;
        return HD_ERR_BACKEND;
    }
    pthread_detach(t);
    return HD_OK;
}
