/* Memory that the ranks of a node share, without leaving anything behind in /dev/shm. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_shared.h"

#define LARGE (4 << 20) /* bytes: from here on large pages are worth asking for */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it */
#endif

static int madvise_all(char *at, int64_t bytes, int advice)
{
    int rc;
    do
        rc = madvise(at, (size_t)bytes, advice);
    while (rc && errno == EINTR);
    return rc;
}

/* Every rank allocates its part, so that the part lies in memory near the rank. A full /dev/shm is
 * an error here, not a SIGBUS later. Large pages come with a write through a mapping that asks for
 * them, where /dev/shm allows them, but not with posix_fallocate. */
static int allocate(int fd, char *at, int64_t bytes, int rank, int n)
{
    const int64_t from = bytes * rank / n / 4096 * 4096;
    const int64_t to = rank == n - 1 ? bytes : bytes * (rank + 1) / n / 4096 * 4096;
    int rc = 0;
    if (to > from && bytes >= LARGE && !madvise(at, (size_t)bytes, MADV_HUGEPAGE) &&
        !madvise_all(at + from, to - from, MADV_POPULATE_WRITE))
        return 0;
    if (to > from)
        do
            rc = posix_fallocate(fd, (off_t)from, (off_t)(to - from));
        while (rc == EINTR);
    return rc;
}

/* Maps what all ranks have allocated, so that no later access has to. */
static void touch(char *at, int64_t bytes)
{
    if (madvise_all(at, bytes, MADV_POPULATE_WRITE))
        for (int64_t i = 0; i < bytes; i += 4096)
            __atomic_fetch_add(&at[i], 0, __ATOMIC_RELAXED);
}

/* Asked first: an attempt that fails would take all the memory there is for a moment. */
static int has_room(int fd, size_t bytes)
{
    struct statvfs room;
    return fstatvfs(fd, &room) || bytes / room.f_frsize < room.f_bavail;
}

int hd_share(MPI_Comm node, size_t bytes, void **out)
{
    char name[64] = "";
    int fd = -1, rank, n, ok, rc;
    void *at = MAP_FAILED;

    *out = NULL;
    MPI_Comm_rank(node, &rank);
    MPI_Comm_size(node, &n);
    if (rank == 0) {
        snprintf(name, sizeof name, "/hpcdist-%d-%016llx", (int)getpid(),
                 (unsigned long long)hd_random64());
        fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (fd < 0 || !has_room(fd, bytes) || ftruncate(fd, (off_t)bytes)) {
            if (fd >= 0)
                shm_unlink(name);
            name[0] = 0;
        }
    }
    if ((rc = MPI_Bcast(name, sizeof name, MPI_CHAR, 0, node))) {
        if (fd >= 0)
            close(fd);
        if (name[0])
            shm_unlink(name);
        return rc;
    }
    if (rank != 0 && name[0])
        fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd >= 0 && name[0])
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ok = at != MAP_FAILED;
    if ((rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, node)))
        ok = 0;
    /* Before anything is allocated: either all ranks have mapped it or none will. A job that is
     * killed leaves nothing behind. */
    if (rank == 0 && name[0])
        shm_unlink(name);
    if (ok) {
        ok = allocate(fd, at, (int64_t)bytes, rank, n) == 0;
        if ((rc = MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, node)))
            ok = 0;
    }
    if (fd >= 0)
        close(fd);
    if (!ok) {
        if (at != MAP_FAILED)
            munmap(at, bytes);
        return rc;
    }
    touch(at, (int64_t)bytes);
    *out = at;
    return MPI_SUCCESS;
}

/* MPICH keeps the name of its node's segment until MPI_Finalize, so each killed job would leave 2
 * MB behind in /dev/shm. All ranks of the node have mapped the segment when they are out of
 * MPI_Init: the name is no longer needed, and the memory is freed with the last of them. */
void hd_unlink_mpich_segment(void)
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
