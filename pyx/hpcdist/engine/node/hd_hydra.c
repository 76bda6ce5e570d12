/* Hydra, the launcher of MPICH, kills all processes of a node as soon as the connections of one of
 * them close, before the others can say which rank died. So each rank holds copies of its
 * neighbour's connections: the watchdogs then see a death first, name it and abort the job. If they
 * do not, hydra does when the copies close with their holder. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "hd_hydra.h"
#include "hd_session.h"

static struct {
    int fd; /* 0: none is known */
    dev_t device;
    ino_t inode; /* the number may become another file's */
} own_end;
static int leaves;

static int own_connection(void)
{
    const char *fd = getenv("PMI_FD");
    int n;
    if (!fd || !getenv("MPI_LOCALNRANKS")) /* only hydra sets the latter */
        return -1;
    n = atoi(fd);
    return n > 2 && fcntl(n, F_GETFD) >= 0 ? n : -1;
}

static socklen_t address(struct sockaddr_un *a, uint64_t node, int slot)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX; /* an abstract name: no file */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                       (size_t)snprintf(a->sun_path + 1, sizeof a->sun_path - 1,
                                        "hpcdist-%016llx-%d", (unsigned long long)node, slot));
}

/* Sends one byte with file descriptors attached. */
typedef struct parcel {
    char byte;
    struct iovec io;
    struct msghdr m;
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(HD_HELD * sizeof(int))];
    } control;
} parcel;

static void pack(parcel *p)
{
    memset(p, 0, sizeof *p);
    p->io = (struct iovec){&p->byte, 1};
    p->m.msg_iov = &p->io;
    p->m.msg_iovlen = 1;
    p->m.msg_control = p->control.room;
    p->m.msg_controllen = sizeof p->control.room;
}

void hd_hydra_copy(MPI_Comm comm, uint64_t node, int slot, int n, int held[HD_HELD])
{
    const int own[HD_HELD] = {own_connection(), STDOUT_FILENO, STDERR_FILENO};
    struct stat st;
    int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un a;
    parcel p;
    socklen_t len = address(&a, node, slot);

    if (own[0] >= 0 && !fstat(own[0], &st) && S_ISSOCK(st.st_mode)) {
        own_end.device = st.st_dev;
        own_end.inode = st.st_ino;
        own_end.fd = own[0];
    }
    if (s >= 0 && bind(s, (struct sockaddr *)&a, len)) {
        close(s);
        s = -1;
    }
    MPI_Barrier(comm);
    if (s >= 0 && own[0] >= 0 && n > 1) {
        pack(&p);
        p.m.msg_namelen = address(&a, node, (slot + 1) % n);
        p.m.msg_name = &a;
        p.control.head = (struct cmsghdr){CMSG_LEN(sizeof own), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(&p.control.head), own, sizeof own);
        /* If this fails, hydra is first, as without us. */
        (void)!sendmsg(s, &p.m, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    MPI_Barrier(comm);
    for (int i = 0; i < HD_HELD; i++)
        held[i] = -1;
    pack(&p);
    if (s >= 0 && recvmsg(s, &p.m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) == 1) {
        const struct cmsghdr *c = CMSG_FIRSTHDR(&p.m);
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
            c->cmsg_len == CMSG_LEN(sizeof own))
            memcpy(held, CMSG_DATA(c), sizeof own);
    }
    if (s >= 0)
        close(s);
}

/* Hydra does not notice the death of its process on another node, and MPI does not read the
 * connection before it ends: the ranks there would run for ever, and the others wait for them. */
int hd_hydra_gone(void)
{
    struct pollfd end = {own_end.fd, 0, 0};
    struct stat st;
    if (!own_end.fd || __atomic_load_n(&leaves, __ATOMIC_ACQUIRE) || poll(&end, 1, 0) <= 0 ||
        !(end.revents & POLLHUP) || fstat(own_end.fd, &st) || st.st_dev != own_end.device ||
        st.st_ino != own_end.inode)
        return 0;
    return !__atomic_load_n(&leaves, __ATOMIC_ACQUIRE); /* it may have begun to meanwhile */
}

void hd_hydra_leave(void) { __atomic_store_n(&leaves, 1, __ATOMIC_RELEASE); }
