/* What a process says at its end. A launcher that is about to go must have read it. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_last_words.h"

static int witness = -1;

void hd_abort_tell(int fd) { witness = fd; }

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

void hd_until_read(void)
{
    until_read(STDOUT_FILENO);
    until_read(STDERR_FILENO);
    until_read(witness);
}

/* Whether fd is the file or pipe that stderr writes to. */
static int is_stderr(int fd)
{
    struct stat one, other;
    return !fstat(fd, &one) && !fstat(STDERR_FILENO, &other) && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

/* A pipe without a reader fills up, and a write to it then waits for ever: this one waits half a
 * second at most. */
static void tell_to(int fd, const char *why)
{
    char line[HD_TEXT + 2];
    struct pollfd room = {fd, POLLOUT, 0};
    const int n = snprintf(line, sizeof line, "%s\n", why);
    if (n > 0 && poll(&room, 1, 500) == 1 && (room.revents & POLLOUT))
        /* Below PIPE_BUF: it fits. */
        (void)!write(fd, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

void hd_tell(const char *line) { tell_to(STDERR_FILENO, line); }

void hd_last_words(const char *why)
{
    if (why && why[0]) {
        hd_tell(why);
        if (witness >= 0 && !is_stderr(witness))
            tell_to(witness, why);
    }
    fflush(stdout);
}
