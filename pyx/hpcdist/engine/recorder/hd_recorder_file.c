/* The file of the flight recorder: /dev/shm/hpcdist.UID/JOB-rRANK-pPID. The process holds a lock on
 * it for as long as it lives, which the kernel drops however it ends. So whether a file is in use
 * can be seen from any pid namespace. A process that ends in order removes its file. What others
 * leave is kept for an hour, for its reader, unless it takes much of /dev/shm. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_last_words.h"
#include "hd_recorder.h"
#include "hd_recorder_file.h"

#define PATH 4096               /* bytes of the path of a copy */
#define KEEP_NS 3600000000000LL /* how long the file of a dead process is kept */
#define KEEP_SHARE 16           /* and at most 1/16 of /dev/shm in all */
#define LEAST_FREE 4            /* a file is made where there is four times as much room */

static int wish = 1024;
static char folder[PATH - 64], path[HD_REC_PATH];
static int64_t dumped;  /* ns */
static uint32_t copied; /* failures that the last copy has */

void hd_rec_wish(int operations, const char *to)
{
    wish = operations;
    folder[0] = 0;
    if (strlen(to) < sizeof folder)
        memcpy(folder, to, strlen(to) + 1);
}

const char *hd_rec_path(void) { return path; }

static size_t head_bytes(void) { return hd_whole_pages(sizeof(hd_rec_head)); }

/* ---- the folder ---- */

/* This user's folder, or -1. Anyone may make a folder of that name first; only one that belongs to
 * this user, and that nobody else can read, will do. */
static int open_folder(void)
{
    char name[64];
    struct stat st;
    int fd = -1;
    snprintf(name, sizeof name, "/dev/shm/hpcdist.%u", (unsigned)geteuid());
    for (int k = 0; k < 3 && fd < 0; k++) { /* another process may remove it, empty, in between */
        if (mkdir(name, 0700) && errno != EEXIST)
            return -1;
        fd = open(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    if (fd >= 0 && (fstat(fd, &st) || st.st_uid != geteuid() || (st.st_mode & 077))) {
        close(fd);
        return -1;
    }
    return fd;
}

typedef struct leftover {
    char name[80];
    int64_t seen; /* ns since 1970: when its process was last known to live */
    int64_t bytes;
} leftover;

/* 1: it is this user's, and its process is gone. */
static int is_leftover(int dir, const char *name, leftover *out)
{
    const int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    const size_t length = strlen(name) + 1;
    hd_rec_head h;
    struct stat st;
    int gone;
    if (fd < 0)
        return 0;
    gone = !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
           length <= sizeof out->name && flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (gone) {
        memcpy(out->name, name, length);
        out->bytes = st.st_size;
        out->seen = st.st_mtim.tv_sec * 1000000000LL;
        if (pread(fd, &h, sizeof h, 0) == sizeof h && h.last[h.turn & 1].real > out->seen)
            out->seen = h.last[h.turn & 1].real;
    }
    close(fd);
    return gone;
}

static int newest_first(const void *a, const void *b)
{
    const int64_t x = ((const leftover *)a)->seen, y = ((const leftover *)b)->seen;
    return (x < y) - (x > y);
}

static void remove_leftovers(int dir)
{
    struct timespec t;
    struct statvfs space;
    leftover *all = NULL, *more;
    size_t n = 0, room = 0;
    int64_t now, bytes = 0, most = 64 << 20;
    struct dirent *file;
    DIR *list = fdopendir(dup(dir));
    while (list && (file = readdir(list))) {
        if (n == room) {
            room = room ? 2 * room : 64;
            if (!(more = realloc(all, room * sizeof *all)))
                break;
            all = more;
        }
        n += (size_t)is_leftover(dir, file->d_name, &all[n]);
    }
    if (list)
        closedir(list);
    clock_gettime(CLOCK_REALTIME, &t);
    now = t.tv_sec * 1000000000LL;
    if (fstatvfs(dir, &space) == 0)
        most = (int64_t)(space.f_blocks * space.f_frsize) / KEEP_SHARE;
    if (n)
        qsort(all, n, sizeof *all, newest_first);
    for (size_t i = 0; i < n; i++) {
        bytes += all[i].bytes;
        if (bytes > most || now - all[i].seen > KEEP_NS)
            unlinkat(dir, all[i].name, 0);
    }
    free(all);
}

/* ---- the file ---- */

/* Its memory, all of it allocated: a full /dev/shm is found here, not by a SIGBUS later. */
static void *make_file(int dir, const char *name, size_t bytes)
{
    struct statvfs space;
    void *at = MAP_FAILED;
    int fd;
    if (fstatvfs(dir, &space) || space.f_bavail * space.f_frsize < LEAST_FREE * bytes)
        return MAP_FAILED;
    fd = openat(dir, name, O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return MAP_FAILED;
    /* The descriptor stays open: it has the lock. (A job that looks for leftovers holds another for
     * a moment.) */
    if (flock(fd, LOCK_SH) == 0 && posix_fallocate(fd, 0, (off_t)bytes) == 0)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (at == MAP_FAILED) {
        unlinkat(dir, name, 0);
        close(fd);
    }
    return at;
}

static void read_text(const char *file, char *to, size_t room)
{
    const int fd = open(file, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd >= 0 ? read(fd, to, room - 1) : -1;
    to[n > 0 ? n : 0] = 0;
    for (ssize_t i = 0; i + 1 < n; i++)
        if (!to[i])
            to[i] = ' ';
    if (fd >= 0)
        close(fd);
}

static void fill_head(hd_rec_head *h, uint32_t records)
{
    const char *slurm = getenv("SLURM_JOB_ID");
    h->version = HD_REC_VERSION;
    h->head_bytes = (uint32_t)head_bytes();
    h->record_bytes = sizeof(hd_record);
    h->records = records;
    h->log_bytes = HD_REC_LOG;
    h->stack_bytes = HD_REC_STACKS;
    h->pid = (uint32_t)getpid();
    h->uid = (uint32_t)geteuid();
    gethostname(h->host, sizeof h->host - 1);
    snprintf(h->launch, sizeof h->launch, "%.63s", slurm ? slurm : "");
    read_text("/proc/self/cmdline", h->program, sizeof h->program);
    hd_rec_clock_now(&h->first);
    h->last[0] = h->first;
    memcpy(h->magic, "hpcdrec\n", 8);
}

static void make(int rank, uint64_t job, int tidy)
{
    const int dir = open_folder();
    uint32_t records = 64;
    void *at = MAP_FAILED;
    char name[80];
    size_t bytes;

    while ((int)records < wish && records < 1u << 20)
        records *= 2;
    bytes = head_bytes() + HD_REC_LOG + HD_REC_STACKS + records * sizeof(hd_record);
    if (dir >= 0) {
        if (tidy)
            remove_leftovers(dir);
        snprintf(name, sizeof name, "%08x-r%d-p%d", (unsigned)(job >> 32), rank, (int)getpid());
        at = make_file(dir, name, bytes);
        if (at != MAP_FAILED)
            snprintf(path, sizeof path, "/dev/shm/hpcdist.%u/%s", (unsigned)geteuid(), name);
        close(dir);
    }
    if (at == MAP_FAILED)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return;
    hd_rec_clock_start();
    fill_head(at, records);
    hd_rec.head = at;
    hd_rec.log = (char *)at + head_bytes();
    hd_rec.stacks = hd_rec.log + HD_REC_LOG;
    hd_rec.bytes = bytes;
    hd_rec_tables();
    hd_rec.mask = records - 1;
    hd_rec.ring = (hd_record *)(hd_rec.stacks + HD_REC_STACKS);
}

void hd_rec_open(int rank, int size, uint64_t job, int tidy)
{
    if (!hd_rec.head && wish > 0)
        make(rank, job, tidy);
    if (hd_rec.head) {
        hd_rec_place(rank, size, 0);
        if (!hd_rec.head->job)
            hd_rec.head->job = job;
    }
}

void hd_rec_place(int rank, int active, int spares)
{
    hd_rec_head *h = hd_rec.head;
    if (!h)
        return;
    h->rank = rank;
    h->size = active;
    h->survival.waits = rank >= active;
    h->survival.spares = (uint32_t)spares;
}

void hd_rec_recovered(int deaths, int64_t ns)
{
    if (!hd_rec.head)
        return;
    hd_rec.head->survival.deaths += (uint32_t)deaths;
    hd_rec.head->survival.recoveries++;
    hd_rec_returned(ns);
}

void hd_rec_returned(int64_t ns)
{
    hd_rec_clock now;
    if (!hd_rec.head)
        return;
    hd_rec_clock_now(&now);
    hd_rec.head->survival.took += ns;
    hd_rec.head->survival.last = now.real;
}

void hd_rec_leave(void)
{
    if (!hd_rec.head)
        return;
    hd_rec_beat();
    __atomic_store_n(&hd_rec.head->left, 1, __ATOMIC_RELEASE);
    if (copied != hd_rec.failures)
        hd_rec_dump();
}

void hd_rec_remove(void)
{
    static int removed;
    if (path[0] && !__atomic_exchange_n(&removed, 1, __ATOMIC_SEQ_CST)) {
        unlink(path);
        *strrchr(path, '/') = 0;
        rmdir(path); /* unless others have files there */
        path[0] = 0;
    }
}

void hd_rec_drop(void) { memset(&hd_rec, 0, sizeof hd_rec); }

/* ---- copies ---- */

int hd_rec_dump_to(const char *to)
{
    char part[PATH + 8];
    const char *at = (const char *)hd_rec.head;
    size_t left = hd_rec.bytes;
    int fd, error = 0;
    if (!at || !to[0] || strlen(to) >= PATH)
        return at ? ENAMETOOLONG : -1;
    hd_rec_beat();
    snprintf(part, sizeof part, "%s.part", to);
    fd = open(part, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    while (left && !error) {
        const ssize_t n = write(fd, at, left);
        if (n > 0)
            at += n, left -= (size_t)n;
        else if (n == 0 || errno != EINTR)
            error = n ? errno : EIO;
    }
    if (close(fd) && !error)
        error = errno;
    if (!error && rename(part, to))
        error = errno;
    if (error)
        unlink(part);
    return error;
}

int hd_rec_dump(void)
{
    char to[PATH];
    if (!hd_rec.head || !folder[0])
        return -1;
    copied = hd_rec.failures;
    mkdir(folder, 0777);
    snprintf(to, sizeof to, "%s/%08x-rank%d.hpcdist", folder, (unsigned)(hd_rec.head->job >> 32),
             hd_rec.head->rank);
    return hd_rec_dump_to(to);
}

void hd_rec_dump_failed(void)
{
    const int64_t now = hd_now();
    int error;
    if (!folder[0] || copied == hd_rec.failures || (dumped && now - dumped < 1000000000))
        return;
    if ((error = hd_rec_dump()) > 0 && !dumped) {
        char line[PATH + 128];
        snprintf(line, sizeof line, "[hpcdist] the flight recorder cannot be copied: %.60s: %s",
                 strerror(error), folder);
        hd_tell(line);
    }
    dumped = now;
}
