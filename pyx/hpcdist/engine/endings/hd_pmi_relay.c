/* MPICH over Slurm's mpi/pmi2 plugin. The plugin promises room for values of 1024 bytes
 * (vallen_max), but reads lines of at most 1024 bytes, and a value travels in a line with its key.
 * A longer line arrives in two pieces; the other node's ranks then get a damaged address, and
 * MPI_Init dies or hangs. MPICH fills its values to the limit when a job has several nodes and UCX
 * carries the messages (pmodels/mpich#6924).
 *
 * So while MPI starts, a thread stands between the two and passes every byte on unchanged, except
 * the promise, which it lowers. Afterwards MPI gets the plugin's own socket back, under the number
 * it knows. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hd_pmi_relay.h"

/* "cmd=put kvsname=" 16, a name 20, " key=" 5, a key 64, " value=" 7, newline: with this a line
 * fits 1024 bytes. */
#define ROOM 896

static struct {
    int running, plugin, mpi, ours; /* plugin's socket; MPI's end and our end of the pair */
    char number[16];                /* the original value of PMI_FD */
    pid_t pid;                      /* a forked child has no thread to join */
    pthread_t thread;
} relay;

static int send_all(int fd, const char *data, ssize_t n)
{
    while (n > 0) {
        ssize_t k = send(fd, data, (size_t)n, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return -1;
        data += k;
        n -= k;
    }
    return 0;
}

/* Lowers the room in the answer to get_maxes. The answer arrives alone, because MPI waits for it.
 * Returns its new length. */
static ssize_t lower(char *text, ssize_t n, size_t size)
{
    static const char name[] = "vallen_max=";
    char *at, *end;
    char rest[256];
    if (n < 10 || strncmp(text, "cmd=maxes ", 10) != 0)
        return n;
    text[n] = 0;
    at = strstr(text, name);
    if (!at)
        return n;
    at += sizeof name - 1;
    if (strtol(at, &end, 10) <= ROOM || strlen(end) >= sizeof rest)
        return n;
    strcpy(rest, end);
    return at - text + snprintf(at, size - (size_t)(at - text), "%d%s", ROOM, rest);
}

static void *pass_on(void *unused)
{
    char data[4096];
    struct pollfd fds[2] = {{.fd = relay.ours, .events = POLLIN},
                            {.fd = relay.plugin, .events = POLLIN}};
    (void)unused;
    for (;;) {
        if (poll(fds, 2, -1) < 0) {
            if (errno == EINTR)
                continue;
            break;
        }
        for (int i = 0; i < 2; i++) {
            ssize_t n;
            if (!fds[i].revents)
                continue;
            n = recv(fds[i].fd, data, sizeof data - 64, 0);
            if (n < 0 && errno == EINTR)
                continue;
            /* Hd_pmi_relay_end was called, or the plugin has gone: MPI must see that. */
            if (n <= 0) {
                shutdown(relay.ours, SHUT_RDWR);
                return NULL;
            }
            if (i == 1)
                n = lower(data, n, sizeof data);
            if (send_all(fds[1 - i].fd, data, n)) {
                shutdown(relay.ours, SHUT_RDWR);
                return NULL;
            }
        }
    }
    return NULL;
}

/* The last message of MPI (that it aborts) must still get through. */
static void drain(void)
{
    if (!relay.running || relay.pid != getpid())
        return;
    relay.running = 0;
    shutdown(relay.mpi, SHUT_WR);
    pthread_join(relay.thread, NULL);
}

void hd_pmi_relay_begin(void)
{
    static int armed;
    const char *type = getenv("SLURM_MPI_TYPE"), *fd = getenv("PMI_FD");
    int pair[2];
    if (!type || strcmp(type, "pmi2") != 0 || !fd || strlen(fd) >= sizeof relay.number ||
        atoi(fd) <= 0)
        return;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        return; /* MPI may well start without the relay */
    relay.plugin = atoi(fd);
    relay.mpi = pair[0];
    relay.ours = pair[1];
    if (pthread_create(&relay.thread, NULL, pass_on, NULL)) {
        close(pair[0]);
        close(pair[1]);
        return;
    }
    if (!armed)
        armed = !atexit(drain);
    strcpy(relay.number, fd);
    char mine[16];
    snprintf(mine, sizeof mine, "%d", relay.mpi);
    setenv("PMI_FD", mine, 1);
    relay.pid = getpid();
    relay.running = 1;
}

void hd_pmi_relay_end(void)
{
    if (!relay.running)
        return;
    drain();
    /* MPI is not waiting for an answer now, so nothing is in transit in the pair. */
    dup2(relay.plugin, relay.mpi);
    fcntl(relay.mpi, F_SETFD, FD_CLOEXEC);
    close(relay.ours);
    setenv("PMI_FD", relay.number, 1);
}
